"""The GPU stage about expert widths: its data and its gates, on a CPU and without vLLM."""

import sys
from pathlib import Path

import pytest
import torch

from deepinfer_sm80.ops.formats import mxfp4

SERVING = Path(__file__).parents[2] / "benchmarks/serving"


@pytest.fixture
def stage(monkeypatch):
    monkeypatch.syspath_prepend(str(SERVING))
    monkeypatch.delitem(sys.modules, "experts_padding", raising=False)
    import experts_padding

    for name, value in {"DEVICE": "cpu", "HIDDEN": 512, "INTERMEDIATE": 768, "EXPERTS": 6, "TOPK": 2}.items():
        monkeypatch.setattr(experts_padding, name, value)
    return experts_padding


def test_its_float64_weights_are_the_formats(stage):
    raw = stage.expert_weights("random", 3)
    for name in ("w1", "w2", "w3"):
        expected = mxfp4.decode(raw[name], raw[f"{name}_scale"])
        assert torch.equal(stage.dequantised(raw[name], raw[f"{name}_scale"]), expected.double())


def test_exact_weights_give_sums_that_fp32_holds_in_any_order(stage):
    """Every partial sum is a multiple of a step and below 2^24 steps: no order rounds."""
    raw = stage.expert_weights("exact", 1)
    w1, w2, w3 = (stage.dequantised(raw[name], raw[f"{name}_scale"]) for name in ("w1", "w2", "w3"))
    hidden = stage.routed("exact", 16)[0].double()
    assert torch.equal((hidden @ w3.T) % 2, torch.zeros(16, stage.INTERMEDIATE, dtype=torch.float64))
    gate, up = hidden @ w1.T, (hidden @ w3.T).clamp(-10, 10)
    assert gate.abs().min() > 128, "the clamp and underflow leave 10 and 0"
    assert {True, False} == set((gate > 0).flatten().tolist())
    assert (up.abs() < 10).double().mean() > 0.02, "not every column saturates"
    inner = (torch.nn.functional.silu(gate.clamp(max=10.0)) * up).bfloat16().double()
    assert torch.equal(inner % 20, torch.zeros_like(inner))
    assert (inner.abs() @ w2.abs().T).max() / 2.5 < 2**24
    assert torch.equal((inner @ w2.T) % 2.5, torch.zeros(16, stage.HIDDEN, dtype=torch.float64))


def test_the_reference_is_the_sum_over_ranks(stage):
    inputs = stage.routed("random", 5)
    whole = stage.reference(1, 0, *inputs)
    parts = sum(stage.reference(4, rank, *inputs) for rank in range(4))
    assert stage.distance(parts, whole) < 1e-12
    assert stage.distance(stage.reference(4, 1, *inputs), stage.reference(4, 2, *inputs)) > 0.5


def arm(logprobs, tokens, top):
    return {"logprobs": [logprobs], "tokens": [tokens], "top": [top]}


TOP = [[-1.0, -1.5], [-1.0, -1.02]]


@pytest.mark.parametrize(
    ("theirs", "ok"),
    [
        (arm([-2.0, -3.0], [4, 5], TOP), True),
        (arm([-2.0, -3.015], [4, 6], TOP), True),  # parts where the best two are a bfloat16 step apart
        (arm([-2.0, -3.0], [7, 5], TOP), False),
        (arm([-2.0, -3.03], [4, 5], TOP), False),
    ],
)
def test_engines_may_part_at_ties_only(stage, tmp_path, theirs, ok):
    torch.save(arm([-2.0, -3.0], [4, 5], TOP), tmp_path / "experts-ours.pt")
    torch.save(theirs, tmp_path / "experts-stock.pt")
    found = stage.experts_engines(tmp_path, tmp_path)
    assert found["ok"] is ok
    assert found["facts"]["prompt_tokens"] == 2
