"""Device code of engram_lookup."""

import triton
import triton.language as tl

from deepinfer_sm80.ops.formats.device import e4m3_to_fp32, fp32_to_bf16, ue8m0_to_fp32


@triton.jit(
    do_not_specialize=[
        "results",
        "local_heads",
        "head_start",
        "heads",
        "token_stride",
        "head_stride",
        "vocab_start",
        "rows",
    ],
    do_not_specialize_on_alignment=["ids_ptr"],
)
def lookup_kernel(
    weight_ptr,
    scale_ptr,
    ids_ptr,
    out_ptr,
    results: tl.int64,
    local_heads: tl.int32,
    head_start: tl.int64,
    heads: tl.int64,
    token_stride: tl.int64,
    head_stride: tl.int64,
    vocab_start: tl.int64,
    rows: tl.int64,
    DIM: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
):
    """One program, ROWS of the T * local_heads results. This rank owns ids vocab_start .. vocab_start + rows - 1."""
    SCALES: tl.constexpr = DIM // GROUP
    i = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = i < results
    t, head = i // local_heads, head_start + i % local_heads
    # r = ids[t, head_start + j] - vocab_start, if that column exists; at most rows - 1, compared so that nothing wraps
    listed = inside & (head < heads)
    id = tl.load(ids_ptr + t * token_stride + head * head_stride, mask=listed, other=-1).to(tl.int64)
    owned = listed & (id >= vocab_start) & (id < vocab_start + rows)
    r = tl.where(owned, id - vocab_start, 0)

    g = tl.arange(0, SCALES)[None, :]
    d = (tl.arange(0, SCALES) * GROUP)[None, :, None] + tl.arange(0, GROUP)[None, None, :]
    code = tl.load(weight_ptr + (r * DIM)[:, None, None] + d, mask=owned[:, None, None], other=0)
    scale = tl.load(scale_ptr + (r * SCALES)[:, None] + g, mask=owned[:, None], other=127)
    # out[t, j, d] = bf16(e4m3(weight[r, d]) * 2^(scale[r, d // 32] - 127)), else 0
    value = fp32_to_bf16(e4m3_to_fp32(code) * ue8m0_to_fp32(scale)[:, :, None])
    tl.store(out_ptr + (i * DIM)[:, None, None] + d, value, mask=inside[:, None, None])
