"""Device code of sparse_mla_prefill: attention of one token over its rows of the bfloat16 workspace."""

import triton
import triton.language as tl

from deepinfer_sm80.ops.attention.device import MASKED, dot, finish, step, to_bf16


@triton.jit(
    do_not_specialize=["heads", "rows", "width", "q_stride", "list_stride", "out_stride", "scale_log2"],
    do_not_specialize_on_alignment=["indices_ptr", "lens_ptr"],
)
def prefill_kernel(
    q_ptr,
    kv_ptr,
    indices_ptr,
    lens_ptr,
    sink_ptr,
    out_ptr,
    heads,
    rows,
    width,
    q_stride,
    list_stride,
    out_stride,
    scale_log2,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Programs (head blocks, tokens): BLOCK_M heads of one token. The blocks of a token run side by side and share its
    rows in L2. Strides of q and out in units of 8 elements: so their alignment is known.
    """
    t = tl.program_id(1).to(tl.int64)
    h = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    d = tl.arange(0, 64)
    mine = (h < heads)[:, None]
    q_rows = q_ptr + t * q_stride * 8 + h[:, None] * 512 + d[None, :]
    q0 = tl.load(q_rows, mask=mine, other=0.0)
    q1 = tl.load(q_rows + 64, mask=mine, other=0.0)
    q2 = tl.load(q_rows + 128, mask=mine, other=0.0)
    q3 = tl.load(q_rows + 192, mask=mine, other=0.0)
    q4 = tl.load(q_rows + 256, mask=mine, other=0.0)
    q5 = tl.load(q_rows + 320, mask=mine, other=0.0)
    q6 = tl.load(q_rows + 384, mask=mine, other=0.0)
    q7 = tl.load(q_rows + 448, mask=mine, other=0.0)

    listed = tl.minimum(tl.load(lens_ptr + t), width)
    list_ptr = indices_ptr + t * list_stride
    m = tl.full([BLOCK_M], MASKED, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    a0 = tl.zeros([BLOCK_M, 64], tl.float32)
    a1 = tl.zeros([BLOCK_M, 64], tl.float32)
    a2 = tl.zeros([BLOCK_M, 64], tl.float32)
    a3 = tl.zeros([BLOCK_M, 64], tl.float32)
    a4 = tl.zeros([BLOCK_M, 64], tl.float32)
    a5 = tl.zeros([BLOCK_M, 64], tl.float32)
    a6 = tl.zeros([BLOCK_M, 64], tl.float32)
    a7 = tl.zeros([BLOCK_M, 64], tl.float32)
    n = tl.arange(0, BLOCK_N)
    ahead = tl.load(list_ptr + n, mask=n < listed, other=-1)
    for start in range(0, listed, BLOCK_N):
        # j is valid if j < lens[t] and 0 <= indices[t, j] < S; the next tile's indices are on their way meanwhile
        index = ahead
        j = start + BLOCK_N + n
        ahead = tl.load(list_ptr + j, mask=j < listed, other=-1)
        valid = (index >= 0) & (index < rows)
        # rows = kv[indices[t, j]] for the valid j
        at = tl.where(valid, index, 0).to(tl.int64) * 512
        row = kv_ptr + at[:, None] + d[None, :]
        seen = valid[:, None]
        k0 = tl.load(row, mask=seen, other=0.0)
        k1 = tl.load(row + 64, mask=seen, other=0.0)
        k2 = tl.load(row + 128, mask=seen, other=0.0)
        k3 = tl.load(row + 192, mask=seen, other=0.0)
        k4 = tl.load(row + 256, mask=seen, other=0.0)
        k5 = tl.load(row + 320, mask=seen, other=0.0)
        k6 = tl.load(row + 384, mask=seen, other=0.0)
        k7 = tl.load(row + 448, mask=seen, other=0.0)
        # s[h, n] = softmax_scale * q[t, h] . rows[n], in base 2
        s = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        s = dot(q0, tl.trans(k0), s)
        s = dot(q1, tl.trans(k1), s)
        s = dot(q2, tl.trans(k2), s)
        s = dot(q3, tl.trans(k3), s)
        s = dot(q4, tl.trans(k4), s)
        s = dot(q5, tl.trans(k5), s)
        s = dot(q6, tl.trans(k6), s)
        s = dot(q7, tl.trans(k7), s)
        p, shrink, m, total = step(s * scale_log2, valid, m, total)
        # out[t, h] = sum_n bf16(p[h, n]) * rows[n]: the key is the value
        shrink = shrink[:, None]
        a0 = dot(p, k0, a0 * shrink)
        a1 = dot(p, k1, a1 * shrink)
        a2 = dot(p, k2, a2 * shrink)
        a3 = dot(p, k3, a3 * shrink)
        a4 = dot(p, k4, a4 * shrink)
        a5 = dot(p, k5, a5 * shrink)
        a6 = dot(p, k6, a6 * shrink)
        a7 = dot(p, k7, a7 * shrink)

    # / (sum_n p[h, n] + exp(attn_sink[h] - M[h]))
    factor = finish(m, total, tl.load(sink_ptr + h, mask=h < heads, other=0.0))[:, None]
    to = out_ptr + t * out_stride * 8 + h[:, None] * 512 + d[None, :]
    tl.store(to, to_bf16(a0 * factor), mask=mine)
    tl.store(to + 64, to_bf16(a1 * factor), mask=mine)
    tl.store(to + 128, to_bf16(a2 * factor), mask=mine)
    tl.store(to + 192, to_bf16(a3 * factor), mask=mine)
    tl.store(to + 256, to_bf16(a4 * factor), mask=mine)
    tl.store(to + 320, to_bf16(a5 * factor), mask=mine)
    tl.store(to + 384, to_bf16(a6 * factor), mask=mine)
    tl.store(to + 448, to_bf16(a7 * factor), mask=mine)
