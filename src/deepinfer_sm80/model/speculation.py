"""Greedy generation with a draft: the target's own tokens, several to a step.

prefill the prompt; the best token behind it is the first anchor
repeat:  draft K tokens behind the anchor;  one target step over anchor and drafts, each row its own causal query
         keep drafts while they are the target's best tokens, then take its best token: the next anchor
         forget the rejected positions;  the draft's context takes the features of the accepted ones
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar

import torch

from deepinfer_sm80.errors import UnsupportedOptionError
from deepinfer_sm80.model.generate import greedy
from deepinfer_sm80.model.rejection import verify_greedy

if TYPE_CHECKING:
    from collections.abc import Sequence

    from deepinfer_sm80.model.config import ModelConfig
    from deepinfer_sm80.model.draft import Proposal


class StateLike(Protocol):
    """What a target keeps of one sequence."""

    def truncate(self, n: int) -> None:
        """Forgets the positions from ``n`` on."""


S = TypeVar("S", bound=StateLike)
C = TypeVar("C")


class StepLike(Protocol):
    """Rows of one target step: ``hidden`` bfloat16 [T, H] as the head reads it, ``features`` bfloat16 [T, targets, H]:
    the streams entering the configured layers, averaged."""

    @property
    def hidden(self) -> torch.Tensor: ...

    @property
    def features(self) -> torch.Tensor: ...


class Target(Protocol[S]):
    """``TextModel``, or anything with its steps."""

    config: ModelConfig

    def new_state(self) -> S: ...

    def step(self, tokens: Sequence[int], state: S) -> StepLike: ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor: ...


class Drafter(Protocol[C]):
    """``Draft``, or anything that proposes tokens."""

    def new_context(self) -> C: ...

    def extend(self, context: C, features: torch.Tensor) -> None: ...

    def propose(self, context: C, anchor: int, count: int) -> Proposal: ...


class Round(NamedTuple):
    """One target step over drafts: the drafted tokens, the confidence in each, and how many were accepted."""

    drafts: list[int]
    confidences: list[float]
    accepted: int


class Speculated(NamedTuple):
    """``tokens``: the n generated ids; ``logprobs`` float32 [n] under the target; ``rounds``: what became of the
    drafts. Those accepted behind the n-th token are counted too."""

    tokens: list[int]
    logprobs: torch.Tensor
    rounds: list[Round]

    @property
    def drafted(self) -> int:
        """Tokens that the target looked at."""
        return sum(len(r.drafts) for r in self.rounds)

    @property
    def accepted(self) -> int:
        """Tokens that it kept."""
        return sum(r.accepted for r in self.rounds)


@torch.no_grad()
def generate_speculative(
    target: Target[S], draft: Drafter[C], prompt: Sequence[int], n: int, K: int = 5, chunk: int | None = None
) -> Speculated:
    """``n`` tokens behind ``prompt``, drafted ``K`` at a time; the prompt goes in steps of ``chunk`` tokens.

    The tokens are those of ``generate``, since a row of a step does not depend on the rows beside it. At the end of
    the positions fewer than ``K`` are drafted. Raises UnsupportedOptionError for an empty prompt, for ``n``, ``K`` or
    ``chunk`` below 1, and when prompt and output exceed the model's positions; a TextModel raises SequenceStateError
    when more than 15 drafts have to be forgotten and leave half a pair.
    """
    limit = target.config.max_position_embeddings
    _check(prompt, n, K, chunk, limit)
    state, context = target.new_state(), draft.new_context()
    size = chunk or len(prompt)
    for start in range(0, len(prompt), size):
        step = target.step(prompt[start : start + size], state)
        draft.extend(context, step.features)
    first, logprob = greedy(target.logits(step.hidden[-1:])[0])
    tokens, logprobs, rounds = [first], [logprob], list[Round]()
    while len(tokens) < n:
        position = len(prompt) + len(tokens) - 1  # of the anchor, the newest token
        proposal = draft.propose(context, tokens[-1], min(K, limit - position - 1))
        drafts = proposal.tokens.tolist()
        step = target.step([tokens[-1], *drafts], state)
        logits = target.logits(step.hidden)
        accepted, following = verify_greedy(logits, proposal.tokens)
        state.truncate(position + 1 + accepted)
        draft.extend(context, step.features[: accepted + 1])
        rounds.append(Round(drafts, proposal.confidences.tolist(), accepted))
        tokens += [*drafts[:accepted], following]
        logprobs += [greedy(row)[1] for row in logits[: accepted + 1]]
    return Speculated(tokens[:n], torch.tensor(logprobs[:n]), rounds)


def _check(prompt: Sequence[int], n: int, K: int, chunk: int | None, limit: int) -> None:
    sizes = {"prompt tokens": len(prompt), "n": n, "K": K, "chunk": 1 if chunk is None else chunk}
    for option, found in sizes.items():
        if found < 1:
            raise UnsupportedOptionError(option=option, found=found, allowed="1 or more", remedy="Correct the call.")
    if len(prompt) + n > limit:
        raise UnsupportedOptionError(
            option="prompt tokens + n",
            found=len(prompt) + n,
            allowed=f"max_position_embeddings = {limit} or fewer",
            remedy="Shorten the prompt or generate less.",
        )
