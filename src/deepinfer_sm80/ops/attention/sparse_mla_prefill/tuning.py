"""Launch configurations of sparse_mla_prefill, frozen. No measurement on an Ampere GPU has chosen them yet.

Chosen by what compiles: 32 heads x 32 keys over 4 warps is the largest tile without a spilled register whose two CTAs
fit an SM of 8.0 (67,584 bytes of shared memory each; one CTA on 8.6). 16 keys over 4 warps would compute each score
twice. 16 heads need 50,176 bytes: two CTAs on 8.6 to the byte. Two stages: rows come by asynchronous copies.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from deepinfer_sm80.ops.variants import Variant

if TYPE_CHECKING:
    from collections.abc import Iterator

MAX_TOKENS = 65_504
"""Tokens per launch: CUDA's limit of a grid's second axis is 65,535; a multiple of 32 keeps slices aligned."""

_HEADS = (16, 32)
_ARGUMENTS = {
    "q_ptr": "*bf16",
    "kv_ptr": "*bf16",
    "indices_ptr": "*i32",
    "lens_ptr": "*i32",
    "sink_ptr": "*fp32",
    "out_ptr": "*bf16",
    "heads": "i32",
    "rows": "i32",
    "width": "i32",
    "q_stride": "i32",
    "list_stride": "i32",
    "out_stride": "i32",
    "scale_log2": "fp32",
}
_LISTS = ("indices_ptr", "lens_ptr")
_KERNEL = f"{__package__}.device:prefill_kernel"


def variant(block_m: int) -> Variant:
    constants = {"BLOCK_M": block_m, "BLOCK_N": 32}
    return Variant("sparse_mla_prefill", f"M{block_m}", _KERNEL, _ARGUMENTS, constants, 4, 2, unaligned=_LISTS)


def variants() -> Iterator[Variant]:
    yield from map(variant, _HEADS)


def choose(heads: int) -> Variant:
    """The variant for a rank's number of heads; any number runs, the last block masked."""
    return variant(16 if heads <= 16 else 32)
