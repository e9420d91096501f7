"""Launch configurations of dequantize_and_gather_k_cache, frozen."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deepinfer_sm80.ops.kv_cache.layout import NOPE_DIM, QUANT_GROUP, ROPE_DIM, SCALE_BYTES
from deepinfer_sm80.ops.variants import Variant

if TYPE_CHECKING:
    from collections.abc import Iterator

PAGE_UNIT = 8
"""Bytes that a page stride is a multiple of; a scale row has as many."""

OUT_UNITS = (8, 1)
"""Elements that the strides of ``out`` are a multiple of: 8 make 16-byte stores, 1 fits every workspace."""

# No measurement on an Ampere GPU has chosen these yet.
ROWS = 8
PROGRAMS = 2048  # an A100 holds 108 * 16 CTAs of four warps: one wave, whatever the workspace could hold


def gather(out_unit: int) -> Variant:
    return Variant(
        "dequantize_and_gather_k_cache",
        f"out{out_unit}",
        f"{__package__}.device:gather_kernel",
        {
            "out_ptr": "*bf16",
            "cache_ptr": "*u8",
            "seq_lens_ptr": "*i32",
            "gather_lens_ptr": "*i32",
            "table_ptr": "*i32",
            "request_units": "i64",
            "row_units": "i64",
            "page_units": "i64",
            "table_stride": "i64",
            "offset": "i64",
            "capacity": "i32",
            "columns": "i32",
            "blocks": "i32",
            "block_size": "i32",
        },
        {
            "NOPE": NOPE_DIM,
            "ROPE": ROPE_DIM,
            "GROUP": QUANT_GROUP,
            "SCALES": SCALE_BYTES,
            "PAGE_UNIT": PAGE_UNIT,
            "OUT_UNIT": out_unit,
            "ROWS": ROWS,
        },
        num_warps=4,
        num_stages=1,
        unaligned=("seq_lens_ptr", "gather_lens_ptr", "table_ptr"),
    )


def variants() -> Iterator[Variant]:
    yield from map(gather, OUT_UNITS)


def choose(request_stride: int, row_stride: int) -> Variant:
    """The variant for the strides of ``out``, in elements."""
    return gather(next(unit for unit in OUT_UNITS if request_stride % unit == 0 and row_stride % unit == 0))


def programs_per_request(requests: int, capacity: int) -> int:
    """How many programs share a request's rows; from shapes alone, so that the launch can be captured."""
    return min(-(-capacity // ROWS), max(1, PROGRAMS // requests))
