"""Launch configuration of combine_topk_swa_indices, frozen."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deepinfer_sm80.ops.variants import Variant

if TYPE_CHECKING:
    from collections.abc import Iterator

_POINTERS = ("topk_ptr", "starts_ptr", "seq_lens_ptr", "gather_lens_ptr", "indices_ptr", "lens_ptr")

# No measurement on an Ampere GPU has chosen these yet. 640 columns are three passes of 256.
COMBINE = Variant(
    "combine_topk_swa_indices",
    "token",
    f"{__package__}.device:combine_kernel",
    {
        **dict.fromkeys(_POINTERS, "*i32"),
        "requests": "i32",
        "topk_stride": "i64",
        "out_stride": "i64",
        "width": "i32",
        "window_size": "i64",
        "ratio": "i64",
        "topk": "i64",
        "M": "i64",
        "N": "i64",
    },
    {"BLOCK": 256, "REQUESTS": 64},
    num_warps=2,
    num_stages=1,
    unaligned=_POINTERS,
)


def variants() -> Iterator[Variant]:
    yield COMBINE
