"""Exact, deterministic selection of the largest scores of a row, shared by top-k and candidate selection."""

from __future__ import annotations

import torch

_NEVER = -(2**63)
_ABOVE_INFINITY = 0x7FFFFFFF
_LAST = 2**31 - 1


def largest(scores: torch.Tensor, k: int, pinned: torch.Tensor | None = None) -> torch.Tensor:
    """Columns of the ``k`` largest scores of each row, int32 [R, k], ascending, then -1.

    ``scores`` float32 [R, N] with N >= k; -inf and NaN are never chosen. Ties (-0.0 equals 0.0) go to the lowest
    column. ``pinned`` bool [R, N]: columns chosen before all others, whatever their score.

    torch.topk breaks ties as it likes, so it ranks unique 64-bit keys: the score as an ordered integer in the high
    half, the distance from the last column in the low half.
    """
    width = scores.shape[1]
    bits = (scores + 0.0).view(torch.int32)  # -0.0 + 0.0 is 0.0
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    allowed = scores > float("-inf")
    if pinned is not None:
        ordered = ordered.masked_fill(pinned, _ABOVE_INFINITY)
        allowed = allowed | pinned
    from_last = torch.arange(width - 1, -1, -1, dtype=torch.int64, device=scores.device)
    keys = ((ordered.to(torch.int64) << 32) | from_last).masked_fill(~allowed, _NEVER)
    top = keys.topk(k, dim=-1, sorted=False).values
    columns = (width - 1 - (top & 0xFFFFFFFF)).masked_fill(top == _NEVER, _LAST)
    columns = columns.sort(dim=-1).values
    return columns.masked_fill(columns == _LAST, -1).to(torch.int32)
