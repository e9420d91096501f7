"""Which drafted tokens stand, and the token behind them: the output is distributed as the target's own.

    greedy:    drafts stand up to the first that is not the target's best token; that best token follows them
    sampling:  draft x_k stands with probability min(1, p_k[x_k] / q_k[x_k]); the first that falls is replaced by a draw
               from max(p_k - q_k, 0), normalised; if all stand, a draw from p_K follows
p_k is the target's distribution in row k, q_k the one that draft k was drawn from: one-hot for greedy drafts.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class Verdict(NamedTuple):
    """How many drafts stand, and the token that follows them."""

    accepted: int
    following: int


def best_token(logits: torch.Tensor) -> torch.Tensor:
    """logits [..., V] -> int64 [...]: the largest, the lowest id between equals."""
    ids = torch.arange(logits.shape[-1], device=logits.device)
    largest = logits == logits.amax(-1, keepdim=True)
    return torch.where(largest, ids, logits.shape[-1]).amin(-1)


def verify_greedy(logits: torch.Tensor, drafts: torch.Tensor) -> Verdict:
    """Target logits [K + 1, V], drafts int64 [K]; row k of the logits follows draft k - 1."""
    best = best_token(logits)
    accepted = int((best[:-1] == drafts).long().cumprod(0).sum())
    return Verdict(accepted, int(best[accepted]))


def verify_sampled(p: torch.Tensor, q: torch.Tensor, drafts: torch.Tensor, uniforms: torch.Tensor) -> Verdict:
    """p float [K + 1, V], q float [K, V], drafts int64 [K] drawn from q, uniforms float [K + 1] from [0, 1): the
    first K decide whether a draft stands, the last one draws the following token."""
    stands = uniforms[:-1] < acceptance(p[:-1], q).gather(1, drafts[:, None])[:, 0]
    accepted = int(stands.long().cumprod(0).sum())
    rest = residual(p[accepted], q[accepted]) if accepted < len(drafts) else p[accepted]
    return Verdict(accepted, _draw(rest, uniforms[-1]))


def acceptance(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """p, q float [..., V] -> float [..., V]: the probability that a draft stands, for every token it could be; 1 where
    q is 0, which is never drafted."""
    return torch.where(q > 0, p / q, 1.0).clamp(max=1.0)


def residual(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """p, q float [..., V] -> float [..., V]: the distribution of the token in the place of a draft that fell; p where
    the two are equal and no draft can fall."""
    rest = (p - q).clamp(min=0)
    total = rest.sum(-1, keepdim=True)
    return torch.where(total > 0, rest / total, p)


def _draw(distribution: torch.Tensor, u: torch.Tensor) -> int:
    """The token whose share of [0, 1) holds ``u``."""
    shares = distribution.cumsum(-1)
    return int(torch.searchsorted(shares, u * shares[-1], right=True))
