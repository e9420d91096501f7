"""The proof script: its report, its prompts and its comparison, on a CPU and without vLLM."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
SERVING = ROOT / "benchmarks/serving"
RESULTS = ROOT / "benchmarks/results/nvidia-h200/prove_ampere"


def load(name, monkeypatch):
    monkeypatch.syspath_prepend(str(SERVING))
    for known in ("stages", "recording"):
        monkeypatch.delitem(sys.modules, known, raising=False)
    spec = importlib.util.spec_from_file_location(name, SERVING / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def arm(rows, logprobs, experts=None, topk=None):
    chosen = experts if experts is not None else torch.zeros(rows, 2, dtype=torch.int64)
    picked = topk if topk is not None else torch.zeros(rows, 4, dtype=torch.int32)
    margins = {0: torch.full((rows,), 0.25), 1: torch.full((rows,), 0.125)}
    return [{"logprobs": torch.tensor(logprobs), "experts": {0: chosen}, "topk": {2: picked}, "margins": margins}]


def test_comparison_counts_and_names_flips(monkeypatch, tmp_path):
    stages = load("stages", monkeypatch)
    flipped = torch.zeros(3, 2, dtype=torch.int64)
    flipped[1] = 5
    torch.save(arm(3, [-1.0, -2.0, -3.0], experts=flipped), tmp_path / "logprobs-plugin.pt")
    torch.save(arm(3, [-1.0, -2.03, -3.003]), tmp_path / "logprobs-stock.pt")
    found = stages.compare(tmp_path, tmp_path)
    assert found["ok"] is True
    assert found["facts"]["tokens"] == 3
    assert found["facts"]["mean"] == pytest.approx(0.011, abs=1e-4)
    assert found["facts"]["mean_without_flip"] == pytest.approx(0.0015, abs=1e-4)
    assert found["largest"][0]["position"] == 1
    assert found["largest"][0]["experts_flipped_in_layers"] == [0]
    assert found["largest"][0]["smallest_router_margin"] == 0.125


def test_a_mean_above_the_bound_fails(monkeypatch, tmp_path):
    stages = load("stages", monkeypatch)
    torch.save(arm(2, [-1.0, -2.0]), tmp_path / "logprobs-plugin.pt")
    torch.save(arm(2, [-1.1, -2.1]), tmp_path / "logprobs-stock.pt")
    assert stages.compare(tmp_path, tmp_path)["ok"] is False


def test_every_stage_has_its_function(monkeypatch):
    assert set(load("prove_ampere", monkeypatch).STAGES) == set(load("stages", monkeypatch).FUNCTIONS)


def test_a_stage_that_dies_is_reported_and_fails_the_run(monkeypatch, tmp_path, capsys):
    prove = load("prove_ampere", monkeypatch)
    monkeypatch.setattr(sys, "argv", ["prove_ampere.py", "--out", str(tmp_path), "--stage", "compare"])
    assert prove.main() == 1
    out = capsys.readouterr().out
    assert "compare: FAILED" in out
    assert "logprobs-plugin.pt" in out
    assert json.loads((tmp_path / "compare.json").read_text())["ok"] is False


def test_the_page_shows_the_committed_results(monkeypatch):
    prove = load("prove_ampere", monkeypatch)
    assert (ROOT / "docs/serving-proof.md").read_text(encoding="utf-8") == prove.report(RESULTS)
