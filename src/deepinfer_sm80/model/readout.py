"""What a random head knows about the frozen text, so that a missing part of the model lowers the text's probability.

    head[v] = LOGITS * gaussian[v] - GAIN * u    for every token v that the text does not contain, else without u
    logit of v = noise - GAIN * (u . h)

The tokens of the text keep small logits, which bfloat16 rounds finely. With GAIN * u in their rows instead the
probabilities would be the same, and rounding would move the logits by up to half a step of 2^-6 to 2^-5.

u is a direction of the last hidden state with u . h = 1 on average over the text while the model is complete, and with
u . h below 1 by MARGIN or more when any one component is left out: so every such change costs the text probability.
Of all such directions ``fit`` takes the one that rounding and the text itself move least. It needs the hidden states
of every incomplete model, minutes of work, and so it is not done when a checkpoint is written: ``readout.json`` holds
u for seed 0 of the presets ``tiny`` and ``layer``, as integers, the same bytes on every machine. Other seeds and
configurations keep a gaussian head: valid, but the mean log-probability of a text says nothing there.
"""

from __future__ import annotations

import base64
import functools
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from deepinfer_sm80.model.config import preset

if TYPE_CHECKING:
    from collections.abc import Sequence

    from deepinfer_sm80.model.config import ModelConfig

GAIN = 3.5
MARGIN = 0.046

_LARGEST = 127
_STEPS = 100_000
_SETTLED = 1e-9


def direction(config: ModelConfig, seed: int) -> torch.Tensor | None:
    """u float32 [hidden] for the weights of ``seed``; None where none was fitted."""
    for name, entry in _stored().items():
        if entry["seed"] == seed and preset(name) == config:
            codes = torch.frombuffer(bytearray(base64.b64decode(entry["codes"])), dtype=torch.int8)
            u: torch.Tensor = codes.float() * float(entry["step"])
            return u
    return None


def stored_form(u: torch.Tensor, seed: int) -> dict[str, Any]:
    """The entry of ``readout.json`` for u [hidden]: 8-bit integers and the value of 1, a power of two."""
    step = 2.0 ** torch.ceil(torch.log2(u.abs().max() / _LARGEST)).item()
    codes = (u / step).round().to(torch.int8)
    return {"seed": seed, "step": step, "codes": base64.b64encode(codes.numpy().tobytes()).decode()}


def fit(
    complete: torch.Tensor,
    shifts: Sequence[torch.Tensor],
    rounding: torch.Tensor,
    margin: float = MARGIN,
    smoothing: float = 0.1,
    spread: float = 0.0003,
) -> torch.Tensor:
    """u float32 [hidden] from hidden states of the text.

    complete  [T, hidden] of the complete model
    shifts    [hidden] each: mean change of the hidden state when one component is left out
    rounding  [T', hidden]: changes of the hidden state by rounding alone
    margin    of every shift
    smoothing what is added to rounding's second moments along every direction, in parts of their mean: the fewer rows
              of ``rounding`` there are, the more of it keeps u from fitting these rows alone
    spread    weight of u . h's variance over the text against that of rounding

    Minimises u' S u, S = rounding's second moments, smoothed, + spread * covariance of h, such that u . mean(h) = 1 and
    u . shift <= -margin for every shift: by ascent of the dual, float64.
    """
    h, noise, hidden = complete.double(), rounding.double(), complete.shape[1]
    mean = h.mean(0)
    S = noise.T @ noise / len(noise)
    S.diagonal().add_(smoothing * S.trace() / hidden)
    S += spread * torch.cov(h.T)
    rows = torch.stack([mean, *(-shift.double() for shift in shifts)])
    bound = torch.tensor([1.0] + [margin] * len(shifts), dtype=torch.float64)
    answer = torch.linalg.solve(S, rows.T)
    gram = (rows @ answer).cpu()
    force = torch.zeros(len(rows), dtype=torch.float64)
    for _ in range(_STEPS):
        before = force.clone()
        for i in range(len(rows)):
            force[i] += (bound[i] - gram[i] @ force) / gram[i, i]
            if i:
                force[i] = force[i].clamp(min=0)
        if (force - before).abs().max() < _SETTLED * force.abs().max():
            break
    u: torch.Tensor = (answer.cpu() @ force).float()
    return u


def forget() -> None:
    """Read ``readout.json`` again at the next use: it has changed."""
    _stored.cache_clear()


@functools.cache
def _stored() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Path(__file__).with_name("readout.json").read_text(encoding="utf-8"))
    return found
