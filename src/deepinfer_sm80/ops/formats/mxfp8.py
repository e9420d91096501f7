"""MXFP8: E4M3 codes in groups along the last axis, one UE8M0 scale a group. Source: OCP Microscaling Formats 1.0.

Groups of 32 are the format of quantised activations and of key rows on SM100; the key rows of other GPUs take 64.
"""

from __future__ import annotations

import torch

from deepinfer_sm80.ops.formats import e4m3, ue8m0

GROUP = 32
AMAX_FLOOR = 1e-4


def decode(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """codes uint8 [..., K], scale uint8 [..., K / group] -> float32 [..., K]; exact unless it underflows."""
    group = codes.shape[-1] // scale.shape[-1]
    grouped = e4m3.decode(codes).view(*scale.shape, group) * ue8m0.decode(scale)[..., None]
    return grouped.flatten(-2)


def encode(x: torch.Tensor, group: int = GROUP) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 or bfloat16 [..., K], K a multiple of ``group`` -> (codes uint8 [..., K], scale uint8 [..., K / group]).

    Scale 2^ceil(log2(max(amax, 1e-4) / 448)), codes rounded half to even.
    """
    grouped = x.to(torch.float32).reshape(*x.shape[:-1], x.shape[-1] // group, group)
    scale = ue8m0.encode_amax(grouped.abs().amax(-1).clamp_min(AMAX_FLOOR), e4m3.LARGEST)
    return e4m3.encode(grouped / ue8m0.decode(scale)[..., None]).flatten(-2), scale
