"""Device code of indexer_topk, and the selection that select_candidate_blocks shares.

The rounds are in tournament.py. A program finds the ``topk`` largest of CHUNK keys exactly, in its registers, and
passes them on in column order. No histogram, no atomics, no state between launches. The largest of the whole are among
the largest of their chunks, and ties go to the lowest position in every round, so the result is that of one sort.
"""

import triton
import triton.language as tl

NEVER = tl.constexpr(-(2**31))
"""Key of what cannot be chosen; below the key of every float32 that can."""
FILL = tl.constexpr(1024)


@triton.jit
def ordered_key(x):
    """float32 -> int32 in the same order, -0.0 equal to 0.0; NEVER for -inf and NaN."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    key = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return tl.where(x > float("-inf"), key, NEVER)


@triton.jit
def choose(key, topk):
    """Which keys int32 [CHUNK] are among the ``topk`` largest, and where each goes: (bool, int32 position, count).

    The threshold is the topk-th largest key, found bit by bit from the top. Ties at it go to the lowest positions.
    """
    count = tl.sum((key > NEVER).to(tl.int32), axis=0)
    threshold = tl.full([], NEVER, tl.int32)
    # with no more keys than wanted, all of them
    bit = tl.where(count > topk, 31, -1)
    while bit >= 0:
        # 2^31 above NEVER is 0: the sum wraps round to it
        step = tl.where(bit == 31, NEVER, tl.full([], 1, tl.int32) << bit)
        candidate = threshold ^ step
        reached = tl.sum((key >= candidate).to(tl.int32), axis=0)
        threshold = tl.where(reached >= topk, candidate, threshold)
        # exactly topk keys reach the threshold: its lower bits do not matter
        bit = tl.where(reached == topk, -1, bit - 1)
    above = key > threshold
    tie = key == threshold
    # one scan for both: keys above in the low half, ties in the high half
    ranks = tl.cumsum(above.to(tl.int32) + (tie.to(tl.int32) << 16), axis=0)
    taken_ties = tl.where(threshold == NEVER, 0, topk - tl.sum(above.to(tl.int32), axis=0))
    tie_rank = ranks >> 16
    chosen = above | (tie & (tie_rank <= taken_ties))
    position = (ranks & 0xFFFF) + tl.minimum(tie_rank, taken_ties) - 1
    return chosen, position, tl.minimum(count, topk)


@triton.jit
def fill_rest(row_ptr, step, value, count, topk):
    """``value`` into positions count..topk-1."""
    for first in tl.range(count // FILL * FILL, topk, FILL):
        j = first + tl.arange(0, FILL)
        tl.store(row_ptr + j * step, tl.full([FILL], value, tl.int32), mask=(j >= count) & (j < topk))


@triton.jit
def emit_columns(row_ptr, step, column, chosen, position, count, topk):
    """Columns to their positions, then -1 up to ``topk``; ``step`` elements between two of them, below 2^31 in all."""
    fill_rest(row_ptr, step, -1, count, topk)
    tl.store(row_ptr + position * step, column, mask=chosen)


@triton.jit
def emit_survivors(keys_ptr, columns_ptr, key, column, chosen, position, count, topk):
    """Keys and columns to their positions, then NEVER up to ``topk``."""
    fill_rest(keys_ptr, 1, NEVER, count, topk)
    tl.store(keys_ptr + position, key, mask=chosen)
    tl.store(columns_ptr + position, column, mask=chosen)


@triton.jit(do_not_specialize=["list_row", "entries", "blocks"], do_not_specialize_on_alignment=["list_ptr"])
def order_candidates_kernel(list_ptr, out_ptr, list_row, entries, blocks, BLOCK: tl.constexpr, OTHERS: tl.constexpr):
    """A row's block ids in ascending order, ids outside 0..blocks-1 as ``blocks`` at the end; duplicates stay.

    A list that is in order, as select_candidate_blocks writes it, is copied. Any other is sorted by counting for each
    of the program's BLOCK entries those that come before it: entries^2 comparisons.
    """
    t = tl.program_id(0).to(tl.int64)
    row = list_ptr + t * list_row
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mine = tl.load(row + i, mask=i < entries, other=-1)
    mine = tl.where((mine >= 0) & (mine < blocks), mine, blocks)
    falls = tl.zeros([], tl.int32)
    for first in tl.range(1, entries, BLOCK):
        j = first + tl.arange(0, BLOCK)
        here = tl.load(row + j, mask=j < entries, other=-1)
        before = tl.load(row + j - 1, mask=j < entries, other=-1)
        here = tl.where((here >= 0) & (here < blocks), here, blocks)
        before = tl.where((before >= 0) & (before < blocks), before, blocks)
        falls += tl.sum((before > here).to(tl.int32), axis=0)
    place = i
    if falls > 0:
        place = tl.zeros_like(i)
        for first in tl.range(0, entries, OTHERS):
            j = first + tl.arange(0, OTHERS)
            other = tl.load(row + j, mask=j < entries, other=-1)
            other = tl.where((other >= 0) & (other < blocks), other, blocks)
            earlier = (other[None, :] < mine[:, None]) | ((other[None, :] == mine[:, None]) & (j[None, :] < i[:, None]))
            place += tl.sum((earlier & (j < entries)[None, :]).to(tl.int32), axis=1)
    tl.store(out_ptr + t * entries + place, mine, mask=i < entries)


@triton.jit(
    do_not_specialize=["first_row", "logits_row", "lens_step", "width", "topk", "out_row", "out_step"],
    do_not_specialize_on_alignment=["logits_ptr", "lens_ptr", "out_ptr"],
)
def first_round_kernel(
    logits_ptr,
    lens_ptr,
    out_ptr,
    keys_ptr,
    columns_ptr,
    first_row,
    logits_row,
    lens_step,
    width,
    topk,
    out_row,
    out_step,
    CHUNK: tl.constexpr,
    LAST: tl.constexpr,
):
    """All columns of a row. LAST: one chunk holds the row and ``out`` is written; else survivors, topk a chunk."""
    r, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    t = first_row + r
    # columns c < min(max(row_lens[t], 0), S)
    end = tl.minimum(tl.load(lens_ptr + t * lens_step), width)
    column = chunk * CHUNK + tl.arange(0, CHUNK)
    logit = tl.load(logits_ptr + t * logits_row + column, mask=column < end, other=float("-inf"))
    key = ordered_key(logit)
    chosen, position, count = choose(key, topk)
    if LAST:
        emit_columns(out_ptr + t * out_row, out_step, column, chosen, position, count, topk)
    else:
        at = (r * tl.num_programs(1) + chunk) * topk
        emit_survivors(keys_ptr + at, columns_ptr + at, key, column, chosen, position, count, topk)


@triton.jit(
    do_not_specialize=[
        "first_row",
        "logits_row",
        "lens_step",
        "width",
        "topk",
        "out_row",
        "out_step",
        "entries",
        "block_size",
    ],
    do_not_specialize_on_alignment=["logits_ptr", "lens_ptr", "out_ptr"],
)
def candidates_round_kernel(
    logits_ptr,
    lens_ptr,
    list_ptr,
    out_ptr,
    keys_ptr,
    columns_ptr,
    first_row,
    logits_row,
    lens_step,
    width,
    topk,
    out_row,
    out_step,
    entries,
    block_size,
    CHUNK: tl.constexpr,
    LAST: tl.constexpr,
):
    """As ``first_round_kernel``, over the columns of the row's blocks alone: list int32 [T, entries], ordered."""
    r, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    t = first_row + r
    end = tl.minimum(tl.load(lens_ptr + t * lens_step), width)
    # whose block c // candidate_block_size is in the row's list
    slot = chunk * CHUNK + tl.arange(0, CHUNK)
    entry = slot // block_size
    listed = entry < entries
    block = tl.load(list_ptr + t * entries + entry, mask=listed, other=-1)
    before = tl.load(list_ptr + t * entries + entry - 1, mask=listed & (entry > 0), other=-1)
    column = block * block_size + slot % block_size
    eligible = listed & (block != before) & (column < end)
    logit = tl.load(logits_ptr + t * logits_row + column, mask=eligible, other=float("-inf"))
    key = ordered_key(logit)
    chosen, position, count = choose(key, topk)
    if LAST:
        emit_columns(out_ptr + t * out_row, out_step, column, chosen, position, count, topk)
    else:
        at = (r * tl.num_programs(1) + chunk) * topk
        emit_survivors(keys_ptr + at, columns_ptr + at, key, column, chosen, position, count, topk)


@triton.jit(
    do_not_specialize=["first_row", "width", "topk", "out_row", "out_step"],
    do_not_specialize_on_alignment=["out_ptr"],
)
def next_round_kernel(
    in_keys_ptr,
    in_columns_ptr,
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
    """Keys [rows, width] and their columns, the survivors of the round before."""
    r, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    t = first_row + r
    i = chunk * CHUNK + tl.arange(0, CHUNK)
    key = tl.load(in_keys_ptr + r * width + i, mask=i < width, other=NEVER)
    chosen, position, count = choose(key, topk)
    column = tl.load(in_columns_ptr + r * width + i, mask=chosen, other=0)
    if LAST:
        emit_columns(out_ptr + t * out_row, out_step, column, chosen, position, count, topk)
    else:
        at = (r * tl.num_programs(1) + chunk) * topk
        emit_survivors(keys_ptr + at, columns_ptr + at, key, column, chosen, position, count, topk)
