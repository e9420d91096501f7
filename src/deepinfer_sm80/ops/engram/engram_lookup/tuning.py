"""Launch configurations of engram_lookup, frozen."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deepinfer_sm80.ops.variants import Variant

if TYPE_CHECKING:
    from collections.abc import Iterator

IDS = ("i64", "i32")

# No measurement on an Ampere GPU has chosen these yet: 16 bytes of the table a thread, in one read.
ROWS = 8


def lookup(ids: str) -> Variant:
    """The variant for ids of a Triton integer type."""
    pointers = {"weight_ptr": "*u8", "scale_ptr": "*u8", "ids_ptr": f"*{ids}", "out_ptr": "*bf16"}
    numbers = {
        "results": "i64",
        "local_heads": "i32",
        **dict.fromkeys(("head_start", "heads", "token_stride", "head_stride", "vocab_start", "rows"), "i64"),
    }
    return Variant(
        "engram_lookup",
        ids,
        f"{__package__}.device:lookup_kernel",
        {**pointers, **numbers},
        {"DIM": 256, "GROUP": 32, "ROWS": ROWS},
        num_warps=4,
        num_stages=1,
        unaligned=("ids_ptr",),
    )


def variants() -> Iterator[Variant]:
    yield from map(lookup, IDS)
