"""The whole-step benchmark on an engine that counts its steps: what is timed, how kernels are named, rows and page."""

import argparse
import importlib.util
import json
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from deepinfer_sm80.bench import rows
from deepinfer_sm80.model.config import preset

ROOT = Path(__file__).parents[2]
SERVING = ROOT / "benchmarks/serving"


def load(name, monkeypatch):
    monkeypatch.syspath_prepend(str(SERVING))
    monkeypatch.delitem(sys.modules, "stages", raising=False)
    spec = importlib.util.spec_from_file_location(name, SERVING / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setitem(sys.modules, name, module)
    return module


class Core:
    """Prefills one request a step, decodes all that are prefilled; each of its steps is 1 ms of a clock."""

    def __init__(self, clock):
        self.clock, self.requests, self.log = clock, {}, []

    def add_request(self, name, prompt, params):
        self.requests[name] = SimpleNamespace(length=len(prompt["prompt_token_ids"]), made=0, most=params.max_tokens)

    def step(self):
        self.clock[0] += 0.001
        waiting = [name for name, r in self.requests.items() if r.made == 0]
        ran = waiting[:1] or list(self.requests)
        self.log.append(len(ran) if not waiting else f"prefill {self.requests[ran[0]].length}")
        for name in ran:
            self.requests[name].made += 1
        made = {name: self.requests[name].made for name in ran}
        self.requests = {name: r for name, r in self.requests.items() if r.made < r.most}
        return [SimpleNamespace(request_id=n, outputs=[SimpleNamespace(token_ids=[0] * m)]) for n, m in made.items()]

    def has_unfinished_requests(self):
        return bool(self.requests)


@pytest.fixture
def engine(monkeypatch):
    """An engine, and vLLM's and CUDA's names as far as they are asked for."""
    clock = [0.0]
    vllm = ModuleType("vllm")
    vllm.SamplingParams = lambda **options: SimpleNamespace(**options)
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    core = Core(clock)
    return SimpleNamespace(
        llm=SimpleNamespace(llm_engine=core), core=core, clock=clock, prompts=[[1, 2, 3], [4, 5]], boot_s=0.1
    )


@pytest.fixture
def profile(monkeypatch, engine):
    module = load("step_profile", monkeypatch)
    monkeypatch.setattr(module.time, "perf_counter", lambda: engine.clock[0])

    def profiled(work):
        before = len(engine.core.log)
        work()
        return [("decode_kernel", 30.0), ("Memcpy DtoD", 10.0)] * (len(engine.core.log) - before)

    monkeypatch.setattr(module, "profiled", profiled)
    return module


def test_only_steps_in_which_all_decode_are_timed(profile, engine):
    modes = profile.GraphModes()
    found = profile.decode_step(engine, 3, 10, modes, profile.our_kernels())
    assert found["ms"] == pytest.approx(1.0)
    assert engine.core.log[:3] == ["prefill 10"] * 3
    timed = engine.core.log[3 : 3 + profile.WARM + profile.STEPS + profile.PROFILED]
    assert set(timed) == {3}, "nobody joins and nobody has finished"
    assert not engine.core.requests
    assert found["launches"] == 2.0
    assert found["kernel_ms"] == pytest.approx(0.04)
    assert found["groups"] == {
        "sparse_mla_decode": {"share": 0.75, "us": 30.0, "launches": 1.0},
        "copies and fills": {"share": 0.25, "us": 10.0, "launches": 1.0},
    }


def test_a_chunk_is_one_prompt_and_its_first_token(profile, engine):
    found = profile.prefill_chunk(engine, profile.GraphModes(), {})
    chunks = 1 + profile.REPEATS + profile.PROFILED_CHUNKS
    assert engine.core.log == ["prefill 2048"] * chunks
    assert found["ms"] == pytest.approx(1.0)
    assert found["launches"] == 2.0


def test_prompts_are_different(profile, engine):
    prompts = profile.prompts_of(engine, 4, 7)
    assert {len(prompt) for prompt in prompts} == {7}
    assert len({tuple(prompt) for prompt in prompts}) == 4


@pytest.mark.parametrize(
    ("kernel", "group"),
    [
        ("prefill_kernel", "sparse_mla_prefill"),
        ("void marlin_moe_wna16::Marlin<long, 256>(int4 const*)", "experts (Marlin)"),
        ("void marlin::Marlin<562949953487624l, 128>(int4 const*)", "linear layers (Marlin)"),
        ("mhc_post_tilelang_kernel", "residual streams (vLLM's TileLang)"),
        ("nvjet_sm90_tst_128x64_64x8_1x2_h_bz_TNN", "matrix products (cuBLAS)"),
        ("void sm90::decode::sparse_fp8::flash_fwd_splitkv_mla_fp8_sparse_kernel<>()", "attention (FlashMLA)"),
        ("void vllm::moe::moe_align_block_size_kernel<int>(int*)", "expert routing"),
        ("_engram_lookup_kernel", "Engram (vLLM's)"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<int>>()", "copies and fills"),
        ("void at::native::elementwise_kernel<128, 2>()", "torch"),
        ("never_heard_of", "other"),
    ],
)
def test_kernels_are_named_by_what_they_do(kernel, group, profile):
    assert profile.group_of(kernel, profile.our_kernels()) == group


def test_a_name_of_ours_belongs_to_one_operator_or_to_one_family(profile):
    shared = {name: ops for name, ops in profile.our_kernels().items() if ", " in ops}
    assert shared == {"first_round_kernel": "indexer_topk, select_candidate_blocks"}


@pytest.fixture(autouse=True)
def engine_is_here(monkeypatch):
    """Scripts look for vLLM and a checkpoint before they start; stand-ins have neither."""
    monkeypatch.syspath_prepend(str(SERVING))
    running = importlib.import_module("running")
    for check in ("require_engine", "require_checkpoint"):
        monkeypatch.setattr(running, check, lambda *given: None)


def run_arm(module, engine, tmp_path, monkeypatch, arm="kernels"):
    stages = ModuleType("stages")
    stages.apply_disguise = lambda: None
    stages.facts_of_machine = lambda: {"gpu": "NVIDIA Test 9000", "lowering": "sm80"}
    monkeypatch.setitem(sys.modules, "stages", stages)
    monkeypatch.setattr(module.step_profile.GraphModes, "install", lambda self: None)
    (tmp_path / "toy").mkdir(exist_ok=True)
    (tmp_path / "toy/config.json").write_text(json.dumps(preset("tiny").to_config_json()))
    arguments = ["--model", str(tmp_path / "toy"), "--results", str(tmp_path), "--commit", "abc", "--batch", "2"]
    given = {}

    def build(model, **options):
        given.update(options)
        return engine

    found = module.inside(arm, module.parse(arguments), build)
    assert given["compilation_config"] == {"cudagraph_capture_sizes": [1, 8, 64]}
    return found


def test_rows_are_written_as_they_come_and_the_page_shows_the_latest(profile, engine, tmp_path, monkeypatch):
    module = load("step", monkeypatch)
    run_arm(module, engine, tmp_path, monkeypatch)
    found = run_arm(module, engine, tmp_path, monkeypatch)
    assert [row["step"] for row in found] == ["decode-2", "prefill-2048"]
    assert found[0]["launches_per_layer"] == 0.25
    written = [json.loads(line) for line in (tmp_path / "nvidia-test-9000/step.jsonl").read_text().splitlines()]
    assert written == [*written[:2], *json.loads(json.dumps(found))]
    measured = rows.beside(rows.read_all(tmp_path, rows.STEPS))
    assert measured == written[2:]
    assert rows.summarise(tmp_path, ROOT / "docs/resources.md")["steps"] == measured
    page = module.page(measured)
    assert "## NVIDIA Test 9000, checkpoint `toy` (8 layers)" in page
    assert "| decode-2 | 1024 | kernels | sm80 | 1.00 | 0.04 | 2 | 0.2 | unknown |" in page
    assert "| sparse_mla_decode | 75.0% | 75.0% |" in page


def step_row(arm, commit, time, step="decode-1", **more):
    numbers = {"ms": float(time or 0), "kernel_ms": 1.0, "launches": 8, "launches_per_layer": 1.0, "graph": "FULL"}
    place = {"gpu": "a GPU", "checkpoint": "toy", "layers": 8, "context": 1024, "lowering": "sm80", "groups": {}}
    return {**place, **numbers, "step": step, "arm": arm, "commit": commit, "time": f"2026-01-0{time}", **more}


def test_only_arms_of_one_commit_stand_beside_one_another(monkeypatch):
    module = load("step", monkeypatch)
    both = [step_row("kernels", "aaa", 1), step_row("stock", "aaa", 2)]
    older = [step_row("kernels", "000", 1), step_row("stock", "000", 1)]
    later = step_row("kernels", "bbb", 5)
    measured = [*older, *both, later]
    assert rows.beside(measured) == both
    assert rows.alone(measured) == [later]
    page = module.page(measured)
    whole, _, after = page.partition("Commit bbb, an arm without the other: a clock of another run, to be read alone.")
    assert "Share of `stock`'s kernel time" in whole
    assert "Share" not in after
    assert "Commit aaa." in whole
    assert "| kernels | sm80 | 1.00 |" in whole
    assert "| kernels | sm80 | 5.00 |" in after
    assert "| kernels | sm80 | 5.00 |" not in whole
    again = [*measured, step_row("stock", "bbb", 6)]
    assert [row["commit"] for row in rows.beside(again)] == ["bbb", "bbb"]
    assert rows.alone(again) == []
    assert rows.beside([later, step_row("stock", "ccc", 6)]) == []
    elsewhere = step_row("kernels", "ddd", 7, gpu="another")
    assert rows.beside([*measured, elsewhere]) == [*both, elsewhere]


def test_each_step_is_of_the_last_commit_that_has_every_arm_of_it(monkeypatch):
    """A run of fewer steps hides none of an older one."""
    older = [step_row(arm, "aaa", 1, step) for arm in ("kernels", "stock") for step in ("decode-1", "decode-8")]
    newer = [step_row(arm, "bbb", 2) for arm in ("kernels", "stock")]
    apart = [step_row("kernels", "ccc", 3), step_row("stock", "ccc", 3, "decode-8")]
    found = rows.beside([*older, *newer, *apart])
    assert [(row["step"], row["arm"], row["commit"]) for row in found] == [
        ("decode-1", "kernels", "bbb"),
        ("decode-1", "stock", "bbb"),
        ("decode-8", "kernels", "aaa"),
        ("decode-8", "stock", "aaa"),
    ]
    assert rows.alone([*older, *newer, *apart]) == apart
    assert rows.alone([*apart, *older, *newer]) == [], "what is older than the arms beside one another is not shown"
    wider = [step_row(arm, "ddd", 4, context=2048) for arm in ("kernels", "stock")]
    found = rows.beside([*newer, *wider])
    assert sorted(found, key=lambda row: row["context"]) == [*newer, *wider], "another context is another step"
    once_more = step_row("kernels", "aaa", 5)
    found = rows.beside([*older, *newer, once_more])
    assert [row["commit"] for row in found if row["step"] == "decode-1"] == ["aaa", "aaa"]
    assert once_more in found, "the commit that was written last"


def test_a_page_without_two_arms_of_one_commit_shows_each_alone(monkeypatch):
    module = load("step", monkeypatch)
    assert module.page([]) == module.INTRODUCTION + "\n"
    apart = [
        step_row("kernels", "bbb", 5),
        step_row("stock", "ccc", 6),
        step_row("stock", "ccc", None, "decode-8", ms=7),
    ]
    page = module.page(apart)
    first, _, second = page.partition("Commit ccc, an arm without the other")
    assert "## a GPU, checkpoint `toy` (8 layers)\n\nCommit bbb, an arm without the other" in first
    assert first.count("| kernels |") == second.count("| kernels |") + 1 == 1
    assert second.count("| stock |") == 2


def test_the_page_parts_gpus_and_checkpoints(monkeypatch):
    module = load("step", monkeypatch)
    measured = []
    for number, place in enumerate(({}, {"checkpoint": "layer"}, {"gpu": "another"})):
        measured += [step_row(arm, "aaa", 1, ms=3.0 + number, **place) for arm in ("kernels", "stock")]
        measured.append(step_row("kernels", "bbb", 2, ms=6.0 + number, **place))
    _, *parts = module.page(measured).split("\n## ")
    shown = {part.split(" (")[0]: re.findall(r"\| sm80 \| (\S+) \|", part) for part in parts}
    assert shown == {
        "a GPU, checkpoint `toy`": ["3.00", "3.00", "6.00"],
        "a GPU, checkpoint `layer`": ["4.00", "4.00", "7.00"],
        "another, checkpoint `toy`": ["5.00", "5.00", "8.00"],
    }


def test_each_arm_has_its_environment(monkeypatch):
    module = load("step", monkeypatch)
    monkeypatch.setenv("AMPERE_DISGUISE", "8.6")
    kernels, stock = (module.environment_of(arm, "8.0") for arm in module.ARMS)
    assert kernels["AMPERE_DISGUISE"] == "8.0"
    assert "DEEPINFER_DISABLE" not in kernels
    assert stock["DEEPINFER_DISABLE"] == "1"
    assert "AMPERE_DISGUISE" not in stock
    assert "AMPERE_DISGUISE" not in module.environment_of("kernels", None)


def test_an_arm_that_fails_does_not_end_the_other(monkeypatch, tmp_path, capsys):
    module = load("step", monkeypatch)
    ran = []

    def run(command, env, timeout):
        ran.append(command[-1])
        return argparse.Namespace(returncode=len(ran) % 2)

    monkeypatch.setattr(module.subprocess, "run", run)
    assert module.main(["--model", str(tmp_path)]) == 1
    assert ran == ["kernels", "stock"]
    assert capsys.readouterr().out == "kernels: FAILED with 1\n"


def test_the_committed_page_shows_the_committed_rows(monkeypatch):
    module = load("step", monkeypatch)
    measured = rows.read_all(ROOT / "benchmarks/results", rows.STEPS)
    assert {row["step"] for row in measured} == {"decode-1", "decode-8", "decode-64", "prefill-2048"}
    assert (ROOT / "docs/step-times.md").read_text(encoding="utf-8") == module.page(measured)
