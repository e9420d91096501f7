"""Index scores of prefill queries against gathered keys, one row of columns per query.

    logit[t, c] = k_scale[s] * sum_h weights[t, h] * relu(sum_d q[t, h, d] * k[s, d])     s = row_start[t] + c

if 0 <= s < min(row_end[t], S), else -inf, for c < max_k. q and k are the exactly decoded E4M3 values, without scales
(the query's is folded into weights). Dots, head sum and product with k_scale in float32. NaN codes and NaN scales give
NaN logits; a row's columns outside its range are -inf whatever the keys there hold.

q_codes uint8 [T, 32, 128]; weights float32 [T, 32]; k_codes uint8 [S, 128]; k_scale float32 [S]; row_start and row_end
int32 (or int64) [T]. Returns float32 [T, max_k].
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from deepinfer_sm80.ops.contract import Cost, OpSpec, Tolerance
from deepinfer_sm80.ops.formats import e4m3

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any


def indexer_logits_prefill(
    q_codes: torch.Tensor,
    weights: torch.Tensor,
    k_codes: torch.Tensor,
    k_scale: torch.Tensor,
    row_start: torch.Tensor,
    row_end: torch.Tensor,
    max_k: int,
) -> torch.Tensor:
    out = torch.full((q_codes.shape[0], max_k), float("-inf"), device=q_codes.device)
    for t, (start, end) in enumerate(zip(row_start.tolist(), row_end.tolist(), strict=True)):
        first, last = max(start, 0), min(end, k_codes.shape[0], start + max_k)
        if first < last:
            score = torch.einsum("hd,sd->sh", e4m3.decode(q_codes[t]), e4m3.decode(k_codes[first:last]))
            logit = k_scale[first:last] * (weights[t] * score.relu()).sum(-1)
            out[t, first - start : last - start] = logit
    return out


def cases(device: str) -> Iterator[tuple[str, dict[str, Any]]]:
    # name: S, max_k, starts, ends
    layouts: dict[str, tuple[int, int, list[int], list[int]]] = {
        "T0-S5": (5, 7, [], []),
        "T2-S0": (0, 3, [0, 0], [4, 0]),
        "T1-S1": (1, 1, [0], [1]),
        "T6-two-requests": (200, 130, [0, 0, 0, 70, 70, 70], [68, 69, 70, 198, 199, 200]),
        "T5-padding": (77, 90, [0, 0, 33, 76, -4], [0, 1 << 30, 20, 99, 40]),
        "T3-narrow": (300, 17, [0, 100, 290], [300, 300, 300]),
    }
    for name, (keys, max_k, starts, ends) in layouts.items():
        g = torch.Generator(device).manual_seed(keys)
        k_codes = e4m3.encode(torch.randn(keys, 128, generator=g, device=device) * 60)
        k_scale = torch.exp2(torch.randint(-12, -4, (keys,), generator=g, device=device).float())
        if keys == 200:
            k_codes[5, 17], k_codes[90, 0], k_scale[150] = 0x7F, 0xFF, float("nan")
        yield (
            name,
            {
                "q_codes": e4m3.encode(torch.randn(len(starts), 32, 128, generator=g, device=device) * 60),
                "weights": torch.randn(len(starts), 32, generator=g, device=device),
                "k_codes": k_codes,
                "k_scale": k_scale,
                "row_start": torch.tensor(starts, dtype=torch.int32, device=device),
                "row_end": torch.tensor(ends, dtype=torch.int32, device=device),
                "max_k": max_k,
            },
        )


def cost(
    q_codes: torch.Tensor,
    weights: torch.Tensor,
    k_codes: torch.Tensor,
    k_scale: torch.Tensor,
    row_start: torch.Tensor,
    row_end: torch.Tensor,
    max_k: int,
) -> Cost:
    pairs = int((row_end.clamp(max=k_codes.shape[0]) - row_start).clamp(0, max_k).sum())
    moved = sum(t.nbytes for t in (q_codes, weights, k_codes, k_scale, row_start, row_end))
    return Cost(bytes=moved + 4 * q_codes.shape[0] * max_k, flops=pairs * 32 * (2 * 128 + 3))


# Products are exact in float32 (4-bit significands); sums are 128 and then 32 terms, in any order. Rounding moves a sum
# of 160 terms by about sqrt(160) * 2^-24 = 7.5e-7 of an average partial sum; signs cancel, so partial sums reach a few
# times the row's RMS: 2e-6 of it. Tensor cores truncate instead, once per 16 terms: 8 * 2^-23 = 1e-6, all one way.
# Elements are measured against a 16th of the row's RMS or more, so 1024 ulps are 1024 * 2^-23 / 16 = 7.6e-6 of it. Two
# float32 implementations on a CPU differ by 20 ulps in the worst element and 1.2e-7 in the worst row.
SPEC = OpSpec(indexer_logits_prefill, cases, Tolerance(ulps=1024.0, rms=2.0**-19), cost)
