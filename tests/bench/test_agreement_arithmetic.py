"""The arithmetic of the agreement stages, what they save of vLLM's steps, and their pages: fake data, no model."""

import ast
import importlib
import importlib.util
import json
import sys
import types
from pathlib import Path

import pytest
import torch

from deepinfer_sm80.model.choices import Choice

ROOT = Path(__file__).parents[2]
SERVING = ROOT / "benchmarks/serving"
_spec = importlib.util.spec_from_file_location("vllm_source", ROOT / "tests/vllm_plugin/vllm_source.py")
source = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(source)

OWN = ("agreement", "agreement_page", "comparison", "generated", "prompts", "prove_ampere", "recording", "stages")


@pytest.fixture
def load(monkeypatch):
    monkeypatch.syspath_prepend(str(SERVING))
    for name in OWN:
        monkeypatch.delitem(sys.modules, name, raising=False)
    return importlib.import_module


def choice(ties, surplus=0):
    tie = torch.tensor(ties)
    own = torch.zeros(len(ties), 4, dtype=torch.bool)
    taken = own.clone()
    taken[tie > 0, 0] = True
    return Choice(own, taken, torch.ones(len(ties)), tie, torch.full((len(ties),), surplus))


def entry(*logprobs, repeated=None):
    values = torch.tensor(logprobs)
    return {"logprobs": values, "repeated": values if repeated is None else torch.tensor(repeated)}


def test_a_distribution_is_of_absolute_differences(load):
    found = load("agreement").distribution(torch.tensor([-0.4, 0.0, 0.1, 0.2, 0.3]))
    assert found == {"tokens": 5, "mean": 0.2, "p50": 0.2, "p90": 0.36, "p99": 0.396, "largest": 0.4}


def test_flips_are_counted_by_kind_and_layer_and_beyond_their_own_tie(load):
    flips = load("agreement").Flips()
    flips.add("experts", 3, choice([0.0, 0.01, 0.02]))
    flips.add("experts", 3, choice([0.5]))
    flips.add("rows", 3, choice([0.0, 0.02], surplus=2))
    assert flips.rows["experts", 3] == {
        "kind": "experts", "layer": 3, "queries": 4, "flips": 3, "largest_tie": 0.5, "beyond": 2, "surplus": 0,
    }  # fmt: skip
    assert flips.rows["rows", 3]["beyond"] == 0, "the margin of rows is wider than that of experts"
    assert flips.total("flips") == 4
    assert flips.total("surplus") == 2


def test_an_arm_within_all_limits_passes(load):
    agreement = load("agreement")
    free = torch.tensor([-1.0, -2.0, -3.0, -4.0])
    arm = entry(-1.01, -1.99, -3.01, -3.99, repeated=[-1.01, -1.99, -3.01, -3.98])
    row = agreement.judge(free, torch.tensor([-1.01, -2.08, -3.0, -4.0]), [arm], agreement.Flips(), 1e-4)
    assert row["failed"] == []
    assert row["free"]["mean"] == 0.01
    assert row["forced"]["largest"] == 0.09
    assert row["repeated"]["largest"] == 0.01
    assert row["nll"] == 2.5
    assert row["nll_repeated"] == 2.4975


@pytest.mark.parametrize(
    ("arm", "forced", "tie", "failed"),
    [
        ((-1.03, -1.97), (-1.0, -2.0), 0.0, ["mean above 0.01"]),
        ((-1.001, -1.999), (-1.0, -2.11), 0.0, ["forced worst above 0.1"]),
        ((-1.0, -2.0), (-1.0, -2.0), 0.016, ["a flip beyond its tie margin"]),
        ((-1.006, -2.006), (-1.0, -2.0), 0.015, ["likelihood moved by 0.00600"]),
    ],
)
def test_each_limit_fails_the_arm_by_itself(load, arm, forced, tie, failed):
    agreement = load("agreement")
    flips = agreement.Flips()
    flips.add("experts", 0, choice([tie]))
    row = agreement.judge(torch.tensor([-1.0, -2.0]), torch.tensor(forced), [entry(*arm)], flips, 0.005)
    assert row["failed"] == failed


class Spec:
    """A specification whose full computation is 0.5 off."""

    device = "cpu"

    def prompt_logprobs(self, tokens):
        return torch.full((len(tokens) - 1,), -1.5)


def replayed(load, monkeypatch, out, off, full_off=0.5):
    agreement = load("agreement")
    steps = [{"scheduled": 2, "prefill": True, "trimmed": True}, {"scheduled": 1, "prefill": False, "trimmed": False}]
    logprobs = torch.full((2,), -2.0 + full_off)
    request = {"prompt": [1, 2, 3], "tokens": [4, 5], "logprobs": logprobs, "cached": 0, "steps": steps}
    for run in ("whole", "chunks"):
        torch.save([request], out / f"generated-{run}.pt")
    monkeypatch.setattr(agreement, "specification", lambda model, **switches: Spec())
    monkeypatch.setattr(agreement, "stepwise", lambda spec, request, states: request["logprobs"] + off)
    return agreement.spec_replay(out, out)


def test_generated_tokens_are_judged_by_their_mean(load, monkeypatch, tmp_path):
    found = replayed(load, monkeypatch, tmp_path, 0.009, full_off=0.0)
    assert found["ok"] is True
    assert found["facts"]["mean"] == 0.009
    assert found["facts"]["mean_without_replay"] == 0.5
    assert found["requests"][0]["chunks"] == "2"
    assert replayed(load, monkeypatch, tmp_path, 0.011, full_off=0.0)["ok"] is False


def test_noise_of_another_order_lifts_no_limit(load, monkeypatch, tmp_path):
    agreement, calls = load("agreement"), []
    replayed(load, monkeypatch, tmp_path, 0.0, full_off=0.0)  # saves the runs
    monkeypatch.setattr(agreement, "specification", lambda model, **switches: Spec())

    def stepwise(spec, request, states):
        calls.append(request)
        return torch.full((2,), -2.0) + (0.011 if len(calls) % 2 else 0.4)

    monkeypatch.setattr(agreement, "stepwise", stepwise)
    found = agreement.spec_replay(tmp_path, tmp_path)
    assert found["facts"]["mean_of_other_order"] > 0.3
    assert found["facts"]["mean_without_replay"] > found["facts"]["mean"]
    assert found["ok"] is False
    assert found["limits"] == {"mean": 0.01}


def test_agreement_that_needs_no_replay_proves_none(load, monkeypatch, tmp_path):
    assert replayed(load, monkeypatch, tmp_path, 0.005, full_off=0.5)["ok"] is False


class Steps:
    """vLLM's scheduler output, graph descriptor and input batch of one step."""

    def __init__(self, requests, graph="NONE", padded=None, new=()):
        self.scheduled_new_reqs = [types.SimpleNamespace(req_id=name, replay_start=at) for name, at in new]
        self.cg_mode = types.SimpleNamespace(name=graph)
        self.req_ids = [name for name, *_ in requests]
        self.num_computed_tokens_np = [computed for _, computed, *_ in requests]
        self.num_scheduled_tokens = [scheduled for _, _, scheduled, _ in requests]
        self.is_prefilling_np = [prefill for *_, prefill in requests]
        self.num_tokens_after_padding = padded or sum(self.num_scheduled_tokens)


def note(schedule, *args, **named):
    step = Steps(*args, **named)
    schedule.note(step, step, step)


def completed(request, prompt, tokens, cached=0):
    steps = [{token: types.SimpleNamespace(logprob=-0.5 * token), 99: None} for token in tokens]
    done = types.SimpleNamespace(token_ids=tokens, logprobs=steps)
    return types.SimpleNamespace(request_id=request, prompt_token_ids=prompt, outputs=[done], num_cached_tokens=cached)


def test_a_request_is_saved_with_its_own_steps(load):
    schedule, generated = load("recording").Schedule(), load("generated")
    note(schedule, [("1-ab", 0, 3, True), ("10-cd", 128, 2, True)], new=[("1-ab", 0), ("10-cd", 128)], padded=8)
    note(schedule, [("10-cd", 130, 1, False), ("1-ab", 3, 1, False)], graph="FULL")
    note(schedule, [("1-ab", 4, 1, False)], graph="PIECEWISE")
    found = generated.request_of(completed("1", [7, 7, 7], [1, 2]), schedule)
    assert found["logprobs"].tolist() == [-0.5, -1.0]
    assert [step["scheduled"] for step in found["steps"]] == [3, 1], "the step that ran ahead is left out"
    assert found["steps"][0] | {"request": ""} == {
        "request": "", "computed": 0, "scheduled": 3, "prefill": True, "graph": "eager", "padded": 8,
        "replay_start": 0, "trimmed": False,
    }  # fmt: skip
    assert found["steps"][1]["graph"] == "full"
    assert [step["replay_start"] for step in schedule.of("10")] == [128, 128]
    assert {step["request"] for step in schedule.of("1")} == {"1-ab"}


def test_steps_that_leave_a_gap_are_refused(load):
    schedule, generated = load("recording").Schedule(), load("generated")
    note(schedule, [("1-ab", 0, 2, True)])
    note(schedule, [("1-ab", 3, 1, False)])
    with pytest.raises(AssertionError, match=r"request 1 of 3 \+ 2 tokens .* must follow each other"):
        generated.request_of(completed("1", [7, 7, 7], [1, 2]), schedule)
    with pytest.raises(AssertionError, match="must follow each other"):
        generated.request_of(completed("2", [7, 7, 7], [1, 2]), schedule)


def test_a_log_probability_that_is_no_number_is_refused(load):
    generated = load("generated")
    with pytest.raises(AssertionError, match="not finite"):
        generated.request_of(completed("1", [7], [float("nan")]), load("recording").Schedule())


class Engine:
    """vLLM that computes a prompt in one step and finds 1,920 tokens of the second batch in its cache."""

    def __init__(self, schedule, cached=1920):
        self.schedule, self.cached, self.asked = schedule, cached, []
        self.prompts = [[1], [2] * 64, [3] * 700, [4] * 3000]

    def generate(self, prompts, tokens):
        outputs = []
        for prompt in prompts:
            name, cached = str(len(self.asked)), self.cached if len(prompt) == 2064 else 0
            self.asked.append(prompt)
            start = max(cached - 128, 0)
            note(self.schedule, [(f"{name}-x", start, len(prompt) - start, True)], new=[(f"{name}-x", start)])
            self.schedule.steps[-1]["trimmed"] = True
            for at in range(tokens - 1):
                note(self.schedule, [(f"{name}-x", len(prompt) + at, 1, False)], graph="FULL")
            outputs.append(completed(name, prompt, [1] * tokens, cached))
        return outputs


def test_long_prompts_and_a_prefix_hit_are_recorded(load, tmp_path):
    schedule, generated = load("recording").Schedule(), load("generated")
    engine = Engine(schedule)
    facts = generated.record(engine, schedule, tmp_path / "generated-whole.pt")
    saved = torch.load(tmp_path / "generated-whole.pt")
    assert [len(request["prompt"]) for request in saved] == [700, 3000, 2064]
    assert saved[2]["prompt"] == [4] * 2000 + [2] * 64
    assert saved[2]["cached"] == 1920
    assert saved[2]["steps"][0]["replay_start"] == 1792
    assert facts == {
        "prompts": "700 3000 2064", "cached": 1920, "prefill_steps": 3, "trimmed": 3, "graphs": "eager full",
        "largest_chunk": 3000,
    }  # fmt: skip
    other = load("recording").Schedule()
    with pytest.raises(AssertionError, match="no cached tokens"):
        generated.record(Engine(other, cached=0), other, tmp_path / "generated-whole.pt")


def test_the_schedule_sees_what_the_runner_prepared_and_whether_it_trimmed(load, monkeypatch):
    class Runner:
        model_state = types.SimpleNamespace(decoder_replay_layers=types.SimpleNamespace(replay_batch=None))

        def prepare_inputs(self, scheduled, state, descriptor, num_active_loras):
            return scheduled

        def execute_model(self, scheduled, trim=False):
            self.prepare_inputs(scheduled, None, scheduled, 0)
            self.model_state.decoder_replay_layers.replay_batch = "rows" if trim else None
            return "done"

    module = types.ModuleType("vllm.v1.worker.gpu.model_runner")
    module.GPUModelRunner = Runner
    for name in ("vllm", "vllm.v1", "vllm.v1.worker", "vllm.v1.worker.gpu"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    schedule = load("recording").Schedule()
    schedule.install()
    runner = Runner()
    assert runner.execute_model(Steps([("1-a", 0, 300, True)]), trim=True) == "done"
    runner.execute_model(Steps([("1-a", 300, 1, False)], graph="FULL"))
    assert [(step["scheduled"], step["trimmed"]) for step in schedule.steps] == [(300, True), (1, False)]


def test_vllm_has_what_the_schedule_reads():
    runner = "vllm.v1.worker.gpu.model_runner"
    prepare = source.definition(runner, "GPUModelRunner.prepare_inputs")
    assert [argument.arg for argument in prepare.args.args[:4]] == [
        "self", "scheduler_output", "batch_req_state", "batch_desc",
    ]  # fmt: skip
    assert source.definition(runner, "GPUModelRunner.execute_model").args.args[1].arg == "scheduler_output"

    def fields(module, name):
        found = source.definition(module, name)
        return {
            node.target.id for node in ast.walk(found) if isinstance(node, ast.AnnAssign) and hasattr(node.target, "id")
        }

    batch = {
        "req_ids",
        "num_computed_tokens_np",
        "num_scheduled_tokens",
        "is_prefilling_np",
        "num_tokens_after_padding",
    }
    assert batch <= fields("vllm.v1.worker.gpu.input_batch", "InputBatch")
    assert "cg_mode" in fields("vllm.v1.worker.gpu.cudagraph_utils", "BatchExecutionDescriptor")
    assert {"req_id", "replay_start"} <= fields("vllm.v1.core.sched.output", "NewRequestData")
    assert "scheduled_new_reqs" in fields("vllm.v1.core.sched.output", "SchedulerOutput")
    state = ast.unparse(source.definition("vllm.models.deepseek_v41.nvidia.model_state", "DeepseekV41ModelState"))
    assert "self.decoder_replay_layers" in state
    assert "replay_batch = None" in state
    modes = ast.unparse(source.definition("vllm.config.compilation", "CUDAGraphMode"))
    assert all(f"{name} = {value}" in modes for value, name in enumerate(("NONE", "PIECEWISE", "FULL")))
    request_id = ast.unparse(source.definition("vllm.v1.engine.input_processor", "InputProcessor.assign_request_id"))
    assert "{request.external_req_id}-{random_uuid():.8}" in request_id


def test_an_arm_is_saved_with_its_prompts_and_a_second_run(load, monkeypatch, tmp_path):
    class Fake:
        prompts = ([1], [2, 3, 4])
        runs = 0

        def __init__(self, model, **options):
            assert options["swa_bounded_replay"] is False

        def generate(self, prompts, tokens, prompt_logprobs):
            Fake.runs += 1
            (ids,) = prompts
            steps = [None, *({token: types.SimpleNamespace(logprob=-Fake.runs * 1.0)} for token in ids[1:])]
            return [types.SimpleNamespace(prompt_logprobs=steps)]

        def result(self, **facts):
            return {"facts": facts}

    stages, recording = load("stages"), load("recording")
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    monkeypatch.setattr(stages, "Engine", Fake)
    monkeypatch.setattr(recording.Recorder, "install", lambda self: None)
    found = stages.logprobs_plugin(tmp_path, tmp_path)
    assert found["facts"] == {"tokens": 2, "mean_nll": 1.0}
    (saved,) = load("agreement").load_arm(tmp_path, "plugin")
    assert saved["prompt"] == [2, 3, 4]
    assert saved["logprobs"].tolist() == [-1.0, -1.0]
    assert saved["repeated"].tolist() == [-2.0, -2.0]


def test_what_compares_runs_when_its_inputs_are_done(load, monkeypatch, tmp_path):
    prove, finished = load("prove_ampere"), []
    monkeypatch.setattr(prove, "run_stage", lambda name, args: finished.append(name) or (name == "compare"))
    monkeypatch.setenv("PROVE_SHARED_GPU", "1")
    monkeypatch.setenv("PROVE_TURN", "")
    assert prove.run_together(prove.STAGES, types.SimpleNamespace(out=tmp_path)) == 1
    assert sorted(finished) == sorted(prove.STAGES)
    assert finished[0] == "checkpoint"
    for name, inputs in prove.AFTER.items():
        assert all(finished.index(earlier) < finished.index(name) for earlier in inputs)


@pytest.mark.parametrize("where", ["arm", "spec"])
def test_what_is_no_number_fails(load, where):
    agreement, nan = load("agreement"), float("nan")
    numbers, holes = torch.tensor([-1.0, -2.0]), torch.tensor([-1.0, nan])
    free, arm = (numbers, holes) if where == "arm" else (holes, numbers)
    failed = agreement.judge(free, free, [{"logprobs": arm}], agreement.Flips(), 1.0)["failed"]
    assert [name.split(" by ")[0] for name in failed] == [
        "mean above 0.01",
        "forced worst above 0.1",
        "likelihood moved",
    ]


def test_a_tie_that_is_no_number_is_beyond(load):
    flips = load("agreement").Flips()
    flips.add("rows", 4, choice([0.0, float("nan")]))
    assert flips.total("beyond") == 1


def test_the_likelihood_may_move_by_what_rounding_moves_it_and_never_far(load):
    limit = load("agreement").likelihood_limit
    assert limit([0.0003, -0.0004, 0.0, 0.0]) == pytest.approx(4 * 0.00025)
    assert limit([-0.0004]) == pytest.approx(0.0016), "the sign of a move does not matter"
    assert limit([0.01, 0.01]) == pytest.approx(0.002), "noise lifts the limit no further"
    assert limit([0.0, 0.0]) == 0


def test_the_page_shows_both_arms_their_flips_and_generated_tokens(load, monkeypatch, tmp_path):
    agreement, prove = load("agreement"), load("prove_ampere")
    flips = agreement.Flips()
    flips.add("rows", 4, choice([0.0, 0.02], surplus=1))
    flips.add("experts", 0, choice([0.0, 0.0]))
    free = torch.tensor([-1.0, -2.0])
    order = [{"logprobs": torch.tensor([-1.0, -2.002])}]
    arms = {
        "plugin": agreement.judge(free, free, [entry(-1.004, -2.0)], flips, 1.0),
        "other order": agreement.judge(free, free, order, agreement.Flips(), 1.0),
    }
    moves = {"other order": -0.0001, "rounding 1": 0.00015}
    limits = {"mean": 0.01, "worst": 0.1, "ties": agreement.TIES, "nll": 0.0005, "times": 4, "moves": moves}
    common = {"ok": True, "wall_s": 1.0, "facts": {}}
    full = {**common, "arms": arms, "nll": 1.5, "limits": limits}
    (tmp_path / "spec-full.json").write_text(json.dumps(full))
    replay = {**common, **replayed(load, monkeypatch, tmp_path, 0.009, full_off=0.0)}
    (tmp_path / "spec-replay.json").write_text(json.dumps(replay))
    page = prove.report(tmp_path)
    assert "| plugin, free | 2 | 0.002 | 0.002 | 0.0036 | 0.00396 | 0.004 |" in page
    assert "| other order, forced | 2 | 0.001 |" in page
    assert "other order, repeated" not in page
    assert "spec 1.5, plugin 1.502 (repeated 1.502), other order 1.501." in page
    assert "differ from spec by 0.0005: 4 times the root mean square" in page
    assert "(other order -0.0001, rounding 1 +0.00015)" in page
    assert "| plugin | rows | 4 | 2 | 1 | 0.02 | 0 | 2 |" in page
    assert "| plugin | all others | 1 layers | | 0 | | | |" in page
    assert "| whole | 3 | 0 | 2 | 1 | 0.009 | 0.009 | 0.5 | 0.5 |" in page
    assert "0.015625 for experts (scores with bias) and 0.0625 for rows" in page
