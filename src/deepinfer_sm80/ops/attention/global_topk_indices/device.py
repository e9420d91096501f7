"""Device code of global_topk_indices."""

import triton
import triton.language as tl


@triton.jit(
    do_not_specialize=["width", "requests", "columns", "block_size", "topk_stride", "table_stride", "out_stride"],
    do_not_specialize_on_alignment=["topk_ptr", "owner_ptr", "table_ptr", "valid_ptr", "indices_ptr", "lens_ptr"],
)
def slots_kernel(
    topk_ptr,
    owner_ptr,
    table_ptr,
    valid_ptr,
    indices_ptr,
    lens_ptr,
    width: tl.int32,
    requests: tl.int32,
    columns: tl.int32,
    block_size: tl.int32,
    topk_stride: tl.int64,
    table_stride: tl.int64,
    out_stride: tl.int64,
    BLOCK: tl.constexpr,
):
    """One program, one token."""
    token = tl.program_id(0).to(tl.int64)
    # r = token_to_req_indices[t]; -1 throughout if the request does not exist or the token is not valid
    r = tl.load(owner_ptr + token).to(tl.int64)
    known = (tl.load(valid_ptr + token) != 0) & (r >= 0) & (r < requests)
    table = table_ptr + tl.where(known, r, 0) * table_stride
    last = 0
    for start in range(0, width, BLOCK):
        j = start + tl.arange(0, BLOCK)
        c = tl.load(topk_ptr + token * topk_stride + j, mask=(j < width) & known, other=-1)
        # the slot: block_table[r, c // block_size] * block_size + c % block_size
        local = tl.maximum(c, 0)
        column = local // block_size
        mapped = (c >= 0) & (column < columns)
        block = tl.load(table + column, mask=mapped, other=-1).to(tl.int64)
        slot = block * block_size + local % block_size
        # -1 if its column is not in the table, its block is negative or the slot does not fit int32
        valid = mapped & (block >= 0) & (slot <= 2147483647)
        tl.store(indices_ptr + token * out_stride + j, tl.where(valid, slot, -1).to(tl.int32), mask=j < width)
        # lens[t] = 1 + position of the row's last valid entry, 0 if there is none
        last = tl.maximum(last, tl.max(tl.where(valid, j + 1, 0), axis=0))
    tl.store(lens_ptr + token, last)
