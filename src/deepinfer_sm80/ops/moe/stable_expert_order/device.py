"""Device code of stable_expert_order."""

import triton
import triton.language as tl


@triton.jit(
    do_not_specialize=["length", "num_blocks", "block_size", "num_routes"],
    do_not_specialize_on_alignment=["ids_ptr", "experts_ptr", "used_ptr"],
)
def order_kernel(
    ids_ptr,
    experts_ptr,
    used_ptr,
    out_ptr,
    length: tl.int32,
    num_blocks: tl.int32,
    block_size: tl.int32,
    num_routes: tl.int32,
    BLOCKS: tl.constexpr,
    ROWS: tl.constexpr,
    OTHERS: tl.constexpr,
):
    """One program, one block of ``block_size`` rows: each row counts the rows of its segment that go before it."""
    block = tl.program_id(0)
    # whole blocks are in use; rounding up, a number that breaks the contract leaves no row unwritten
    used = tl.minimum(tl.maximum(tl.load(used_ptr), 0), length)
    used = tl.minimum(tl.cdiv(used, block_size) * block_size, length)
    low, high = used, length  # the unused tail is one segment of its own
    if block * block_size < used:
        # a maximal run of blocks with equal expert_ids: it starts at the last change up to this block, and ends before
        # the first change after it
        begin = 0
        end = num_blocks
        for first in range(0, num_blocks, BLOCKS):
            b = first + tl.arange(0, BLOCKS)
            inner = (b > 0) & (b < num_blocks)
            changed = inner & (
                tl.load(experts_ptr + b, mask=inner, other=0) != tl.load(experts_ptr + b - 1, mask=inner, other=0)
            )
            begin = tl.maximum(begin, tl.max(tl.where(changed & (b <= block), b, 0), axis=0))
            end = tl.minimum(end, tl.min(tl.where(changed & (b > block), b, num_blocks), axis=0))
        low = begin * block_size
        high = tl.minimum(end * block_size, used)

    # out[segment] = sorted(sorted_token_ids[segment]); equal values, which are padding, keep their order
    for first in range(block * block_size, tl.minimum((block + 1) * block_size, length), ROWS):
        i = first + tl.arange(0, ROWS)
        mine = (i < (block + 1) * block_size) & (i < high)
        value = tl.load(ids_ptr + i, mask=mine, other=0)
        value = tl.minimum(tl.maximum(value, 0), num_routes)
        before = tl.zeros([ROWS], tl.int32)
        for start in range(low, high, OTHERS):
            k = start + tl.arange(0, OTHERS)
            other = tl.load(ids_ptr + k, mask=k < high, other=2147483647)
            other = tl.where(k < high, tl.minimum(tl.maximum(other, 0), num_routes), 2147483647)
            first_of_two = (other[None, :] < value[:, None]) | (
                (other[None, :] == value[:, None]) & (k[None, :] < i[:, None])
            )
            before += tl.sum(first_of_two.to(tl.int32), axis=1)
        tl.store(out_ptr + low + before, value, mask=mine)
