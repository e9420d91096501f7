"""Device code of indexer_q_rope_quant, and the rotation and quantisation that the key's kernel shares."""

import triton
import triton.language as tl

from deepinfer_sm80.ops.formats.device import (
    add_rn,
    fp32_to_bf16,
    fp32_to_e4m3,
    mul_rn,
    sub_rn,
    ue8m0_of_amax,
    ue8m0_to_fp32,
)


@triton.jit
def rotate_pairs(even, odd, cos, sin):
    """float32 pairs turned by their angles, rounded to bfloat16, as float32. Arguments broadcast against each other."""
    # e' = e*cos[i] - o*sin[i], each product and the difference rounded: no fused multiply-add
    turned_even = sub_rn(mul_rn(even, cos), mul_rn(odd, sin))
    # o' = o*cos[i] + e*sin[i]
    turned_odd = add_rn(mul_rn(odd, cos), mul_rn(even, sin))
    return fp32_to_bf16(turned_even).to(tl.float32), fp32_to_bf16(turned_odd).to(tl.float32)


@triton.jit
def magnitude(x):
    """|x|, and 0 for NaN: a NaN does not count towards a scale."""
    return tl.where(x == x, tl.abs(x), 0.0)


@triton.jit
def scale_and_inverse(amax):
    """(s, 1 / s) of a group by its largest magnitude; both are powers of two."""
    # s = 2^ceil(log2(max(amax, 1e-4) / 448)); a quotient above 2^127, infinity included, counts as 2^127
    byte = tl.where(amax == float("inf"), 254, ue8m0_of_amax(tl.maximum(amax, 1e-4)))
    return ue8m0_to_fp32(byte), ue8m0_to_fp32(254 - byte)


@triton.jit
def load_angles(table_ptr, position, positions_in_table, HALF: tl.constexpr):
    """cos and sin [HALF] of one position, which is clamped into the table."""
    row = tl.minimum(tl.maximum(position.to(tl.int64), 0), positions_in_table - 1) * (2 * HALF)
    i = tl.arange(0, HALF)
    return tl.load(table_ptr + row + i), tl.load(table_ptr + row + HALF + i)


_NUMBERS = ["q_row", "q_head", "w_row", "position_step", "table_rows", "softmax_scale", "head_scale"]
_UNALIGNED = ["positions_ptr", "weights_ptr"]


@triton.jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=_UNALIGNED)
def q_rope_quant_kernel(
    positions_ptr,
    q_ptr,
    table_ptr,
    weights_ptr,
    codes_ptr,
    folded_ptr,
    position_step,
    q_row,
    q_head,
    w_row,
    table_rows,
    softmax_scale,
    head_scale,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    ROPE: tl.constexpr,
    UNIT: tl.constexpr,
):
    """One token a program. ``q_row`` and ``q_head`` count UNIT elements, so that wide loads are known to be aligned."""
    t = tl.program_id(0).to(tl.int64)
    NOPE: tl.constexpr = DIM - ROPE
    HALF: tl.constexpr = ROPE // 2
    h = tl.arange(0, HEADS)
    head = q_ptr + t * q_row * UNIT + h * (q_head * UNIT)
    d = tl.arange(0, NOPE)
    plain = tl.load(head[:, None] + d[None, :]).to(tl.float32)
    r = tl.arange(0, ROPE)
    tail = tl.load(head[:, None] + NOPE + r[None, :]).to(tl.float32)
    even, odd = tl.split(tl.reshape(tail, [HEADS, HALF, 2]))

    # x = bf16(q with dims 64..127 rotated at positions[t])
    cos, sin = load_angles(table_ptr, tl.load(positions_ptr + t * position_step), table_rows, HALF)
    even, odd = rotate_pairs(even, odd, cos[None, :], sin[None, :])

    # s = 2^ceil(log2(max(max_d |x|, 1e-4) / 448))
    amax = tl.max(magnitude(plain), axis=1)
    amax = tl.maximum(amax, tl.max(tl.maximum(magnitude(even), magnitude(odd)), axis=1))
    scale, inverse = scale_and_inverse(amax)

    # q_codes = e4m3(x / s); the product with a power of two is the quotient
    out = codes_ptr + (t * HEADS + h) * DIM
    tl.store(out[:, None] + d[None, :], fp32_to_e4m3(plain * inverse[:, None]))
    turned = tl.join(fp32_to_e4m3(even * inverse[:, None]), fp32_to_e4m3(odd * inverse[:, None]))
    tl.store(out[:, None] + NOPE + r[None, :], tl.reshape(turned, [HEADS, ROPE]))

    # weights become ((float32(weights) * s) * softmax_scale) * head_scale
    weight = tl.load(weights_ptr + t * w_row + h).to(tl.float32)
    tl.store(folded_ptr + t * HEADS + h, weight * scale * softmax_scale * head_scale)


# The same code for queries that may start at any element: one compiled form whatever their address.
q_rope_quant_unaligned_kernel = triton.jit(
    q_rope_quant_kernel.fn, do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=[*_UNALIGNED, "q_ptr"]
)
