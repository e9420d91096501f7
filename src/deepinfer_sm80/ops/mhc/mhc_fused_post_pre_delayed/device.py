"""Device code of mhc_fused_post_pre_delayed: the write-back with partial sums of the projection, and what follows."""

import triton
import triton.language as tl

from deepinfer_sm80.ops.formats.device import INTERPRETED, add_rn, fp32_to_bf16, mul_rn


@triton.jit
def written_back(post, x, comb0, comb1, comb2, comb3, r0, r1, r2, r3):
    """bf16 of ((((post * x) + comb0 * r0) + comb1 * r1) + comb2 * r2) + comb3 * r3, every step rounded by itself."""
    total = add_rn(mul_rn(post, x), mul_rn(comb0, r0))
    total = add_rn(total, mul_rn(comb1, r1))
    total = add_rn(total, mul_rn(comb2, r2))
    return fp32_to_bf16(add_rn(total, mul_rn(comb3, r3)))


@triton.jit
def mix_dot(streams, fn, acc):
    """acc + streams . fn^T: the float32 fn as three bfloat16 terms, whose products with a bfloat16 are exact."""
    if INTERPRETED:
        return acc + tl.dot(streams.to(tl.float32), tl.trans(fn), input_precision="ieee")
    else:
        high = fn.to(tl.bfloat16)
        rest = fn - high.to(tl.float32)
        middle = rest.to(tl.bfloat16)
        low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
        acc = tl.dot(streams, tl.trans(low), acc)
        acc = tl.dot(streams, tl.trans(middle), acc)
        return tl.dot(streams, tl.trans(high), acc)


@triton.jit(do_not_specialize=["T", "H", "width"])
def fused_fma_kernel(
    x_ptr,
    residual_ptr,
    post_ptr,
    comb_ptr,
    fn_ptr,
    streams_ptr,
    partial_ptr,
    T,
    H,
    width,
    S: tl.constexpr,
    MIXES: tl.constexpr,
    PAD: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """One token and ``width`` columns a program: few tokens, so fn is read once for each from L2."""
    t = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    n = tl.arange(0, PAD)
    acc = tl.zeros([PAD, BLOCK_H], tl.float32)
    squares = tl.zeros([BLOCK_H], tl.float32)
    row = residual_ptr + t * S * H
    c = comb_ptr + t * S * S
    for start in range(part * width, tl.minimum((part + 1) * width, H), BLOCK_H):
        h = start + tl.arange(0, BLOCK_H)
        inside = h < H
        x = tl.load(x_ptr + t * H + h, mask=inside, other=0.0).to(tl.float32)
        r0 = tl.load(row + h, mask=inside, other=0.0).to(tl.float32)
        r1 = tl.load(row + H + h, mask=inside, other=0.0).to(tl.float32)
        r2 = tl.load(row + 2 * H + h, mask=inside, other=0.0).to(tl.float32)
        r3 = tl.load(row + 3 * H + h, mask=inside, other=0.0).to(tl.float32)
        for j in range(S):
            post = tl.load(post_ptr + t * S + j)
            c0, c1 = tl.load(c + j), tl.load(c + S + j)
            c2, c3 = tl.load(c + 2 * S + j), tl.load(c + 3 * S + j)
            new = written_back(post, x, c0, c1, c2, c3, r0, r1, r2, r3)
            tl.store(streams_ptr + (t * S + j) * H + h, new, mask=inside)
            value = new.to(tl.float32)
            weight = fn_ptr + n.to(tl.int64)[:, None] * (S * H) + j * H + h[None, :]
            acc += tl.load(weight, mask=(n < MIXES)[:, None] & inside[None, :], other=0.0) * value[None, :]
            squares += value * value
    total = tl.where(n == MIXES, tl.sum(squares, axis=0), tl.sum(acc, axis=1))
    tl.store(partial_ptr + (part.to(tl.int64) * T + t) * PAD + n, total)


@triton.jit(do_not_specialize=["T", "H", "width"])
def fused_dot_kernel(
    x_ptr,
    residual_ptr,
    post_ptr,
    comb_ptr,
    fn_ptr,
    streams_ptr,
    partial_ptr,
    T,
    H,
    width,
    S: tl.constexpr,
    MIXES: tl.constexpr,
    PAD: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """BLOCK_T tokens and ``width`` columns a program, on tensor cores."""
    t = (tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
    part = tl.program_id(1)
    live = t < T
    n = tl.arange(0, PAD)
    acc = tl.zeros([BLOCK_T, PAD], tl.float32)
    squares = tl.zeros([BLOCK_T], tl.float32)
    c = comb_ptr + t * (S * S)
    for start in range(part * width, tl.minimum((part + 1) * width, H), BLOCK_H):
        h = start + tl.arange(0, BLOCK_H)
        inside = live[:, None] & (h < H)[None, :]
        x = tl.load(x_ptr + t[:, None] * H + h[None, :], mask=inside, other=0.0).to(tl.float32)
        row = residual_ptr + t[:, None] * S * H + h[None, :]
        r0 = tl.load(row, mask=inside, other=0.0).to(tl.float32)
        r1 = tl.load(row + H, mask=inside, other=0.0).to(tl.float32)
        r2 = tl.load(row + 2 * H, mask=inside, other=0.0).to(tl.float32)
        r3 = tl.load(row + 3 * H, mask=inside, other=0.0).to(tl.float32)
        for j in range(S):
            post = tl.load(post_ptr + t * S + j, mask=live, other=0.0)[:, None]
            c0 = tl.load(c + j, mask=live, other=0.0)[:, None]
            c1 = tl.load(c + S + j, mask=live, other=0.0)[:, None]
            c2 = tl.load(c + 2 * S + j, mask=live, other=0.0)[:, None]
            c3 = tl.load(c + 3 * S + j, mask=live, other=0.0)[:, None]
            new = written_back(post, x, c0, c1, c2, c3, r0, r1, r2, r3)
            tl.store(streams_ptr + (t[:, None] * S + j) * H + h[None, :], new, mask=inside)
            weight = fn_ptr + n.to(tl.int64)[:, None] * (S * H) + j * H + h[None, :]
            fn = tl.load(weight, mask=(n < MIXES)[:, None] & (h < H)[None, :], other=0.0)
            acc = mix_dot(new, fn, acc)
            value = new.to(tl.float32)
            squares += tl.sum(value * value, axis=1)
    total = tl.where((n == MIXES)[None, :], squares[:, None], acc)
    at = partial_ptr + (part.to(tl.int64) * T + t[:, None]) * PAD + n[None, :]
    tl.store(at, total, mask=live[:, None])


@triton.jit
def sigmoid(z):
    return 1.0 / (1.0 + tl.exp(-z))


@triton.jit(do_not_specialize=["T", "H", "parts", "iterations", "rms_eps", "hc_eps", "norm_eps"])
def epilogue_kernel(
    partial_ptr,
    streams_ptr,
    scale_ptr,
    base_ptr,
    pre_ptr,
    norm_ptr,
    next_post_ptr,
    next_comb_ptr,
    input_ptr,
    next_pre_ptr,
    T,
    H,
    parts,
    iterations,
    rms_eps,
    hc_eps,
    norm_eps,
    S: tl.constexpr,
    MIXES: tl.constexpr,
    PAD: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """One token a program: coefficients from the partial sums, and the next sublayer's input."""
    t = tl.program_id(0).to(tl.int64)
    s = tl.arange(0, S)
    square = s[:, None] * S + s[None, :]
    pre = tl.zeros([S], tl.float32)
    post = tl.zeros([S], tl.float32)
    comb = tl.zeros([S, S], tl.float32)
    squares = 0.0
    for part in range(parts):
        sums = partial_ptr + (part * T + t) * PAD
        pre += tl.load(sums + s)
        post += tl.load(sums + S + s)
        comb += tl.load(sums + 2 * S + square)
        squares += tl.load(sums + MIXES)
    root = tl.math.rsqrt(squares / (S * H) + rms_eps)

    pre = sigmoid(pre * root * tl.load(scale_ptr) + tl.load(base_ptr + s)) + hc_eps
    post = 2.0 * sigmoid(post * root * tl.load(scale_ptr + 1) + tl.load(base_ptr + S + s))
    comb = comb * root * tl.load(scale_ptr + 2) + tl.load(base_ptr + 2 * S + square)
    comb = tl.exp(comb - tl.max(comb, axis=1)[:, None])
    comb = comb / tl.sum(comb, axis=1)[:, None] + hc_eps
    comb = comb / (tl.sum(comb, axis=0)[None, :] + hc_eps)
    for _ in range(iterations - 1):
        comb = comb / (tl.sum(comb, axis=1)[:, None] + hc_eps)
        comb = comb / (tl.sum(comb, axis=0)[None, :] + hc_eps)
    tl.store(next_pre_ptr + t * S + s, pre)
    tl.store(next_post_ptr + t * S + s, post)
    tl.store(next_comb_ptr + t * S * S + square, comb)

    h = tl.arange(0, BLOCK_H)
    inside = h < H
    u = tl.zeros([BLOCK_H], tl.float32)
    for j in tl.static_range(S):
        stream = tl.load(streams_ptr + (t * S + j) * H + h, mask=inside, other=0.0).to(tl.float32)
        u += tl.load(pre_ptr + t * S + j) * stream
    u = fp32_to_bf16(u).to(tl.float32)
    root = tl.math.rsqrt(tl.sum(u * u, axis=0) / H + norm_eps)
    weight = tl.load(norm_ptr + h, mask=inside, other=0.0).to(tl.float32)
    tl.store(input_ptr + t * H + h, fp32_to_bf16(u * root * weight), mask=inside)
