"""Device code of inverse_rope_grouped."""

import triton
import triton.language as tl

from deepinfer_sm80.ops.formats.device import add_rn, bf16_pair_to_fp32, fp32_to_bf16_pair, mul_rn, sub_rn


@triton.jit(
    do_not_specialize=["heads", "token_units", "table_rows", "table_stride"],
    do_not_specialize_on_alignment=["positions_ptr", "table_ptr"],
)
def unrotate_kernel(
    o_ptr,
    positions_ptr,
    table_ptr,
    out_ptr,
    heads: tl.int32,
    token_units: tl.int64,
    table_rows: tl.int64,
    table_stride: tl.int64,
    NOPE: tl.constexpr,
    ROPE: tl.constexpr,
    UNIT: tl.constexpr,
    HEADS: tl.constexpr,
):
    """Program (t, b): HEADS heads of token t. Tokens of ``o`` are ``token_units`` * UNIT elements apart.

    Works on int32 words, two neighbouring dims each. Groups are consecutive heads: the result is ``o``'s order.
    """
    WORDS: tl.constexpr = (NOPE + ROPE) // 2
    FIRST: tl.constexpr = NOPE // 2
    t = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    inside = (h < heads)[:, None]
    source = (o_ptr + t * token_units * UNIT).to(tl.pointer_type(tl.int32)) + (h * WORDS)[:, None]
    target = out_ptr.to(tl.pointer_type(tl.int32)) + t * heads * WORDS + (h * WORDS)[:, None]

    # dims 0..447 are copied bit for bit
    w = tl.arange(0, WORDS)[None, :]
    copied = inside & (w < FIRST)
    tl.store(target + w, tl.load(source + w, mask=copied, other=0), mask=copied)

    # p = positions[t] clamped into the table's rows
    p = tl.minimum(tl.maximum(tl.load(positions_ptr + t), 0), table_rows - 1)
    pair = tl.arange(0, ROPE // 2)[None, :]
    cos = tl.load(table_ptr + p * table_stride + pair)
    sin = tl.load(table_ptr + p * table_stride + ROPE // 2 + pair)
    even, odd = bf16_pair_to_fp32(tl.load(source + FIRST + pair, mask=inside, other=0))
    # even' = even * cos[p] + odd * sin[p],  odd' = odd * cos[p] - even * sin[p]
    turned_even = add_rn(mul_rn(even, cos), mul_rn(odd, sin))
    turned_odd = sub_rn(mul_rn(odd, cos), mul_rn(even, sin))
    tl.store(target + FIRST + pair, fp32_to_bf16_pair(turned_even, turned_odd), mask=inside)
