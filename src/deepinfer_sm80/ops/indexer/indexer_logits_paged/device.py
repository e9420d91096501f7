"""Device code of indexer_logits_paged."""

import triton
import triton.language as tl

from deepinfer_sm80.ops.indexer.indexer_logits_prefill.device import dot_keys, head_sum


@triton.jit
def code_to_bf16(words, BYTE: tl.constexpr):
    """E4M3 code in byte BYTE of int32 words -> bfloat16; the NaN codes come out as +-480.

    As e4m3_to_fp32, with the byte shifted straight to where fp32 wants it.
    """
    if BYTE == 3:
        magnitude = words >> 4
    else:
        magnitude = words << (20 - 8 * BYTE)
    bits = (magnitude & 0x07F00000) | ((words << (24 - 8 * BYTE)) & -0x80000000)
    value = bits.to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120
    return (value.to(tl.int32, bitcast=True) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def holds_nan(words):
    """int32, not zero where one of the four codes of a word is NaN: only 0x7F carries into the sign's place."""
    return ((words & 0x7F7F7F7F) + 0x01010101) & -0x7F7F7F80


@triton.jit(
    do_not_specialize=["page16", "lens_step", "table_row", "blocks", "block_size", "columns", "width"],
    do_not_specialize_on_alignment=["lens_ptr", "table_ptr", "weights_ptr"],
)
def logits_paged_kernel(
    codes_ptr,
    weights_ptr,
    cache_ptr,
    lens_ptr,
    table_ptr,
    out_ptr,
    page16,
    lens_step,
    table_row,
    blocks,
    block_size,
    columns,
    width,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    KEYS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Program (t, p) scores the tiles p, p + P, ... of query t, so that a short context in a wide row is spread too.

    The page stride is ``page16`` times 16 bytes; the table has ``columns`` columns.
    """
    t = tl.program_id(0).to(tl.int64)
    first, step = tl.program_id(1) * KEYS, tl.num_programs(1) * KEYS
    WORDS: tl.constexpr = DIM // 4
    w, h, i = tl.arange(0, WORDS), tl.arange(0, HEADS), tl.arange(0, KEYS)
    out = out_ptr + t * width
    # columns c >= context_lens[t] and columns beyond the table's C * block_size are -inf
    table_end = tl.minimum(columns.to(tl.int64) * block_size, width).to(tl.int32)
    end = tl.minimum(tl.load(lens_ptr + t * lens_step), table_end)
    tiles = tl.cdiv(tl.maximum(end - first, 0), step)
    if tiles > 0:
        # A word holds dims 4w..4w+3. Byte b of all words is a dot of its own: no value changes its place.
        q = tl.load(codes_ptr.to(tl.pointer_type(tl.int32)) + (t * HEADS + h)[:, None] * WORDS + w[None, :])
        q0, q1, q2, q3 = code_to_bf16(q, 0), code_to_bf16(q, 1), code_to_bf16(q, 2), code_to_bf16(q, 3)
        weight = tl.load(weights_ptr + t * HEADS + h)
        # a NaN code in a query makes its head's dot NaN, hence every logit
        weight = tl.where(tl.max((holds_nan(q) != 0).to(tl.int32), axis=1) > 0, float("nan"), weight)
        for n in tl.range(0, tiles, num_stages=STAGES):
            column = first + n * step + i
            # p is row c % block_size of page block_table[t, c // block_size]
            page = tl.load(table_ptr + t * table_row + column // block_size, mask=column < end, other=-1)
            # columns whose page id is not in 0..blocks-1 are -inf
            exists = (page >= 0) & (page < blocks)
            base = cache_ptr + tl.where(exists, page, 0).to(tl.int64) * page16 * 16
            at = column % block_size
            row = (base + at * DIM).to(tl.pointer_type(tl.int32))
            k = tl.load(row[:, None] + w[None, :], mask=exists[:, None], other=0)
            scales = (base + block_size * DIM + at * 4).to(tl.pointer_type(tl.float32))
            scale = tl.load(scales, mask=exists, other=0.0)
            # a NaN code in a key makes its dot with every head NaN, hence its logit
            scale = tl.where(tl.max((holds_nan(k) != 0).to(tl.int32), axis=1) > 0, float("nan"), scale)
            # sum_d q[t, h, d] * k[p, d]
            score = tl.zeros([KEYS, HEADS], tl.float32)
            score = dot_keys(code_to_bf16(k, 0), q0, score)
            score = dot_keys(code_to_bf16(k, 1), q1, score)
            score = dot_keys(code_to_bf16(k, 2), q2, score)
            score = dot_keys(code_to_bf16(k, 3), q3, score)
            # logit[t, c] = k_scale[p] * sum_h weights[t, h] * relu(...)
            logit = tl.where(exists[:, None], scale[:, None] * head_sum(score, weight, 1, HEADS), float("-inf"))
            tl.store(out + column[:, None], logit, mask=(column < width)[:, None])
    for n in tl.range(tiles, tl.cdiv(tl.maximum(width - first, 0), step)):
        column = first + n * step + i
        tl.store(out + column, tl.full([KEYS], float("-inf"), tl.float32), mask=column < width)
