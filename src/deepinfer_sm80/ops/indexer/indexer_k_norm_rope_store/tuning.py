"""Launch configurations. Every number names the measurement that chose it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deepinfer_sm80.ops.variants import Variant

if TYPE_CHECKING:
    from collections.abc import Iterator

DIM, ROPE = 128, 64

STORE = Variant(
    op="indexer_k_norm_rope_store",
    name="row",
    kernel="deepinfer_sm80.ops.indexer.indexer_k_norm_rope_store.device:k_norm_rope_store_kernel",
    arguments={
        "key_ptr": "*bf16",
        "positions_ptr": "*i64",
        "table_ptr": "*fp32",
        "norm_ptr": "*bf16",
        "cache_ptr": "*u8",
        "slots_ptr": "*i64",
        "key_row": "i32",
        "position_step": "i32",
        "page16": "i32",
        "slot_step": "i32",
        "slots": "i32",
        "block_size": "i32",
        "table_rows": "i32",
        "ratio": "i32",
        "eps": "fp32",
    },
    constants={"DIM": DIM, "ROPE": ROPE},
    # A row is 128 elements: one warp, so that its sums need no shared memory. Not measured on a GPU.
    num_warps=1,
    num_stages=1,
    unaligned=("key_ptr", "positions_ptr", "slots_ptr"),
)


def variants() -> Iterator[Variant]:
    """Everything the launcher launches."""
    yield STORE
