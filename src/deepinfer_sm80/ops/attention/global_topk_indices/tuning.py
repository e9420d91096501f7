"""Launch configurations of global_topk_indices, frozen."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deepinfer_sm80.ops.variants import Variant

if TYPE_CHECKING:
    from collections.abc import Iterator

REQUEST_IDS = ("i32", "i64")


def slots(request_id: str) -> Variant:
    """The variant for request ids of a Triton integer type."""
    pointers = {
        "topk_ptr": "*i32",
        "owner_ptr": f"*{request_id}",
        "table_ptr": "*i32",
        "valid_ptr": "*u8",
        "indices_ptr": "*i32",
        "lens_ptr": "*i32",
    }
    sizes = dict.fromkeys(("width", "requests", "columns", "block_size"), "i32")
    strides = dict.fromkeys(("topk_stride", "table_stride", "out_stride"), "i64")
    # No measurement on an Ampere GPU has chosen these yet. 512 columns are one pass, four a thread.
    return Variant(
        "global_topk_indices",
        request_id,
        f"{__package__}.device:slots_kernel",
        {**pointers, **sizes, **strides},
        {"BLOCK": 512},
        num_warps=4,
        num_stages=1,
        unaligned=tuple(pointers),
    )


def variants() -> Iterator[Variant]:
    yield from map(slots, REQUEST_IDS)
