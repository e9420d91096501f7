"""UE8M0: one byte b stands for the power of two 2^(b - 127); 255 is NaN. Source: OCP Microscaling Formats 1.0.

Byte 0 is 2^-127, a float32 subnormal: shifting b into the exponent field would turn it into 0.0. Byte 255 shifted the
same way would be infinity, and infinity times a zero code is NaN where the format asks for NaN everywhere.
"""

from __future__ import annotations

import math

import torch

NAN = 255

_TWO_TO_MINUS_127 = 0x00400000  # float32 bits
_FP32_NAN = 0x7FC00000


def decode(b: torch.Tensor) -> torch.Tensor:
    """uint8 of any shape -> float32 of the same shape, exact for all 256 bytes."""
    byte = b.to(torch.int32)
    bits = (byte << 23).masked_fill(byte == 0, _TWO_TO_MINUS_127).masked_fill(byte == NAN, _FP32_NAN)
    return bits.view(torch.float32)


def encode_ceil(x: torch.Tensor) -> torch.Tensor:
    """Positive float32 of any shape -> uint8 of the smallest power of two >= x, read off the bits, no logarithm.

    At most 2^-127 gives byte 0; above 2^127, infinity and NaN included, gives byte 254 (never the NaN byte).
    """
    bits = x.view(torch.int32)
    byte = (bits >> 23) + ((bits & 0x7FFFFF) != 0)
    return byte.masked_fill(bits <= _TWO_TO_MINUS_127, 0).clamp(0, 254).to(torch.uint8)


def encode_amax(amax: torch.Tensor, largest: float) -> torch.Tensor:
    """Scale byte of a group: the smallest power of two s with amax / s <= ``largest``, clamped to bytes 0..254.

    ``amax`` positive normal float32 of any shape, ``largest`` the largest value of the element format (448 for E4M3,
    6 for E2M1), at least 1 and with a 24-bit significand. Equal to encode_ceil(amax / largest) with a correctly
    rounded quotient, but decided by comparing significands: PyTorch on CUDA divides by a Python scalar as a product
    with its rounded reciprocal.
    """
    fraction, exponent = math.frexp(largest)  # largest = (2 * fraction) * 2^(exponent - 1)
    bits = amax.view(torch.int32)
    above = (bits & 0x7FFFFF) > int((2 * fraction - 1) * 2**23)
    return ((bits >> 23) - (exponent - 1) + above).clamp(0, 254).to(torch.uint8)
