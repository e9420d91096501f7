"""Device code of dequantize_and_gather_k_cache."""

import triton
import triton.language as tl

from deepinfer_sm80.ops.formats.device import e4m3_to_fp32, fp32_to_bf16, ue8m0_to_fp32


@triton.jit(
    do_not_specialize=[
        "request_units",
        "row_units",
        "page_units",
        "table_stride",
        "offset",
        "capacity",
        "columns",
        "blocks",
        "block_size",
    ],
    do_not_specialize_on_alignment=["seq_lens_ptr", "gather_lens_ptr", "table_ptr"],
)
def gather_kernel(
    out_ptr,
    cache_ptr,
    seq_lens_ptr,
    gather_lens_ptr,
    table_ptr,
    request_units: tl.int64,
    row_units: tl.int64,
    page_units: tl.int64,
    table_stride: tl.int64,
    offset: tl.int64,
    capacity: tl.int32,
    columns: tl.int32,
    blocks: tl.int32,
    block_size: tl.int32,
    NOPE: tl.constexpr,
    ROPE: tl.constexpr,
    GROUP: tl.constexpr,
    SCALES: tl.constexpr,
    PAGE_UNIT: tl.constexpr,
    OUT_UNIT: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Program (r, w) copies blocks w, w + W, w + 2 W ... of ROWS rows of request r.

    Strides of ``out`` are ``units`` * OUT_UNIT elements, of a page PAGE_UNIT bytes.
    """
    DATA: tl.constexpr = NOPE + 2 * ROPE
    r = tl.program_id(0).to(tl.int64)
    # n = gather_lens[r],   start = seq_lens[r] - n; rows that do not fit are not written
    length = tl.load(gather_lens_ptr + r).to(tl.int64)
    start = tl.load(seq_lens_ptr + r).to(tl.int64) - length
    n = tl.minimum(length, capacity.to(tl.int64)).to(tl.int32)
    table = table_ptr + r * table_stride
    target = out_ptr + r * request_units * OUT_UNIT

    g = tl.arange(0, SCALES)[None, :]
    d = (tl.arange(0, SCALES) * GROUP)[None, :, None] + tl.arange(0, GROUP)[None, None, :]
    e = tl.arange(0, ROPE)[None, :]
    for first in range(tl.program_id(1) * ROWS, n, tl.num_programs(1) * ROWS):
        i = first + tl.arange(0, ROWS)
        wanted = i < n
        # the row read: row(block_table[r, (start + i) // block_size], (start + i) % block_size)
        position = start + i
        known = wanted & (position >= 0)
        position = tl.where(known, position, 0).to(tl.int32)
        column = position // block_size
        block = tl.load(table + column, mask=known & (column < columns), other=-1)
        readable = (block >= 0) & (block < blocks)
        page = tl.where(readable, block, 0).to(tl.int64) * page_units * PAGE_UNIT
        row = (position % block_size).to(tl.int64)
        data = cache_ptr + page + row * DATA
        scales = cache_ptr + page + block_size.to(tl.int64) * DATA + row * SCALES

        # bf16(e4m3(code[d]) * 2^(scale[d // 64] - 127)) for d < 448; a row that cannot be read is zeros
        mask = readable[:, None] & (g < NOPE // GROUP)
        code = tl.load(data[:, None, None] + d, mask=readable[:, None, None] & (d < NOPE), other=0)
        scale = tl.load(scales[:, None] + g, mask=mask, other=127)
        nope = fp32_to_bf16(e4m3_to_fp32(code) * ue8m0_to_fp32(scale)[:, :, None])
        # else the stored bfloat16, bit for bit
        stored = (data + NOPE).to(tl.pointer_type(tl.int16))
        rope = tl.load(stored[:, None] + e, mask=readable[:, None], other=0)

        # written to out[r, offset + i]
        to = target + (offset + i) * row_units * OUT_UNIT
        tl.store(to[:, None, None] + d, nope, mask=wanted[:, None, None] & (d < NOPE))
        tl.store((to + NOPE).to(tl.pointer_type(tl.int16))[:, None] + e, rope, mask=wanted[:, None])
