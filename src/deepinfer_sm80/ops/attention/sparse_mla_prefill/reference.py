"""Sparse attention of prefill tokens over a gathered bfloat16 workspace, one shared key head, the key is the value.

    rows = kv[indices[t, j]] for the valid j,   s[h, n] = softmax_scale * q[t, h] . rows[n]
    M[h] = max(max_n s[h, n], attn_sink[h]),    p[h, n] = exp(s[h, n] - M[h])
    out[t, h] = sum_n bf16(p[h, n]) * rows[n] / (sum_n p[h, n] + exp(attn_sink[h] - M[h]))

q bfloat16 [T, H, 512], dim 0 may be strided; kv bfloat16 [S, 512]; indices int32 [T, K], row stride arbitrary; lens
int32 [T]; attn_sink float32 [H], -inf for no sink. j is valid if j < lens[t] and 0 <= indices[t, j] < S; -1 may stand
anywhere. A row listed twice counts twice. Without a valid row the output is 0. Rows of ``kv`` that are not listed may
hold anything; a listed NaN gives NaN. The output of a head whose sink is +inf or NaN is undefined.

Rounding: float32 scores, softmax and sums; p is rounded to bfloat16 for the product with the values only (the
denominator sums it unrounded); one rounding to bfloat16 at the end.
Source: vLLM 0.33.0, sparse prefill of DeepSeek-V4.1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from deepinfer_sm80.ops.contract import Cost, OpSpec, Tolerance

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

HEAD_DIM = 512


def sparse_mla_prefill(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    lens: torch.Tensor,
    attn_sink: torch.Tensor,
    softmax_scale: float,
) -> torch.Tensor:
    out = torch.zeros(q.shape, dtype=torch.bfloat16, device=q.device)
    for t in range(len(q)):
        rows = kv[valid_rows(indices[t], lens[t], len(kv))]
        out[t] = attend_token(q[t], rows, attn_sink, softmax_scale)
    return out


def valid_rows(indices: torch.Tensor, length: torch.Tensor, rows: int) -> torch.Tensor:
    """The valid entries of one token, in order, as int64."""
    listed = indices[: max(int(length), 0)].long()
    return listed[(listed >= 0) & (listed < rows)]


def attend_token(q: torch.Tensor, rows: torch.Tensor, attn_sink: torch.Tensor, softmax_scale: float) -> torch.Tensor:
    """q bfloat16 [H, 512], rows bfloat16 [n, 512] -> bfloat16 [H, 512]."""
    if len(rows) == 0:
        return torch.zeros_like(q)
    s = softmax_scale * (q.float() @ rows.float().T)
    M = torch.maximum(s.amax(-1), attn_sink)[:, None]
    p = (s - M).exp()
    values = p.bfloat16().float() @ rows.float()
    return (values / (p.sum(-1, keepdim=True) + (attn_sink[:, None] - M).exp())).bfloat16()


def random_indices(g: torch.Generator, device: str, T: int, K: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """indices int32 [T, K] with -1s and with row ``rows``, which does not exist; lens int32 [T] from 0 to beyond K.

    The last row that exists is never listed.
    """
    wide = torch.randint(-1, rows - 1, (T, K + 4), generator=g, device=device, dtype=torch.int32)
    indices = wide[:, :K]
    indices[:, 3::17] = -1
    indices[:, 5::29] = rows
    lens = torch.randint(K // 2, K + 1, (T,), generator=g, device=device, dtype=torch.int32)
    lens[1:2], lens[2:3], lens[3:4] = 0, K + 9, -2
    return indices, lens


def cases(device: str) -> Iterator[tuple[str, dict[str, Any]]]:
    # H: all heads, the shares of 2..8 ranks, an odd count; K: window, topk + window; peaked scores as well as flat ones
    shapes = ((0, 64, 640, 64), (1, 64, 640, 700), (5, 16, 640, 300), (4, 5, 200, 90), (3, 8, 128, 140), (2, 32, 0, 3))
    for T, H, K, S in shapes:
        g = torch.Generator(device).manual_seed(T * 89 + H)

        def randn(*shape: int, g: torch.Generator = g) -> torch.Tensor:
            return torch.randn(shape, generator=g, device=device)

        indices, lens = random_indices(g, device, T, K, S)
        kv = randn(S, HEAD_DIM).bfloat16()
        kv[S - 1] = float("nan")  # stale: never listed
        sharpness = 1.0 + 3.0 * (torch.arange(H, device=device) % 2)[:, None]
        sink = randn(H)
        sink[-1:] = -torch.inf
        yield (
            f"T{T}-H{H}-K{K}",
            {
                "q": (randn(T, H + 3, HEAD_DIM)[:, :H] * sharpness).bfloat16()
                if T != 5
                else randn(T, H, 512).bfloat16(),
                "kv": kv,
                "indices": indices,
                "lens": lens,
                "attn_sink": sink,
                "softmax_scale": HEAD_DIM**-0.5,
            },
        )


def cost(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    lens: torch.Tensor,
    attn_sink: torch.Tensor,
    softmax_scale: float,
) -> Cost:
    T, H = q.shape[:2]
    listed = int(lens.clamp(0, indices.shape[1]).sum())
    rows = min(listed, len(kv))
    moved = 4 * T * H * HEAD_DIM + 2 * rows * HEAD_DIM + 4 * listed + lens.nbytes + attn_sink.nbytes
    return Cost(bytes=moved, flops=4 * listed * H * HEAD_DIM)


# p may be rounded against another maximum than M (an online or split softmax rounds against its running one). Each side
# is then off by at most 2^-9 of every p: 2^-8 of the row's RMS if all errors agree (one or two rows), plus what the two
# final roundings differ by, sqrt(2/3) * 2^-9: below 1.5 * 2^-8 together. Per element the errors are independent: their
# difference has sigma sqrt(2/3) * 2^-9 of the row's RMS, 3.3 of the ulps that the comparison uses near cancellation
# (2^-7 * 2^-4 of the RMS); 24 is 7 sigma. No length enters: float32 sums over 640 rows are off by 2^-20.
TOLERANCE = Tolerance(ulps=24.0, rms=1.5 * 2.0**-8)

SPEC = OpSpec(sparse_mla_prefill, cases, TOLERANCE, cost)
