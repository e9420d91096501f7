"""The direction that a random head reads: what ``fit`` promises, and that the stored one is what the head holds."""

import dataclasses

import pytest
import torch

from deepinfer_sm80.model import prose, readout, weights
from deepinfer_sm80.model.config import preset
from deepinfer_sm80.model.schema import expected_tensors

T, H = 400, 48


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def states():
    complete = randn(T, H) + 2 * randn(H, seed=1)
    shifts = [0.3 * randn(H, seed=2 + k) for k in range(6)]
    loud = torch.ones(H)
    loud[:8] = 20.0  # rounding is twenty times larger in eight dims
    return complete, shifts, 0.01 * loud * randn(T, H, seed=9)


def test_every_shift_costs_the_margin_and_the_text_reads_one(states):
    complete, shifts, rounding = states
    u = readout.fit(complete, shifts, rounding)
    assert (complete @ u).mean().item() == pytest.approx(1.0, abs=1e-4)
    drops = torch.stack([shift @ u for shift in shifts])
    assert drops.max() < -readout.MARGIN + 1e-4
    assert drops.max() > -readout.MARGIN - 1e-4, "the smallest drop is no larger than asked: more would cost noise"


def test_rounding_is_avoided(states):
    complete, shifts, rounding = states
    deaf = readout.fit(complete, shifts, 0.01 * randn(T, H, seed=9))
    careful = readout.fit(complete, shifts, rounding)
    assert (rounding @ careful).std() < 0.5 * (rounding @ deaf).std()


def test_what_is_stored_comes_back(monkeypatch):
    config = preset("tiny")
    u = randn(config.hidden_size)
    monkeypatch.setattr(readout, "_stored", lambda: {"tiny": readout.stored_form(u, 5)})
    back = readout.direction(config, 5)
    assert (back - u).abs().max() <= u.abs().max() / 127
    assert readout.direction(config, 4) is None
    assert readout.direction(dataclasses.replace(config, num_experts_per_tok=3), 5) is None


@pytest.fixture(scope="module")
def head():
    config = preset("tiny")
    return dict(weights.random_tensors(config, {"head.weight": expected_tensors(config)["head.weight"]}, 0))[
        "head.weight"
    ]


def test_the_head_holds_the_direction_against_all_tokens_but_those_of_the_text(head):
    u = readout.direction(preset("tiny"), 0)
    known = torch.zeros(len(head), dtype=torch.bool)
    known[sorted(prose.token_ids())] = True
    along = head.float() @ u / (u @ u)
    assert 1800 < known.sum() < 2300
    assert along[~known].mean().item() == pytest.approx(-readout.GAIN, rel=0.02)
    assert abs(along[known].mean().item()) < 0.02
    rest = head[~known].float() + readout.GAIN * u
    assert rest.square().sum(1).mean().sqrt().item() == pytest.approx(weights.LOGITS, rel=0.02)
