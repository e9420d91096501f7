"""Greedy generation: chunks of the prompt, then one token at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from deepinfer_sm80.errors import SequenceStateError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from deepinfer_sm80.model.forward import TextModel
    from deepinfer_sm80.model.replay import StepMode
    from deepinfer_sm80.model.state import State


class Generated(NamedTuple):
    """Token ids and their log-probabilities, float32 [n]."""

    tokens: list[int]
    logprobs: torch.Tensor


def greedy(logits: torch.Tensor) -> tuple[int, float]:
    """bfloat16 [vocab] -> the most likely token, of several the lowest id, and its log-probability in float32."""
    values = logits.float()
    best = values.max()
    return int((values == best).nonzero()[0]), float(best - values.logsumexp(-1))


@torch.no_grad()
def generate(
    model: TextModel,
    prompt: Sequence[int],
    n: int,
    chunk: int | None = None,
    state: State | None = None,
    mode: StepMode | None = None,
) -> Generated:
    """``n`` tokens behind ``prompt``.

    chunk   rows of a prefill step (default: the rest of the prompt in one)
    state   of the first ``state.length`` tokens of the prompt, a prefix hit for instance; it moves on
    mode    of the prefill steps, see ``TextModel.step``
    Raises SequenceStateError when ``state`` leaves no token of the prompt to compute.
    """
    state = model.new_state() if state is None else state
    if state.length >= len(prompt):
        raise SequenceStateError(
            what="the length of the state", allowed=f"below that of the prompt, {len(prompt)}", found=state.length,
            remedy="Truncate the state, or take a shorter prefix hit.",
        )  # fmt: skip
    for start in range(state.length, len(prompt), chunk or len(prompt)):
        hidden = model.step(prompt[start : start + (chunk or len(prompt))], state, mode).hidden
    tokens: list[int] = []
    logprobs: list[float] = []
    while len(tokens) < n:
        if tokens:
            hidden = model.step(tokens[-1:], state).hidden
        token, logprob = greedy(model.logits(hidden[-1:])[0])
        tokens.append(token)
        logprobs.append(logprob)
    return Generated(tokens, torch.tensor(logprobs))
