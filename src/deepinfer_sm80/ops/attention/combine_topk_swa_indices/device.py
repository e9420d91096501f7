"""Device code of combine_topk_swa_indices."""

import triton
import triton.language as tl


@triton.jit(
    do_not_specialize=[
        "requests",
        "topk_stride",
        "out_stride",
        "width",
        "window_size",
        "ratio",
        "topk",
        "M",
        "N",
    ],
    do_not_specialize_on_alignment=[
        "topk_ptr",
        "starts_ptr",
        "seq_lens_ptr",
        "gather_lens_ptr",
        "indices_ptr",
        "lens_ptr",
    ],
)
def combine_kernel(
    topk_ptr,
    starts_ptr,
    seq_lens_ptr,
    gather_lens_ptr,
    indices_ptr,
    lens_ptr,
    requests: tl.int32,
    topk_stride: tl.int64,
    out_stride: tl.int64,
    width: tl.int32,
    window_size: tl.int64,
    ratio: tl.int64,
    topk: tl.int64,
    M: tl.int64,
    N: tl.int64,
    BLOCK: tl.constexpr,
    REQUESTS: tl.constexpr,
):
    """One program, one token. ``ratio`` at least 1; ``topk`` 0 where there are no compressed rows. All in int64."""
    token = tl.program_id(0).to(tl.int64)
    # query_start_loc is rebased by its first element; a token's request is numbered by how many end at or before it
    base = tl.load(starts_ptr).to(tl.int64)
    owner = 0
    for first in range(0, requests, REQUESTS):
        b = first + tl.arange(0, REQUESTS)
        end = tl.load(starts_ptr + 1 + b, mask=b < requests, other=0).to(tl.int64)
        owner += tl.sum(((b < requests) & (end - base <= token)).to(tl.int32), axis=0)
    b = tl.minimum(owner, requests - 1).to(tl.int64)
    end = tl.load(starts_ptr + 1 + b).to(tl.int64) - base
    seq_len = tl.load(seq_lens_ptr + b).to(tl.int64)
    # gather_start = seq_len - gather_len,   pos = seq_len - q + i
    gather_start = seq_len - tl.load(gather_lens_ptr + b).to(tl.int64)
    pos = seq_len - (end - token)
    # k = clamp((pos + 1) // ratio, 0, topk): a quotient of negative numbers is clamped whichever way it rounds
    k = tl.minimum(tl.maximum((pos + 1) // ratio, 0), topk)
    # first = max(pos - window_size + 1, 0, gather_start),   w = max(pos - first + 1, 0),   lens = k + w
    first_row = tl.maximum(tl.maximum(pos - window_size + 1, 0), gather_start)
    total = k + tl.maximum(pos - first_row + 1, 0)
    # tokens behind the last request get -1 throughout and length 0
    total = tl.where(owner < requests, total, 0)
    k = tl.minimum(k, total)
    tl.store(lens_ptr + token, total.to(tl.int32))

    for start in range(0, width, BLOCK):
        j = start + tl.arange(0, BLOCK)
        # [0, k): M*b + topk_indices[t, j] if 0 <= topk_indices[t, j] < N else -1
        chosen = tl.load(topk_ptr + token * topk_stride + j, mask=j < k, other=-1).to(tl.int64)
        chosen = tl.where(chosen < N, chosen, -1)
        # [k, k + w): M*b + N + (first + j - k - gather_start); a row outside the request's M rows is -1
        window = N + (first_row - k - gather_start) + j
        window = tl.where((j < total) & (window < M), window, -1)
        # [k + w, width): -1
        row = tl.where(j < k, chosen, window)
        index = tl.where(row >= 0, M * b + row, -1)
        tl.store(indices_ptr + token * out_stride + j, index.to(tl.int32), mask=j < width)
