"""Device code of sparse_mla_decode: attention straight from the 584-byte records, and the merge of split keys."""

import triton
import triton.language as tl

from deepinfer_sm80.ops.attention.device import INTERPRETED, MASKED, dot, finish, step, to_bf16
from deepinfer_sm80.ops.formats.device import e4m3_to_fp32, ue8m0_to_fp32

# $2: four codes. $3, $4: their factors as bfloat16, two a register. $0, $1: the values as bfloat16, two a register.
DECODE_FOUR = tl.constexpr("""
{
.reg .b32 lo, hi, t, u, bias, zero, nan, f0, f1;
.reg .pred bad;
and.b32 t, $2, 0x7f7f7f7f;
add.u32 t, t, 0x01010101;
and.b32 t, t, 0x80808080;
setp.ne.u32 bad, t, 0;
mov.b32 nan, 0x7fc07fc0;
selp.b32 f0, nan, $3, bad;
selp.b32 f1, nan, $4, bad;
prmt.b32 lo, $2, 0, 0x1404;
prmt.b32 hi, $2, 0, 0x3424;
shr.u32 t, lo, 4;
shr.u32 u, hi, 4;
and.b32 t, t, 0x07f007f0;
and.b32 u, u, 0x07f007f0;
lop3.b32 lo, lo, 0x80008000, t, 0xea;
lop3.b32 hi, hi, 0x80008000, u, 0xea;
mov.b32 bias, 0x7b807b80;
mov.b32 zero, 0x80008000;
fma.rn.bf16x2 lo, lo, bias, zero;
fma.rn.bf16x2 hi, hi, bias, zero;
fma.rn.bf16x2 $0, lo, f0, zero;
fma.rn.bf16x2 $1, hi, f1, zero;
}
""")


@triton.jit
def dequantise(codes, scale):
    """E4M3 ``codes`` uint8 [N, 64] times 2^(scale - 127), ``scale`` int32 [N, 64] 0..255: bfloat16, rounded once.

    The assembly takes four codes of one row. A code's seven magnitude bits under bfloat16's exponent are its value
    times 2^-120; one exact multiplication repairs that, a second one scales. Among four codes with a NaN (0x7F, 0xFF)
    all four become NaN: a NaN anywhere in a key makes its score NaN and with it the whole output.
    """
    if INTERPRETED:
        return to_bf16(e4m3_to_fp32(codes) * ue8m0_to_fp32(scale))
    else:
        bits = tl.where(scale == 0, 0x0040, tl.where(scale == 255, 0x7FC0, scale << 7))
        factor = bits.to(tl.int16).to(tl.bfloat16, bitcast=True)
        # is_pure=False: a pure decode is repeated for each of the two dots, byte by byte
        return tl.inline_asm_elementwise(
            DECODE_FOUR,
            "=r,=r,r,r,r",
            args=[codes, factor],
            dtype=tl.bfloat16,
            is_pure=False,
            pack=4,
        )


@triton.jit
def _nope(data, scales, valid, GROUP: tl.constexpr):
    """Dims 64 * GROUP .. 64 * GROUP + 63 of N rows, bfloat16 [N, 64]; zeros where not valid."""
    d = tl.arange(0, 64)
    codes = tl.load(data[:, None] + (GROUP * 64 + d)[None, :], mask=valid[:, None], other=0)
    scale = ((scales >> (8 * GROUP)) & 0xFF).to(tl.int32)
    return dequantise(codes, tl.broadcast_to(scale[:, None], codes.shape))


@triton.jit
def _rope(data, valid, PIPELINED: tl.constexpr):
    """Dims 448..511 of N rows, bfloat16 [N, 64]; zeros where not valid."""
    d = tl.arange(0, 64)
    dims = (data + 448).to(tl.pointer_type(tl.bfloat16), bitcast=True)
    values = tl.load(dims[:, None] + d[None, :], mask=valid[:, None], other=0.0)
    if INTERPRETED or PIPELINED:
        return values
    else:
        # loaded through registers: without this the tile goes to shared memory once for each of the two dots
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [values], tl.bfloat16, is_pure=False, pack=2)


@triton.jit(
    do_not_specialize=[
        "heads",
        "q_stride",
        "out_stride",
        "swa_stride",
        "swa_block_size",
        "swa_rows",
        "swa_width",
        "swa_list_stride",
        "extra_stride",
        "extra_block_size",
        "extra_rows",
        "extra_width",
        "extra_list_stride",
        "scale_log2",
        "splits",
    ],
    do_not_specialize_on_alignment=["swa_slots_ptr", "swa_lens_ptr", "extra_slots_ptr", "extra_lens_ptr"],
)
def decode_kernel(
    q_ptr,
    swa_ptr,
    swa_slots_ptr,
    swa_lens_ptr,
    extra_ptr,
    extra_slots_ptr,
    extra_lens_ptr,
    sink_ptr,
    out_ptr,
    partial_ptr,
    state_ptr,
    heads,
    q_stride,
    out_stride,
    swa_stride,
    swa_block_size,
    swa_rows,
    swa_width,
    swa_list_stride,
    extra_stride,
    extra_block_size,
    extra_rows,
    extra_width,
    extra_list_stride,
    scale_log2,
    splits,
    SPLIT: tl.constexpr,
    PIPELINED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One token, BLOCK_M heads, one share of the token's key tiles.

    Strides of q and out in units of 8 elements, of the caches' pages in units of 16 bytes: so their alignment is known.
    PIPELINED: with two stages or more, rows come to shared memory by asynchronous copies.
    SPLIT: the share's sum goes to partial [T, splits, heads, 512], its maximum and its sum of p to state [T, splits, 2,
    heads]. Otherwise splits is 1 and out is written; partial and state are not used.
    """
    blocks = tl.cdiv(heads, BLOCK_M)
    t = (tl.program_id(0) // blocks).to(tl.int64)
    h = tl.program_id(0) % blocks * BLOCK_M + tl.arange(0, BLOCK_M)
    d = tl.arange(0, 64)
    q_rows = q_ptr + t * q_stride * 8 + h[:, None] * 512 + d[None, :]
    mine = (h < heads)[:, None]
    q0 = tl.load(q_rows, mask=mine, other=0.0)
    q1 = tl.load(q_rows + 64, mask=mine, other=0.0)
    q2 = tl.load(q_rows + 128, mask=mine, other=0.0)
    q3 = tl.load(q_rows + 192, mask=mine, other=0.0)
    q4 = tl.load(q_rows + 256, mask=mine, other=0.0)
    q5 = tl.load(q_rows + 320, mask=mine, other=0.0)
    q6 = tl.load(q_rows + 384, mask=mine, other=0.0)
    q7 = tl.load(q_rows + 448, mask=mine, other=0.0)

    # Tiles of the window come first, then those of the compressed rows; each split takes an equal run of them.
    swa_len = tl.minimum(tl.maximum(tl.load(swa_lens_ptr + t), 0), swa_width)
    extra_len = 0
    if extra_width > 0:
        extra_len = tl.minimum(tl.maximum(tl.load(extra_lens_ptr + t), 0), extra_width)
    swa_tiles = tl.cdiv(swa_len, BLOCK_N)
    tiles = swa_tiles + tl.cdiv(extra_len, BLOCK_N)
    share = tl.cdiv(tiles, splits)
    first = tl.program_id(1) * share
    last = tl.minimum(first + share, tiles)
    swa_list = swa_slots_ptr + t * swa_list_stride
    extra_list = extra_slots_ptr + t * extra_list_stride

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
    for i in range(first, last):
        # Entry j of a set is valid if j < lens[t] and 0 <= slot < blocks * block_size
        extra = i >= swa_tiles
        j = tl.where(extra, i - swa_tiles, i) * BLOCK_N + tl.arange(0, BLOCK_N)
        listed = j < tl.where(extra, extra_len, swa_len)
        slot = tl.load(tl.where(extra, extra_list, swa_list) + j, mask=listed, other=-1)
        valid = (slot >= 0) & (slot < tl.where(extra, extra_rows, swa_rows))
        slot = tl.where(valid, slot, 0)

        # rows = the valid rows of both sets, dequantised to bfloat16
        block_size = tl.where(extra, extra_block_size, swa_block_size)
        page = (slot // block_size).to(tl.int64) * tl.where(extra, extra_stride, swa_stride) * 16
        row = slot % block_size
        start = tl.where(extra, extra_ptr, swa_ptr) + page
        data = start + row * 576
        scale_bytes = (start + (block_size * 576 + row * 8)).to(tl.pointer_type(tl.int64), bitcast=True)
        scales = tl.load(scale_bytes, mask=valid, other=0)
        k0 = _nope(data, scales, valid, 0)
        k1 = _nope(data, scales, valid, 1)
        k2 = _nope(data, scales, valid, 2)
        k3 = _nope(data, scales, valid, 3)
        k4 = _nope(data, scales, valid, 4)
        k5 = _nope(data, scales, valid, 5)
        k6 = _nope(data, scales, valid, 6)
        k7 = _rope(data, valid, PIPELINED)

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
        p, shrink, m, total = step(s * scale_log2, valid, m, total, SUM_FIRST=not PIPELINED)

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

    if SPLIT:
        part = t * splits + tl.program_id(1)
        state = state_ptr + part * 2 * heads + h
        tl.store(state, m, mask=h < heads)
        tl.store(state + heads, total, mask=h < heads)
        mine = mine & (first < last)  # the merge reads no sum of a share without tiles
        to = partial_ptr + (part * heads + h[:, None]) * 512 + d[None, :]
        tl.store(to, a0, mask=mine)
        tl.store(to + 64, a1, mask=mine)
        tl.store(to + 128, a2, mask=mine)
        tl.store(to + 192, a3, mask=mine)
        tl.store(to + 256, a4, mask=mine)
        tl.store(to + 320, a5, mask=mine)
        tl.store(to + 384, a6, mask=mine)
        tl.store(to + 448, a7, mask=mine)
    else:
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


@triton.jit(do_not_specialize=["heads", "out_stride", "splits"])
def merge_kernel(partial_ptr, state_ptr, sink_ptr, out_ptr, heads, out_stride, splits, MAX_SPLITS: tl.constexpr):
    """Merge one head's shares, left in partial and state by decode_kernel; ``out_stride`` in units of 8 elements."""
    t = (tl.program_id(0) // heads).to(tl.int64)
    h = tl.program_id(0) % heads
    i = tl.arange(0, MAX_SPLITS)
    d = tl.arange(0, 512)
    part = t * splits + i
    state = state_ptr + part * 2 * heads + h
    m = tl.load(state, mask=i < splits, other=MASKED)
    totals = tl.load(state + heads, mask=i < splits, other=0.0)
    sums = tl.load(
        partial_ptr + (part * heads + h)[:, None] * 512 + d[None, :],
        mask=(totals != 0.0)[:, None],  # 0: no valid row, and perhaps never written
        other=0.0,
    )
    # every share's p against the largest score of all, then as without a split
    largest = tl.max(m, 0)
    weight = tl.exp2(m - largest)
    total = tl.sum(totals * weight, 0)
    factor = finish(largest, total, tl.load(sink_ptr + h))
    tl.store(out_ptr + t * out_stride * 8 + h * 512 + d, to_bf16(tl.sum(sums * weight[:, None], 0) * factor))
