"""E2M1 codes in groups of 16 along the last axis, one E4M3 scale a group and none above it: a compressed key row of 288
bytes (256 of packed codes, 32 of scales). Source: vLLM 0.33.0's nvfp4_ds_mla cache.

A byte holds two codes: low nibble = even column, high nibble = odd column.
"""

from __future__ import annotations

import torch

from deepinfer_sm80.ops.formats import e2m1, e4m3

GROUP = 16
SMALLEST_SCALE = 2.0**-9  # E4M3's smallest positive value: a zero group has a scale


def decode(packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """packed uint8 [..., K/2], scale uint8 [..., K/16] (E4M3) -> float32 [..., K]; exact, in bfloat16 too."""
    grouped = e2m1.decode(e2m1.unpack(packed)).view(*scale.shape, GROUP) * e4m3.decode(scale)[..., None]
    return grouped.flatten(-2)


def encode(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 or bfloat16 [..., K], K a multiple of 16 -> (packed uint8 [..., K/2], scale uint8 [..., K/16]).

    Scale e4m3(clamp(amax / 6, 2^-9, 448)); codes of x / scale rounded half to even, saturating at 6.
    """
    grouped = x.to(torch.float32).reshape(*x.shape[:-1], x.shape[-1] // GROUP, GROUP)
    scale = e4m3.encode((grouped.abs().amax(-1) / e2m1.LARGEST).clamp(SMALLEST_SCALE, e4m3.LARGEST))
    codes = e2m1.encode(grouped / e4m3.decode(scale)[..., None])
    return e2m1.pack(codes.flatten(-2)), scale
