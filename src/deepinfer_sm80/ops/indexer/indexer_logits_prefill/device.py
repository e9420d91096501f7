"""Device code of indexer_logits_prefill, and the arithmetic of one tile that the paged kernel shares."""

import triton
import triton.language as tl

from deepinfer_sm80.ops.formats.device import INTERPRETED, e4m3_to_fp32


@triton.jit
def e4m3_to_bf16(codes):
    """E4M3 codes -> bfloat16, exactly: the upper half of the float32 value."""
    return (e4m3_to_fp32(codes).to(tl.int32, bitcast=True) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def decode_keys(codes):
    """E4M3 codes -> bfloat16, exactly, in a form that the tensor cores' loads understand."""
    keys = e4m3_to_bf16(codes)
    if INTERPRETED:
        return keys
    else:
        # Opaque to the compiler: if it sees that the operand was bytes, it lays both operands out for byte loads,
        # which costs twice the loads and a move for every register.
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [keys], tl.bfloat16, False, 2)


@triton.jit
def dot_keys(keys, query, score):
    """``score`` float32 [N, M] plus keys bfloat16 [N, K] times the transposed query bfloat16 [M, K].

    E4M3 values are bfloat16 values and their products are float32 values: only the sums round.
    """
    if INTERPRETED:  # Triton's interpreter multiplies the bits of bfloat16 operands as integers
        return tl.dot(keys.to(tl.float32), tl.trans(query.to(tl.float32)), score, input_precision="ieee")
    else:
        return tl.dot(keys, tl.trans(query), score)


@triton.jit
def head_sum(score, weight, QUERIES: tl.constexpr, HEADS: tl.constexpr):
    """sum_h weight[t, h] * relu(score[s, t, h]), float32 [N, QUERIES]; score [N, QUERIES * HEADS]. NaN stays NaN."""
    score = tl.maximum(score, 0.0, propagate_nan=tl.PropagateNan.ALL)
    return tl.sum(tl.reshape(score * weight[None, :], [score.shape[0], QUERIES, HEADS]), axis=2)


@triton.jit(do_not_specialize=["count"])
def query_values_kernel(codes_ptr, out_ptr, count, BLOCK: tl.constexpr):
    """E4M3 codes to bfloat16, exactly. ``count`` 16-byte groups of codes."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < count * 16
    tl.store(out_ptr + i, e4m3_to_bf16(tl.load(codes_ptr + i, mask=inside, other=0)), mask=inside)


@triton.jit(
    do_not_specialize=["start_step", "end_step", "tokens", "keys", "max_k"],
    do_not_specialize_on_alignment=["start_ptr", "end_ptr", "scale_ptr"],
)
def logits_prefill_kernel(
    query_ptr,
    weights_ptr,
    codes_ptr,
    scale_ptr,
    start_ptr,
    end_ptr,
    out_ptr,
    start_step,
    end_step,
    tokens,
    keys,
    max_k,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    KEYS: tl.constexpr,
    TOKENS: tl.constexpr,
    QUERIES: tl.constexpr,
    STAGES: tl.constexpr,
):
    """KEYS keys against TOKENS queries, QUERIES at a time: the keys are decoded once while the queries pass by.

    ``query_ptr`` holds decoded queries bfloat16 [tokens, HEADS, DIM]. ``out_ptr`` [tokens, max_k] is -inf already.
    """
    first_key, first_token = tl.program_id(0) * KEYS, tl.program_id(1) * TOKENS
    # K row = row_start + c, 0 <= s < min(row_end[t], S): a tile that no query of the block reaches is left out
    t = first_token + tl.arange(0, TOKENS)
    start = tl.load(start_ptr + t.to(tl.int64) * start_step, mask=t < tokens, other=2147483647)
    end = tl.load(end_ptr + t.to(tl.int64) * end_step, mask=t < tokens, other=-2147483648)
    lowest, highest = tl.min(start, axis=0), tl.max(end, axis=0)
    if (first_key < highest) & (first_key + KEYS > lowest):
        s = first_key + tl.arange(0, KEYS)
        exists = s < keys
        d, h, j = tl.arange(0, DIM), tl.arange(0, QUERIES * HEADS), tl.arange(0, QUERIES)
        row = codes_ptr + s.to(tl.int64)[:, None] * DIM + d[None, :]
        key = decode_keys(tl.load(row, mask=exists[:, None], other=0))
        scale = tl.load(scale_ptr + s, mask=exists, other=0.0)
        tile = h[:, None] * DIM + d[None, :]
        left = tl.minimum(TOKENS, tokens - first_token)
        for n in tl.range(0, left, QUERIES, num_stages=STAGES):
            token = first_token.to(tl.int64) + n
            present = h < (left - n) * HEADS
            query = tl.load(query_ptr + token * (HEADS * DIM) + tile, mask=present[:, None], other=0.0)
            weight = tl.load(weights_ptr + token * HEADS + h, mask=present, other=0.0)
            # logit[t, c] = k_scale[s] * sum_h weights[t, h] * relu(sum_d q[t, h, d] * k[s, d])
            score = dot_keys(key, query, tl.zeros([KEYS, QUERIES * HEADS], tl.float32))
            logit = scale[:, None] * head_sum(score, weight, QUERIES, HEADS)
            each = j < left - n
            begin = tl.load(start_ptr + (token + j) * start_step, mask=each, other=0)
            stop = tl.load(end_ptr + (token + j) * end_step, mask=each, other=0)
            column = s[:, None] - begin.to(tl.int64)[None, :]
            inside = (exists[:, None] & (s[:, None] < stop[None, :])) & ((column >= 0) & (column < max_k))
            out = out_ptr + (token + j)[None, :] * max_k + column
            tl.store(out, logit, mask=inside & each[None, :])
