"""MXFP4: E2M1 codes in groups of 32 along the last axis, one UE8M0 scale a group. Source: OCP Microscaling Formats 1.0.

A byte holds two codes: low nibble = even column, high nibble = odd column. Bit 3 of a code is the sign; magnitudes
0..7 are 0, 0.5, 1, 1.5, 2, 3, 4, 6. The format of DeepSeek-V4.1's routed experts (int8 [N, K/2] and scale [N, K/32]).
"""

from __future__ import annotations

import torch

from deepinfer_sm80.ops.formats import ue8m0

GROUP = 32
LARGEST = 6.0

# Midpoints of neighbouring magnitudes, and whether the tie goes up (to the even code).
_STEPS = ((0.25, False), (0.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True), (5.0, False))


def decode(packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """packed uint8 [..., K/2], scale uint8 [..., K/32] -> float32 [..., K]; exact; scale byte 255 gives NaN."""
    codes = torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)
    values = _magnitude(codes.to(torch.int32) & 7)
    values = torch.where(codes >= 8, -values, values)
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
    scaled = grouped / ue8m0.decode(scale)[..., None]
    magnitude = scaled.abs()
    code = torch.signbit(scaled).to(torch.uint8) << 3
    for midpoint, tie_goes_up in _STEPS:
        code += (magnitude >= midpoint) if tie_goes_up else (magnitude > midpoint)
    packed = (code[..., 0::2] | (code[..., 1::2] << 4)).flatten(-2)
    return packed, scale.masked_fill(torch.isnan(amax), ue8m0.NAN)


def _magnitude(code: torch.Tensor) -> torch.Tensor:
    """int32 0..7 -> float32: (2 + mantissa) * 2^(exponent - 2) above the two subnormals 0 and 0.5."""
    exponent, mantissa = code >> 1, code & 1
    normal = ((exponent + 126) << 23) | (mantissa << 22)
    return torch.where(exponent == 0, mantissa.to(torch.float32) * 0.5, normal.view(torch.float32))
