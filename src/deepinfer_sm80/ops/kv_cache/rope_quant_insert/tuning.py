"""Launch configuration of rope_quant_insert, frozen."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deepinfer_sm80.ops.kv_cache.layout import AMAX_FLOOR, NOPE_DIM, QUANT_GROUP, ROPE_DIM, SCALE_BYTES
from deepinfer_sm80.ops.variants import Variant

if TYPE_CHECKING:
    from collections.abc import Iterator

PAGE_UNIT = 8
"""Bytes that a page stride is a multiple of; a scale row has as many."""

# One warp, one token: 16 elements a thread, and a token that writes nothing leaves after two loads. No measurement on
# an Ampere GPU has chosen it.
INSERT = Variant(
    "rope_quant_insert",
    "token",
    f"{__package__}.device:insert_kernel",
    {
        "latent_ptr": "*bf16",
        "positions_ptr": "*i64",
        "table_ptr": "*fp32",
        "cache_ptr": "*u8",
        "slots_ptr": "*i64",
        "ratio": "i32",
        "table_rows": "i64",
        "table_stride": "i64",
        "num_slots": "i64",
        "block_size": "i32",
        "page_units": "i64",
    },
    {
        "NOPE": NOPE_DIM,
        "ROPE": ROPE_DIM,
        "GROUP": QUANT_GROUP,
        "SCALES": SCALE_BYTES,
        "AMAX_FLOOR": AMAX_FLOOR,
        "PAGE_UNIT": PAGE_UNIT,
    },
    num_warps=1,
    num_stages=1,
    unaligned=("positions_ptr", "table_ptr", "slots_ptr"),
)


def variants() -> Iterator[Variant]:
    yield INSERT
