"""Triton helpers for the byte formats: integer arithmetic only, no native FP8 type (none exists for 8.0 and 8.6)."""

import triton
import triton.language as tl


@triton.jit
def e4m3_to_fp32(code):
    """uint8 E4M3 code -> float32, all 256 codes: 0x7F and 0xFF are NaN, subnormals exact.

    The magnitude's seven bits, shifted under fp32's exponent, are the value times 2^-120: one exact multiplication
    repairs the bias, of normal and subnormal codes alike.
    """
    c = code.to(tl.int32)
    magnitude = c & 0x7F
    bits = (magnitude << 20) | ((c & 0x80) << 24)
    value = bits.to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120
    return tl.where(magnitude == 0x7F, float("nan"), value)


@triton.jit
def fp32_to_e4m3(x):
    """float32 -> uint8 E4M3 code: round half to even, saturate to 448, subnormals, -0.0 kept, NaN -> 0x7F."""
    bits = x.to(tl.int32, bitcast=True)
    sign = (bits >> 24) & 0x80
    magnitude = bits & 0x7FFFFFFF
    # normal result: drop 20 mantissa bits with round half to even; the carry may run into the exponent
    rounded = (magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20
    normal = rounded - (120 << 3)
    # below 2^-6 the step is 2^-9 whatever the exponent: adding 1.5 * 2^14 leaves |x| / 2^-9 rounded in the low bits
    absolute = magnitude.to(tl.float32, bitcast=True)
    shifted = (absolute + 24576.0).to(tl.int32, bitcast=True)
    subnormal = shifted & 0xF
    code = tl.where(magnitude < 0x3C800000, subnormal, tl.minimum(normal, 0x7E))  # 0x3C800000 is 2^-6
    code = tl.where(magnitude > 0x7F800000, 0x7F, code | sign)
    return code.to(tl.uint8)


@triton.jit
def ue8m0_to_fp32(byte):
    """uint8 UE8M0 byte -> float32 2^(byte - 127): byte 0 is the subnormal 2^-127, byte 255 is NaN."""
    b = byte.to(tl.int32)
    bits = tl.where(b == 0, 0x00400000, b << 23)
    return tl.where(b == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)


@triton.jit
def ue8m0_of_amax(amax):
    """Scale byte of a group by its largest magnitude (positive, finite): the smallest power of two >= amax / 448.

    448 = 1.75 * 2^8: the exponent is amax's less 8, one more where amax's significand exceeds 1.75. No division.
    """
    bits = amax.to(tl.int32, bitcast=True)
    exponent = (bits >> 23) - 8 + ((bits & 0x7FFFFF) > 0x600000).to(tl.int32)
    return tl.minimum(tl.maximum(exponent, 0), 254)
