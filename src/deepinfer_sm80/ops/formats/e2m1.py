"""E2M1 (FP4): bit 3 is the sign; magnitudes 0..7 are 0, 0.5, 1, 1.5, 2, 3, 4, 6. Source: OCP Microscaling Formats."""

from __future__ import annotations

import torch

LARGEST = 6.0

# Midpoints of neighbouring magnitudes, and whether the tie goes up (to the even code).
_STEPS = ((0.25, False), (0.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True), (5.0, False))


def decode(codes: torch.Tensor) -> torch.Tensor:
    """uint8 codes 0..15 of any shape -> float32 of the same shape."""
    code = codes.to(torch.int32) & 7
    # (2 + mantissa) * 2^(exponent - 2) above the two subnormals 0 and 0.5
    exponent, mantissa = code >> 1, code & 1
    normal = ((exponent + 126) << 23) | (mantissa << 22)
    value = torch.where(exponent == 0, mantissa.to(torch.float32) * 0.5, normal.view(torch.float32))
    return torch.where(codes >= 8, -value, value)


def encode(x: torch.Tensor) -> torch.Tensor:
    """float32 of any shape -> uint8 codes, rounding half to even, saturating at 6; -0.0 keeps its sign; NaN is 0."""
    magnitude = x.abs()
    code = torch.signbit(x).to(torch.uint8) << 3
    for midpoint, tie_goes_up in _STEPS:
        code += (magnitude >= midpoint) if tie_goes_up else (magnitude > midpoint)
    return code


def pack(codes: torch.Tensor) -> torch.Tensor:
    """uint8 [..., K] -> uint8 [..., K / 2]: the even column in the low nibble."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack(packed: torch.Tensor) -> torch.Tensor:
    """uint8 [..., K / 2] -> uint8 [..., K]: ``pack`` undone."""
    return torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)
