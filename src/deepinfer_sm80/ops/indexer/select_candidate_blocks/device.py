"""Device code of select_candidate_blocks: block scores as ordered keys. The selection is indexer_topk's."""

import triton
import triton.language as tl

from deepinfer_sm80.ops.indexer.indexer_topk.device import NEVER, choose, emit_columns, emit_survivors, ordered_key


@triton.jit(
    do_not_specialize=["first_row", "logits_row", "lens_step", "width", "blocks", "block_size"],
    do_not_specialize_on_alignment=["logits_ptr", "lens_ptr"],
)
def block_keys_kernel(
    logits_ptr,
    lens_ptr,
    keys_ptr,
    first_row,
    logits_row,
    lens_step,
    width,
    blocks,
    block_size,
    BLOCKS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Keys int32 [rows, blocks] of the rows from ``first_row`` on."""
    r = tl.program_id(0).to(tl.int64)
    t = first_row + r
    b = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    # valid columns: n = clamp(row_lens[t], 0, S)
    n = tl.minimum(tl.maximum(tl.load(lens_ptr + t * lens_step), 0), width)
    # score[t, b] = max of logits[t, c] over b * block_size <= c < min((b + 1) * block_size, n); NaN counts as -inf
    best = tl.full([BLOCKS], NEVER, tl.int32)
    for first in tl.range(0, block_size, COLUMNS):
        j = first + tl.arange(0, COLUMNS)
        column = (b * block_size)[:, None] + j[None, :]
        inside = ((b < blocks)[:, None] & (j < block_size)[None, :]) & (column < n)
        logit = tl.load(logits_ptr + t * logits_row + column, mask=inside, other=float("-inf"))
        best = tl.maximum(best, tl.max(ordered_key(logit), axis=1))
    # the block of the newest column, (n - 1) // block_size, is always kept: above the key of infinity
    newest = (n > 0) & (b == (n - 1) // block_size)
    tl.store(keys_ptr + r * blocks + b, tl.where(newest, 0x7FFFFFFF, best), mask=b < blocks)


@triton.jit(
    do_not_specialize=["first_row", "width", "topk", "out_row", "out_step"],
    do_not_specialize_on_alignment=["out_ptr"],
)
def first_round_kernel(
    in_keys_ptr,
    out_ptr,
    keys_ptr,
    columns_ptr,
    first_row,
    width,
    topk,
    out_row,
    out_step,
    CHUNK: tl.constexpr,
    LAST: tl.constexpr,
):
    """Block keys [rows, width], whose columns are their positions. Further rounds are indexer_topk's."""
    r, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i = chunk * CHUNK + tl.arange(0, CHUNK)
    key = tl.load(in_keys_ptr + r * width + i, mask=i < width, other=NEVER)
    chosen, position, count = choose(key, topk)
    if LAST:
        emit_columns(out_ptr + (first_row + r) * out_row, out_step, i, chosen, position, count, topk)
    else:
        at = (r * tl.num_programs(1) + chunk) * topk
        emit_survivors(keys_ptr + at, columns_ptr + at, key, i, chosen, position, count, topk)
