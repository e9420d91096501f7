"""E4M3 (the OCP "fn" variant): 1 sign, 4 exponent (bias 7), 3 mantissa bits; no infinity; 0x7F and 0xFF are NaN.

Largest finite value 448 (0x7E), smallest normal 2^-6 (0x08), subnormal step 2^-9. Source: OCP 8-bit Floating Point
Specification, revision 1.0.
"""

from __future__ import annotations

import torch

LARGEST = 448.0

_NAN = 0x7F
_LARGEST_CODE = 0x7E
_BIAS_GAP = 120  # float32 bias 127 minus E4M3 bias 7
_FP32_INF = 0x7F800000


def decode(codes: torch.Tensor) -> torch.Tensor:
    """uint8 codes of any shape -> float32 of the same shape, exact for all 256 codes; both NaN codes give a NaN."""
    magnitude = codes.to(torch.int32) & 0x7F
    exponent, mantissa = magnitude >> 3, magnitude & 7
    normal = (((exponent + _BIAS_GAP) << 23) | (mantissa << 20)).view(torch.float32)
    value = torch.where(exponent == 0, mantissa.to(torch.float32) * 2.0**-9, normal)
    value = torch.where(codes >= 0x80, -value, value)
    return value.masked_fill(magnitude == _NAN, float("nan"))


def encode(x: torch.Tensor) -> torch.Tensor:
    """float32 (or bfloat16, widened exactly) of any shape -> uint8 codes, rounding half to even.

    Carries propagate into the exponent; values below 2^-6 land on the subnormal grid; magnitudes beyond 448, infinities
    included, saturate to 448; -0.0 keeps its sign; every NaN becomes 0x7F.
    """
    x = x.to(torch.float32)
    bits = x.view(torch.int32) & 0x7FFFFFFF
    bits = bits.clamp(max=_FP32_INF)  # NaN payloads would overflow the addition below
    # normal range: drop 20 mantissa bits; the carry of the addition walks into the exponent by itself
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (_BIAS_GAP << 3)
    # subnormal range: |x| * 2^9 = significand * 2^(e - 141); shifts of 26 and more leave nothing of 24 bits
    significand = (bits & 0x7FFFFF) | 0x800000
    shift = (141 - (bits >> 23)).clamp(1, 26)
    half = torch.bitwise_left_shift(torch.ones_like(shift), shift - 1)
    odd = torch.bitwise_right_shift(significand, shift) & 1
    subnormal = torch.bitwise_right_shift(significand + half - 1 + odd, shift)
    code = torch.where(bits < ((_BIAS_GAP + 1) << 23), subnormal, normal).clamp(max=_LARGEST_CODE)
    code = torch.where(torch.signbit(x), code | 0x80, code)
    return code.masked_fill(torch.isnan(x), _NAN).to(torch.uint8)
