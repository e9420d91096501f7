"""Launch configurations of sparse_mla_decode, frozen. No measurement on an Ampere GPU has chosen them yet."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deepinfer_sm80.ops.variants import Variant

if TYPE_CHECKING:
    from collections.abc import Iterator

_OP = "sparse_mla_decode"
_STRIDES = ("stride", "block_size", "rows", "width", "list_stride")
_ARGUMENTS = {
    "q_ptr": "*bf16",
    "swa_ptr": "*u8",
    "swa_slots_ptr": "*i32",
    "swa_lens_ptr": "*i32",
    "extra_ptr": "*u8",
    "extra_slots_ptr": "*i32",
    "extra_lens_ptr": "*i32",
    "sink_ptr": "*fp32",
    "out_ptr": "*bf16",
    "partial_ptr": "*fp32",
    "state_ptr": "*fp32",
    "heads": "i32",
    "q_stride": "i32",
    "out_stride": "i32",
    **{f"swa_{name}": "i32" for name in _STRIDES},
    **{f"extra_{name}": "i32" for name in _STRIDES},
    "scale_log2": "fp32",
    "splits": "i32",
}
_MERGE_ARGUMENTS = {
    "partial_ptr": "*fp32",
    "state_ptr": "*fp32",
    "sink_ptr": "*fp32",
    "out_ptr": "*bf16",
    "heads": "i32",
    "out_stride": "i32",
    "splits": "i32",
}
_LISTS = ("swa_slots_ptr", "swa_lens_ptr", "extra_slots_ptr", "extra_lens_ptr")
"""Slices of a batch's own tensors may begin at any element."""
_DECODE = f"{__package__}.device:decode_kernel"
_MERGE = f"{__package__}.device:merge_kernel"

BLOCK_N = 32
_STAGES = {16: 1, 32: 2}
"""Per heads of a tile. 16 heads need 50,176 bytes of shared memory: three CTAs on an SM of 8.0, two on 8.6 to the byte.
32 heads need 82,816 with the next tile copied while this one is used: two CTAs and one. One stage spills in 3.8."""

_MAY_SPILL = {
    "M16-split": "Triton 3.6 for sm_80: two addresses wait in local memory from before the key loop until after it"
}

_RESIDENT = {(8, 0): 2 * 108, (8, 6): 84}
"""CTAs that run at once: A100, and the largest of the 8.6 family. Splits fill them; more would only add merging."""

_MAX_SPLITS = 16
_MIN_TILES = 2  # tiles of 32 keys per split: below that the merge moves more than the keys


def decode_variant(block_m: int, split: bool) -> Variant:
    stages, name = _STAGES[block_m], f"M{block_m}-{'split' if split else 'whole'}"
    constants = {"SPLIT": split, "PIPELINED": stages > 1, "BLOCK_M": block_m, "BLOCK_N": BLOCK_N}
    spills = _MAY_SPILL.get(name, "")
    return Variant(_OP, name, _DECODE, _ARGUMENTS, constants, 4, stages, may_spill=spills, unaligned=_LISTS)


MERGE = Variant(_OP, "merge", _MERGE, _MERGE_ARGUMENTS, {"MAX_SPLITS": _MAX_SPLITS}, num_warps=4, num_stages=1)


def variants() -> Iterator[Variant]:
    for block_m in _STAGES:
        for split in (False, True):
            yield decode_variant(block_m, split)
    yield MERGE


def heads_per_tile(heads: int) -> int:
    """Any number of heads runs, the last tile masked."""
    return 16 if heads <= 16 else 32


def choose_splits(tokens: int, heads: int, widths: tuple[int, int], capability: tuple[int, int]) -> int:
    """Into how many shares one token's keys are split; from shapes alone, so that a captured graph stays valid.

    ``widths``: columns of the two index lists.
    """
    tiles = sum(-(-width // BLOCK_N) for width in widths)
    programs = tokens * -(-heads // heads_per_tile(heads))
    resident = _RESIDENT.get(capability, _RESIDENT[8, 0])
    splits = max(1, min(resident // programs, tiles // _MIN_TILES, _MAX_SPLITS))
    share = -(-tiles // splits)
    return -(-tiles // share) if share else 1
