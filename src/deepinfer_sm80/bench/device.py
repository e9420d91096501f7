"""A plain bfloat16 matrix product in Triton: the ceiling of tl.dot as it is compiled in this run."""

import triton
import triton.language as tl

from deepinfer_sm80.ops.attention.device import dot


@triton.jit(do_not_specialize=["n"])
def dot_kernel(a_ptr, b_ptr, out_ptr, n, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """out = a @ b^T; all [n, n] row-major, n a multiple of every block."""
    # eight rows of tiles at a time, so that what they share stays in the L2 cache
    tiles = n // BLOCK_N
    group = tl.program_id(0) // (8 * tiles)
    inside = tl.program_id(0) % (8 * tiles)
    height = tl.minimum(n // BLOCK_M - group * 8, 8)
    row = (group * 8 + inside % height) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = inside // height * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    # the stride is a multiple of BLOCK_K, which says to the compiler that rows are aligned
    stride = (n // BLOCK_K) * BLOCK_K
    a_at = a_ptr + row.to(tl.int64)[:, None] * stride + k[None, :]
    b_at = b_ptr + column.to(tl.int64)[None, :] * stride + k[:, None]
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for _ in range(0, n // BLOCK_K):
        total = dot(tl.load(a_at), tl.load(b_at), total)
        a_at += BLOCK_K
        b_at += BLOCK_K
    out_at = out_ptr + row.to(tl.int64)[:, None] * stride + column[None, :]
    tl.store(out_at, total.to(tl.bfloat16))
