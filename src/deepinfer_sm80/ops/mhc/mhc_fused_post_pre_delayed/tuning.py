"""Launch configurations of mhc_fused_post_pre_delayed, frozen."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deepinfer_sm80.ops.variants import Variant

if TYPE_CHECKING:
    from collections.abc import Iterator

# No measurement on an Ampere GPU has chosen these yet. Blocks of 64 columns on tensor cores spill 728 bytes on sm_80.
PAD = 32  # columns of a partial sum: 24 mixes, the sum of squares, and what a power of two needs
DOT_TOKENS = 16  # from here on the projection runs on tensor cores, BLOCK_T tokens a program
PARTS_FMA, PARTS_DOT, PARTS_DOT_FEW = 8, 8, 20  # of the columns; more of them where few tokens leave SMs idle
FEW = 128
_OP = "mhc_fused_post_pre_delayed"
_SHARED = {"S": 4, "MIXES": 24, "PAD": PAD}
_FUSED = {
    "x_ptr": "*bf16",
    "residual_ptr": "*bf16",
    "post_ptr": "*fp32",
    "comb_ptr": "*fp32",
    "fn_ptr": "*fp32",
    "streams_ptr": "*bf16",
    "partial_ptr": "*fp32",
    "T": "i32",
    "H": "i32",
    "width": "i32",
}
_EPILOGUE = {
    "partial_ptr": "*fp32",
    "streams_ptr": "*bf16",
    "scale_ptr": "*fp32",
    "base_ptr": "*fp32",
    "pre_ptr": "*fp32",
    "norm_ptr": "*bf16",
    "next_post_ptr": "*fp32",
    "next_comb_ptr": "*fp32",
    "input_ptr": "*bf16",
    "next_pre_ptr": "*fp32",
    "T": "i32",
    "H": "i32",
    "parts": "i32",
    "iterations": "i32",
    "rms_eps": "fp32",
    "hc_eps": "fp32",
    "norm_eps": "fp32",
}
FMA = Variant(_OP, "fma", f"{__package__}.device:fused_fma_kernel", _FUSED, {**_SHARED, "BLOCK_H": 128})
DOT = Variant(
    _OP, "dot", f"{__package__}.device:fused_dot_kernel", _FUSED, {**_SHARED, "BLOCK_T": DOT_TOKENS, "BLOCK_H": 32}
)
EPILOGUES = {
    block: Variant(
        _OP,
        f"epilogue{block}",
        f"{__package__}.device:epilogue_kernel",
        _EPILOGUE,
        {**_SHARED, "BLOCK_H": block},
        num_warps=warps,
    )
    for block, warps in ((1024, 4), (8192, 16))
}
LARGEST = max(EPILOGUES)


def variants() -> Iterator[Variant]:
    yield from (FMA, DOT, *EPILOGUES.values())


def plan(tokens: int, hidden: int) -> tuple[Variant, int, int]:
    """The first kernel for so many tokens, the columns of one of its programs and how many programs share a row."""
    variant = FMA if tokens < DOT_TOKENS else DOT
    wanted = PARTS_FMA if variant is FMA else PARTS_DOT_FEW if tokens <= FEW else PARTS_DOT
    block = variant.constants["BLOCK_H"]
    width = -(-hidden // (wanted * block)) * block
    return variant, width, -(-hidden // width)


def epilogue(hidden: int) -> Variant:
    """The narrowest of EPILOGUES that holds a row."""
    return EPILOGUES[min(block for block in EPILOGUES if block >= hidden)]
