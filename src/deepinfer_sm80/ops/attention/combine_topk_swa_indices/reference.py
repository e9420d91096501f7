"""Workspace rows that each prefill token attends to: its compressed rows, then its sliding window.

Request b of the chunk owns workspace rows [b * M, (b + 1) * M): N compressed rows first, window rows from N on.
Token i of a request with q query tokens sits at pos = seq_len - q + i; its row of the result has three regions:

    [0, k)            M*b + topk_indices[t, j] if 0 <= topk_indices[t, j] < N else -1
    [k, k + w)        M*b + N + (first + j - k - gather_start)
    [k + w, width)    -1

    ratio = compress_ratio,   k = clamp((pos + 1) // ratio, 0, topk), 0 if ratio == 0
    gather_start = seq_len - gather_len,   first = max(pos - window_size + 1, 0, gather_start)
    w = max(pos - first + 1, 0),   lens = k + w,   width = topk + window_size rounded up to 128

A window row that would lie outside the request's M rows is -1: -1 may stand anywhere inside the stated length.

topk_indices int32 [T, W], row stride arbitrary, topk <= W unless ratio == 0; query_start_loc int32 [R + 1],
ascending, may start anywhere (it is rebased by its first element); seq_lens, gather_lens int32 [R]. Tokens behind the
last request (padding rows) get -1 throughout and length 0. Where query_start_loc descends, the result is undefined.
Integers only.
Source: vLLM 0.33.0, ``combine_topk_swa_indices``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from deepinfer_sm80.ops.contract import Cost, OpSpec, Tolerance

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

ALIGNMENT = 128


def combine_topk_swa_indices(
    topk_indices: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    gather_lens: torch.Tensor,
    window_size: int,
    compress_ratio: int,
    topk: int,
    M: int,
    N: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    width = -(-(topk + window_size) // ALIGNMENT) * ALIGNMENT
    indices, lens = [[-1] * width for _ in topk_indices], [0] * len(topk_indices)
    starts = [start - int(query_start_loc[0]) for start in query_start_loc.tolist()]
    chosen = topk_indices.tolist()
    for b, (seq_len, gather_len) in enumerate(zip(seq_lens.tolist(), gather_lens.tolist(), strict=True)):
        gather_start = seq_len - gather_len
        for t in range(starts[b], min(starts[b + 1], len(chosen))):
            pos = seq_len - (starts[b + 1] - t)
            k = min(max((pos + 1) // compress_ratio, 0), topk) if compress_ratio else 0
            first = max(pos - window_size + 1, 0, gather_start)
            window = [N + row - gather_start for row in range(first, pos + 1)]
            row = [M * b + c if 0 <= c < N else -1 for c in chosen[t][:k]]
            row += [M * b + c if c < M else -1 for c in window]
            indices[t][: len(row)] = row
            lens[t] = len(row)
    device = topk_indices.device
    rows = torch.tensor(indices, dtype=torch.int32, device=device).view(len(chosen), width)
    return rows, torch.tensor(lens, dtype=torch.int32, device=device)


def cases(device: str) -> Iterator[tuple[str, dict[str, Any]]]:
    # requests: (query tokens, seq_len, gather_len), then padding rows, ratio, W, topk
    shapes = {
        "R0-T0": ([], 0, 1, 512, 512),
        "R0-padding": ([], 2, 1, 512, 512),
        "T1-first-token": ([(1, 1, 1)], 0, 2, 512, 512),
        "ratio1": ([(3, 3, 3), (5, 700, 132), (0, 40, 40), (1, 513, 128)], 3, 1, 512, 512),
        "ratio2-narrow-topk": ([(4, 257, 131), (3, 3, 3), (2, 1100, 129)], 1, 2, 512, 200),
        "window-only": ([(2, 2, 2), (200, 300, 300)], 0, 0, 512, 0),
        "replayed": ([(130, 400, 130)], 2, 1, 512, 512),  # the window starts where the gathered rows start
        "warm-up": ([(6, 4, 4)], 0, 2, 512, 512),  # positions below zero
    }
    for name, (requests, padding, ratio, W, topk) in shapes.items():
        g = torch.Generator(device).manual_seed(len(name) * 131 + W)
        N = 600 if ratio else 0
        lens = torch.tensor(requests, dtype=torch.int32, device=device).view(-1, 3)
        starts = torch.nn.functional.pad(lens[:, 0].cumsum(0), (1, 0)).int() + 1000
        T = sum(q for q, _, _ in requests) + padding
        chosen = torch.randint(-40, 640, (T, W + 8), generator=g, device=device, dtype=torch.int32)  # both sides out
        yield (
            name,
            {
                "topk_indices": chosen[:, :W],
                "query_start_loc": starts,
                "seq_lens": lens[:, 1].contiguous(),
                "gather_lens": lens[:, 2].contiguous(),
                "window_size": 128,
                "compress_ratio": ratio,
                "topk": topk,
                "M": N + 300,
                "N": N,
            },
        )


def cost(
    topk_indices: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    gather_lens: torch.Tensor,
    window_size: int,
    compress_ratio: int,
    topk: int,
    M: int,
    N: int,
) -> Cost:
    width = -(-(topk + window_size) // ALIGNMENT) * ALIGNMENT
    read = topk if compress_ratio else 0
    lens = query_start_loc.nbytes + seq_lens.nbytes + gather_lens.nbytes
    return Cost(bytes=4 * topk_indices.shape[0] * (read + width + 1) + lens, flops=0)


SPEC = OpSpec(combine_topk_swa_indices, cases, Tolerance.exact(), cost, outputs=("indices", "lens"))
