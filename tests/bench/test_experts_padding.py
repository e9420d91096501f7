"""The GPU stage about expert widths: its data and its gates, on a CPU and without vLLM."""

import contextlib
import json
import sys
import types
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


def best(first, second):
    """Kept tokens of two steps: half a nat between the best two of the first, a bfloat16 step of the second."""
    return [[(first, -1.0), (4, -1.5)], [(second, -1.0), (5, -1.02)]]


@pytest.mark.parametrize(
    ("theirs", "ok"),
    [
        (arm([-2.0, -3.0], [4, 5], best(4, 5)), True),
        (arm([-2.0, -3.015], [4, 6], best(4, 6)), True),  # parts where the best two are a bfloat16 step apart
        (arm([-2.0, -3.0], [7, 5], best(7, 5)), False),
        (arm([-2.0, -3.0], [4, 8], [[(4, -1.0)], [(8, -1.0), (9, -1.01)]]), False),  # a tie, but of two other tokens
        (arm([-2.0, -3.03], [4, 5], best(4, 5)), False),
    ],
)
def test_engines_may_part_at_ties_only(stage, tmp_path, theirs, ok):
    torch.save(arm([-2.0, -3.0], [4, 5], best(4, 5)), tmp_path / "experts-ours.pt")
    torch.save(theirs, tmp_path / "experts-stock.pt")
    found = stage.experts_engines(tmp_path, tmp_path)
    assert found["ok"] is ok
    assert found["facts"]["prompt_tokens"] == 2


def row_of(kind, tp):
    whole = {
        "columns": 576,
        "stock_columns": 640,
        "saved_GiB": 7.47,
        "elements": 100,
        "different": 0,
        "difference": 0.0,
    }
    random = {"error": 3e-3, "stock_error": 3e-3, "time": {64: 0.9}} if kind == "random" else {}
    return {**whole, **random, "ok": True}


@pytest.fixture
def on_a_cpu(stage, monkeypatch):
    """The stage without layers: building, loading and judging replaced; ``stages`` stands for its module."""
    fake = types.ModuleType("stages")
    fake.apply_disguise = lambda: None
    fake.facts_of_machine = lambda: {"gpu": "none"}
    monkeypatch.setitem(sys.modules, "stages", fake)
    method = types.SimpleNamespace(process_weights_after_loading=lambda layer: None)
    monkeypatch.setattr(stage, "vllm_ready", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(stage, "build", lambda *args: types.SimpleNamespace(quant_method=method))
    monkeypatch.setattr(stage, "load", lambda *args: None)
    monkeypatch.setattr(stage, "judge", lambda kind, tp, rank, *pair: row_of(kind, tp))
    yield stage
    torch.set_default_device(None)


def test_every_rank_leaves_a_row_as_it_comes(on_a_cpu, tmp_path):
    found = on_a_cpu.experts_padding(tmp_path, tmp_path)
    assert (found["ok"], found["error"], found["gpu"]) == (True, "", "none")
    rows = [json.loads(line) for line in (tmp_path / "experts-padding.rows").read_text().splitlines()]
    assert [(row["kind"], row["tp"], row["rank"]) for row in rows] == [
        (kind, tp, rank) for kind in ("exact", "random") for tp, rank in ((4, 0), (4, 3), (8, 0), (8, 7))
    ]
    assert found["facts"]["exact_differing"] == "0 of 400"
    assert found["facts"]["TP8_saved_GiB"] == 7.47


def test_a_rank_that_fails_is_named_and_stops_no_other(on_a_cpu, monkeypatch, tmp_path):
    def judge(kind, tp, rank, *pair):
        if (kind, tp) == ("exact", 4):
            raise RuntimeError("an illegal something")
        return {**row_of(kind, tp), "ok": (kind, tp, rank) != ("random", 8, 7)}

    monkeypatch.setattr(on_a_cpu, "judge", judge)
    found = on_a_cpu.experts_padding(tmp_path, tmp_path)
    assert found["ok"] is False
    assert len((tmp_path / "experts-padding.rows").read_text().splitlines()) == 8
    for words in ("exact TP4 rank 0", "exact TP4 rank 3", "an illegal something", "random TP8 rank 7"):
        assert words in found["error"]
    assert "TP8 rank 0" not in found["error"]
    assert found["facts"]["exact_differing"] == "0 of 200"


class Method:
    def maybe_roundup_sizes(self, hidden, columns):
        return hidden, -(-columns // 128) * 128


class OurMethod(Method):
    def maybe_roundup_sizes(self, hidden, columns):
        return hidden, -(-columns // 64) * 64


@pytest.fixture
def engine(stage, monkeypatch, tmp_path):
    """The engine stages with an engine that builds eight layers, and three more for a draft, and answers alike."""

    class Engine:
        prompts = ([1], [1, 2, 3])

        def __init__(self, path, speculative_config=None, **options):
            for _ in range(11 if speculative_config else 8):
                OurMethod().maybe_roundup_sizes(1024, stage.ENGINE_WIDTH)

        def generate(self, prompts, tokens=2, **options):
            step = {5: types.SimpleNamespace(logprob=-1.0), 6: types.SimpleNamespace(logprob=-2.0)}
            answer = types.SimpleNamespace(token_ids=[5] * tokens, logprobs=[step] * tokens)
            known = {t: types.SimpleNamespace(logprob=-3.0) for t in range(4)}
            return [
                types.SimpleNamespace(outputs=[answer], prompt_logprobs=[None] + [known] * (len(ids) - 1))
                for ids in prompts
            ]

        def result(self, **facts):
            return {"facts": facts}

    fake = types.ModuleType("stages")
    fake.__dict__.update(
        apply_disguise=lambda: None,
        Engine=Engine,
        require_finite=lambda outputs: len(outputs),
        tokens_of=lambda outputs: [list(o.outputs[0].token_ids) for o in outputs],
    )
    padding = types.ModuleType("deepinfer_sm80.vllm_plugin.expert_padding")
    padding.AmpereMxfp4MoEMethod = OurMethod
    monkeypatch.setitem(sys.modules, "stages", fake)
    monkeypatch.setitem(sys.modules, padding.__name__, padding)
    monkeypatch.setattr(stage, "checkpoint", lambda out: out / "tiny-320")
    return stage


def test_engines_differ_in_the_rounding_alone(engine, tmp_path):
    ours, stock = engine.experts_ours(tmp_path, tmp_path), engine.experts_stock(tmp_path, tmp_path)
    assert (ours["facts"]["columns"], stock["facts"]["columns"]) == (320, 384)
    assert ours["facts"]["layers"] == stock["facts"]["layers"] == 8
    assert engine.experts_engines(tmp_path, tmp_path)["facts"]["equal_bits"] == "100.0%"
    assert OurMethod().maybe_roundup_sizes(1024, 320) == (1024, 320), "the method is left as it was"


def test_an_engine_with_other_widths_fails(engine, monkeypatch, tmp_path):
    monkeypatch.setattr(OurMethod, "maybe_roundup_sizes", Method.maybe_roundup_sizes)
    with pytest.raises(AssertionError, match="expected 320"):
        engine.experts_ours(tmp_path, tmp_path)


def test_the_draft_has_three_layers_more(engine, tmp_path):
    assert engine.experts_draft(tmp_path, tmp_path)["facts"]["layers"] == 11
