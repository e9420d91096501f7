"""What a pass of the model chooses, experts of a token and compressed rows of a query: watched, or imposed.

Two correct implementations choose differently where options nearly tie, and then compute different things. With the
other one's choices imposed, what is left is rounding; and each choice that differs is judged by its margin:

    margin   what the last chosen option scores above the first one left out; inf if none is left out
    tie      the smallest error of scores that explains what was taken instead of the own choice; 0 if that is the same
             x is taken, m is left out:                     score(m) - score(x)
             x is no candidate, or m would not be one:      how far the row's block is from the candidates' cut
    surplus  how many options more were taken than the model takes, where fewer candidates than index_topk exist. The
             taken options furthest from the cut count as these; they belong to no tie

Experts are ranked by sqrt(softplus) scores plus bias; margins and ties are differences of these. Index scores have no
unit: theirs are parts of the query's largest score.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.nn.functional import pad

from deepinfer_sm80.errors import TensorContractError
from deepinfer_sm80.model.indexer import before

if TYPE_CHECKING:
    from collections.abc import Mapping


class Choice(NamedTuple):
    """One layer's choice in T rows, n options each.

    own      bool [T, n]: what the model chooses by itself from the state it is in
    taken    bool [T, n]: what it went on with
    margin   float32 [T], tie float32 [T], surplus int64 [T]: see above
    """

    own: torch.Tensor
    taken: torch.Tensor
    margin: torch.Tensor
    tie: torch.Tensor
    surplus: torch.Tensor

    @property
    def flipped(self) -> torch.Tensor:
        """bool [T]: something else than the own choice was taken."""
        return (self.own != self.taken).any(-1)


@dataclass
class Choices:
    """Watches one pass over one sequence, and imposes what is given: layers that are not named choose by themselves.

    forced_experts  layer -> integer [T, k]: expert ids of every position
    forced_rows     index source layer -> integer [T, m]: compressed rows of every position, -1 for none
    experts, rows   layer -> one Choice a step, filled by the pass
    """

    forced_experts: Mapping[int, torch.Tensor] = field(default_factory=dict)
    forced_rows: Mapping[int, torch.Tensor] = field(default_factory=dict)
    experts: dict[int, list[Choice]] = field(default_factory=dict)
    rows: dict[int, list[Choice]] = field(default_factory=dict)
    lead: torch.Tensor | None = None

    def choose_experts(
        self, layer: int, positions: torch.Tensor, ranked: torch.Tensor, own: torch.Tensor
    ) -> torch.Tensor:
        """positions int64 [T], ranked float32 [T, E], own int64 [T, k] -> int64 [T, k], best first as ``own`` is."""
        ids = own
        if layer in self.forced_experts:
            ids = _at(self.forced_experts[layer], positions, f"forced_experts[{layer}]", ranked.shape[1])
            if ids.shape != own.shape or bool((ids < 0).any()):
                found = f"shape {tuple(ids.shape)} with {int((ids < 0).sum())} negative ids"
                expected = f"{own.shape[1]} expert ids in each row"
                raise TensorContractError(op="Choices", name=f"forced_experts[{layer}]", expected=expected, got=found)
            ids = ids.sort(-1).values
            ids = ids.gather(1, ranked.gather(1, ids).sort(dim=-1, descending=True, stable=True).indices)
        chosen, taken = _mask(own, ranked.shape[1]), _mask(ids, ranked.shape[1])
        self.experts.setdefault(layer, []).append(_judged(ranked, torch.ones_like(chosen), chosen, taken, None))
        return ids

    def choose_rows(
        self,
        layer: int,
        positions: torch.Tensor,
        scores: torch.Tensor,
        lengths: torch.Tensor,
        own: torch.Tensor,
        candidates: torch.Tensor | None,
    ) -> torch.Tensor:
        """positions and lengths int64 [T], scores float32 [T, n], own and candidates bool [T, n] -> bool [T, n].

        A query chooses among the first ``lengths`` rows and, where given, the candidates.
        """
        taken, eligible, name = own, before(scores, lengths), f"forced_rows[{layer}]"
        if layer in self.forced_rows:
            taken = _mask(_at(self.forced_rows[layer], positions, name, own.shape[1]), own.shape[1])
            if bool((taken & ~eligible).any()):
                found = f"row {int(positions[(taken & ~eligible).any(-1)][0])} with a later one"
                raise TensorContractError(op="Choices", name=name, expected="rows that exist for the query", got=found)
        relative = scores / _largest(scores, eligible)
        if candidates is not None:
            eligible = eligible & candidates
        lead = None if candidates is None else self.lead
        self.rows.setdefault(layer, []).append(_judged(relative, eligible, own, taken, lead))
        return taken

    def note_candidates(
        self, scores: torch.Tensor, lengths: torch.Tensor, candidates: torch.Tensor, block: int
    ) -> None:
        """Remembers how far every row's block of ``block`` rows is from the candidates' cut: scores float32 [T, n],
        lengths int64 [T], candidates bool [T, n]. The newest block is always a candidate and infinitely far."""
        n, exist = scores.shape[1], before(scores, lengths)
        tail = (0, -n % block)
        relative = (scores / _largest(scores, exist)).masked_fill(~exist, -torch.inf)
        best = pad(relative, tail, value=-torch.inf).unflatten(1, (-1, block)).amax(-1)
        kept = pad(candidates, tail).unflatten(1, (-1, block)).any(-1)
        newest = torch.arange(best.shape[1], device=best.device) == ((lengths - 1) // block)[:, None]
        last_in, first_out = _least(best, kept & ~newest)[:, None], _most(best, ~kept)[:, None]
        distance = torch.where(kept, best - first_out, best - last_in).masked_fill(newest, torch.inf)
        self.lead = distance.repeat_interleave(block, 1)[:, :n]


def _judged(
    scores: torch.Tensor, eligible: torch.Tensor, own: torch.Tensor, taken: torch.Tensor, lead: torch.Tensor | None
) -> Choice:
    """``lead`` float32 [T, n], where only candidates are eligible: how far each is from not being one, negative for the
    others."""
    infinity = torch.inf
    margin = _least(scores, own) - _most(scores, eligible & ~own)
    extra, missing = taken & ~own, own & ~taken
    more = extra.sum(-1) - missing.sum(-1)
    enter = torch.where(eligible, 0.0, infinity if lead is None else -lead)
    leave = torch.full_like(scores, infinity) if lead is None else lead.masked_fill(~eligible, infinity)
    furthest = enter.masked_fill(~extra, -infinity).argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)
    extra = extra & (furthest >= more[:, None])
    displaced = (scores - _least(scores, extra)[:, None]).clamp_min(0)
    displaced = torch.where(extra.any(-1, keepdim=True), displaced, infinity)
    tie = torch.maximum(_most(torch.minimum(displaced, leave), missing), _most(enter, extra)).clamp_min(0)
    return Choice(own, taken, margin, tie.masked_fill(more < 0, infinity), more.clamp_min(0))


def _least(scores: torch.Tensor, among: torch.Tensor) -> torch.Tensor:
    return scores.masked_fill(~among, torch.inf).amin(-1)


def _most(scores: torch.Tensor, among: torch.Tensor) -> torch.Tensor:
    return scores.masked_fill(~among, -torch.inf).amax(-1)


def _largest(scores: torch.Tensor, among: torch.Tensor) -> torch.Tensor:
    """float32 [T, 1]: the largest absolute score, 1 where that is 0 or there is none."""
    size = scores.abs().masked_fill(~among, 0).amax(-1, keepdim=True)
    return torch.where(size == 0, 1.0, size)


def _at(forced: torch.Tensor, positions: torch.Tensor, name: str, options: int) -> torch.Tensor:
    """The rows of ``forced`` at ``positions`` as int64. Raises TensorContractError where it is too short or names an
    option that does not exist."""
    rows = int(positions.max()) + 1 if len(positions) else 0
    if len(forced) < rows or (forced.numel() and int(forced[:rows].max()) >= options):
        found = f"{tuple(forced.shape)}, largest {int(forced.max()) if forced.numel() else None}"
        expected = f"at least {rows} rows of options below {options}"
        raise TensorContractError(op="Choices", name=name, expected=expected, got=found)
    return forced.to(positions.device)[positions].long()


def _mask(columns: torch.Tensor, options: int) -> torch.Tensor:
    """int64 [T, m], negative for none -> bool [T, options]."""
    mask = torch.zeros(len(columns), options + 1, dtype=torch.bool, device=columns.device)
    return mask.scatter_(1, torch.where(columns < 0, options, columns), True)[:, :options]
