"""MXFP4: E2M1 codes in groups of 32 along the last axis, one UE8M0 scale a group. Source: OCP Microscaling Formats 1.0.

A byte holds two codes: low nibble = even column, high nibble = odd column. The format of DeepSeek-V4.1's routed experts
(int8 [N, K/2] and scale [N, K/32]).
"""

from __future__ import annotations

import torch

from deepinfer_sm80.ops.formats import e2m1, ue8m0

GROUP = 32
LARGEST = e2m1.LARGEST


def decode(packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """packed uint8 [..., K/2], scale uint8 [..., K/32] -> float32 [..., K]; exact; scale byte 255 gives NaN."""
    values = e2m1.decode(e2m1.unpack(packed))
    grouped = values.view(*scale.shape, GROUP) * ue8m0.decode(scale)[..., None]
    return grouped.flatten(-2)


def encode(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 or bfloat16 [..., K], K a multiple of 32 -> (packed uint8 [..., K/2], scale uint8 [..., K/32]).

    Scale 2^ceil(log2(max(amax, 6 * 2^-126) / 6)), codes rounded half to even; -0.0 keeps its sign; a group that holds
    a NaN gets scale byte 255.
    """
    grouped = x.to(torch.float32).reshape(*x.shape[:-1], x.shape[-1] // GROUP, GROUP)
    amax = grouped.abs().amax(-1)
    scale = ue8m0.encode_amax(amax.clamp_min(LARGEST * 2.0**-126), LARGEST)
    codes = e2m1.encode(grouped / ue8m0.decode(scale)[..., None])
    return e2m1.pack(codes.flatten(-2)), scale.masked_fill(torch.isnan(amax), ue8m0.NAN)
