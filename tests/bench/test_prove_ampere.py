"""The proof script: its report, its prompts and its comparison, on a CPU and without vLLM."""

import importlib.util
import json
import sys
import types
from pathlib import Path

import pytest
import torch
import triton

from deepinfer_sm80.ops.variants import all_variants

ROOT = Path(__file__).parents[2]
SERVING = ROOT / "benchmarks/serving"
RESULTS = ROOT / "benchmarks/results/nvidia-h200"
PAGES = {  # of docs/, by the folder of RESULTS
    "prove_ampere": "serving-proof.md",
    "prove_ampere_layer": "serving-proof-layer.md",
}


def load(name, monkeypatch):
    monkeypatch.syspath_prepend(str(SERVING))
    for known in ("stages", "recording", "timing"):
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


def test_a_set_of_stages_by_its_name(monkeypatch, tmp_path):
    prove, ran = load("prove_ampere", monkeypatch), []
    for check in ("require_engine", "require_checkpoint"):
        monkeypatch.setattr(prove, check, lambda *given: None)
    monkeypatch.setattr(prove, "run_stage", lambda name, args: ran.append(name) or 0)
    monkeypatch.setattr(sys, "argv", ["prove_ampere.py", "--out", str(tmp_path), "--stage", "experts", "--limit", "9"])
    assert prove.main() == 0
    assert ran == list(prove.SETS["experts"])
    assert ran[-1] == "experts-engines", "what compares comes last"
    assert set(ran) <= set(prove.STAGES)


def test_a_stage_that_dies_is_reported_and_fails_the_run(monkeypatch, tmp_path, capsys):
    prove = load("prove_ampere", monkeypatch)
    monkeypatch.setattr(sys, "argv", ["prove_ampere.py", "--out", str(tmp_path), "--stage", "compare"])
    assert prove.main() == 1
    out = capsys.readouterr().out
    assert "compare: FAILED" in out
    assert "logprobs-plugin.pt" in out
    assert json.loads((tmp_path / "compare.json").read_text())["ok"] is False


@pytest.mark.parametrize("results", PAGES)
def test_the_pages_show_the_committed_results(monkeypatch, results):
    prove = load("prove_ampere", monkeypatch)
    assert (ROOT / "docs" / PAGES[results]).read_text(encoding="utf-8") == prove.report(RESULTS / results)


def test_every_kernel_a_proof_launched_is_in_the_closed_list():
    listed = {variant.key for variant in all_variants()}
    results = [json.loads(path.read_text()) for folder in PAGES for path in (RESULTS / folder).glob("*.json")]
    launched = {key for result in results for key in result.get("launched", ())}
    assert launched <= listed


@pytest.mark.parametrize(("took", "ok"), [((6.04, 1.9), True), ((121.0, 1.9), False), ((6.0, 20.4), False)])
def test_kernels_are_ready_in_time(monkeypatch, tmp_path, took, ok):
    stages = load("stages", monkeypatch)
    answers, caches = iter(took), []

    def run(command, env, **options):
        caches.append(env["TRITON_CACHE_DIR"])
        return types.SimpleNamespace(returncode=0, stderr=f"a warning\n40 {next(answers)} 16\n")

    monkeypatch.setattr(stages.subprocess, "run", run)
    monkeypatch.setattr(stages, "facts_of_machine", dict)
    found = stages.warm_up(tmp_path, tmp_path)
    assert found["ok"] is ok
    assert found["facts"] == {"kernels": 40, "cores": 16, "cold_s": round(took[0], 1), "warm_s": round(took[1], 1)}
    assert len(set(caches)) == 1, "the second run finds what the first one compiled"


def test_mixed_batches_report_what_was_compiled(monkeypatch):
    timing = load("timing", monkeypatch)

    class Engine:
        prompts = ([1, 2, 3],) * 700
        served = 0

        def generate(self, prompts, tokens):
            self.served += 1
            assert all(prompts)
            if self.served == 7:
                hook = triton.knobs.runtime.jit_post_compile_hook
                hook(fn=types.SimpleNamespace(name="late_kernel"), key="k")

    engine = Engine()
    assert timing.mixed_batches(engine) == ["late_kernel"]
    assert engine.served == timing.MIXED_BATCHES
    assert triton.knobs.runtime.jit_post_compile_hook is None


def test_a_decode_step_is_the_difference_of_two_runs(monkeypatch):
    timing = load("timing", monkeypatch)
    clock = [0.0]
    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock[0])

    class Engine:
        prompts = (list(range(3000)),)
        llm = types.SimpleNamespace(reset_prefix_cache=lambda: None)

        def generate(self, prompts, tokens):
            clock[0] += 0.1 + 0.002 * (tokens - 1) * len(prompts)

    found = timing.times(Engine())
    assert found == {
        "decode_ms_batch_1": 2.0,
        "decode_ms_batch_8": 16.0,
        "decode_ms_batch_64": 128.0,
        "prefill_ms_2048": 100.0,
    }
