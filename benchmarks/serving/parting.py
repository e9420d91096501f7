"""Where two greedy runs of one model part: what one of them thought of the token that the other took."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

OUTSIDE = 99.0  # nats: the lead over a token that is not among those that were kept of a step


def kept(outputs: Iterable[Any]) -> list[list[list[tuple[int, float]]]]:
    """Of vLLM's outputs, (token, log-probability) of every step's kept tokens."""
    return [
        [[(int(token), entry.logprob) for token, entry in step.items()] for step in output.outputs[0].logprobs]
        for output in outputs
    ]


def first_difference(mine: Sequence[int], theirs: Sequence[int]) -> int | None:
    """The step at which two runs of the same length part. Raises ValueError for lengths that differ."""
    pairs = enumerate(zip(mine, theirs, strict=True))
    return next((at for at, (a, b) in pairs if a != b), None)


def lead(step: Iterable[Sequence[Any]], token: int) -> float:
    """By how much the best of a step's kept tokens leads ``token``; OUTSIDE where it is not among them."""
    known = {int(kept_token): float(logprob) for kept_token, logprob in step}
    return max(known.values()) - known[token] if token in known else OUTSIDE
