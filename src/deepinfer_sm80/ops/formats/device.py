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


INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
"""Kernels run as Python on a CPU. The branches below differ only where the interpreter lacks something."""


@triton.jit
def fp32_to_bf16(x):
    """float32 -> bfloat16, round half to even. A NaN becomes the one that the machine's own conversion makes.

    That is 0x7FFF on a GPU. Triton's interpreter truncates, hence the integers; its NaN is PyTorch's on a CPU, 0xFFFF.
    """
    if INTERPRETED:
        bits = x.to(tl.int32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        rounded = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0xFFFF, rounded)
        return rounded.to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(tl.bfloat16)


@triton.jit
def mul_rn(x, y):
    """float32 product, rounded, that is never fused with the sum it goes into: PTX with a rounding mode is not."""
    if INTERPRETED:
        return x * y
    else:
        return tl.inline_asm_elementwise("mul.rn.f32 $0, $1, $2;", "=f,f,f", [x, y], tl.float32, True, 1)


@triton.jit
def add_rn(x, y):
    """float32 sum that takes in no product. See ``mul_rn``."""
    if INTERPRETED:
        return x + y
    else:
        return tl.inline_asm_elementwise("add.rn.f32 $0, $1, $2;", "=f,f,f", [x, y], tl.float32, True, 1)


@triton.jit
def sub_rn(x, y):
    """float32 difference that takes in no product. See ``mul_rn``."""
    if INTERPRETED:
        return x - y
    else:
        return tl.inline_asm_elementwise("sub.rn.f32 $0, $1, $2;", "=f,f,f", [x, y], tl.float32, True, 1)


@triton.jit
def bf16_pair_to_fp32(word):
    """int32 word -> its low and its high bfloat16 as float32: of two neighbours in memory, the first is the low one."""
    low = (word << 16).to(tl.float32, bitcast=True)
    high = (word & -65536).to(tl.float32, bitcast=True)
    return low, high


@triton.jit
def fp32_to_bf16_pair(low, high):
    """Two float32 -> int32 word of two bfloat16. See ``bf16_pair_to_fp32`` and ``fp32_to_bf16``."""
    first = fp32_to_bf16(low).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    second = fp32_to_bf16(high).to(tl.int16, bitcast=True).to(tl.int32) << 16
    return first | second
