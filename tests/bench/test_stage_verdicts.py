"""Verdicts of the serving stages where one wrong thing stands among right ones: it must not be overlooked."""

import importlib
import json
import math
import sys
import types
from pathlib import Path

import pytest
import torch

from deepinfer_sm80.model.choices import Choice

SERVING = Path(__file__).parents[2] / "benchmarks/serving"
OWN = ("agreement", "comparison", "generated", "http_stages", "prove_multi_gpu", "recording", "stages")
Space = types.SimpleNamespace


@pytest.fixture
def load(monkeypatch):
    monkeypatch.syspath_prepend(str(SERVING))
    for name in OWN:
        monkeypatch.delitem(sys.modules, name, raising=False)
    return importlib.import_module


def state(length, name):
    return Space(length=length, hit=lambda cached: f"{cached} of {name}")


def test_a_prefix_hit_takes_the_first_request_that_begins_so_and_was_computed_so_far(load):
    begin, ids = load("agreement").begin, [1, 2, 3, 4, 5]
    known = [([1, 2, 9, 4], state(4, "other")), ([1, 2, 3], state(2, "short")), ([1, 2, 3, 7], state(4, "right"))]
    assert begin(Space(), ids, 3, known) == "3 of right"
    assert begin(Space(new_state=lambda: "empty"), ids, 0, known) == "empty"
    for few in (known[:1], known[1:2]):
        with pytest.raises(AssertionError, match="no earlier request begins with the 3 tokens"):
            begin(Space(), ids, 3, few)


class Spec:
    device, config = "cpu", None

    def prompt_logprobs(self, prompt):
        return torch.full((len(prompt) - 1,), -1.0)


def full(load, monkeypatch, out, **wrong):
    """``spec_full`` on arms that agree to the bit, but for what ``wrong`` changes in an arm's only entry."""
    agreement = load("agreement")
    entry = {"prompt": [1, 2, 3], "logprobs": torch.tensor([-1.0, -1.0]), "experts": {0: 0}, "topk": {0: 0}}
    for arm in agreement.ARMS:
        torch.save([{**entry, "arm": arm, **wrong.get(arm, {})}], out / f"logprobs-{arm}.pt")

    def forced_run(spec, entry, flips):
        one, no = torch.zeros(1), torch.zeros(1, 1, dtype=torch.bool)
        flips.add("rows", 0, Choice(no, no, one, one + entry.get("tie", 0), one.long() + entry.get("surplus", 0)))
        return entry["logprobs"] + entry.get("forced", 0)

    monkeypatch.setattr(agreement, "specification", lambda model: Spec())
    monkeypatch.setattr(agreement, "watched_run", lambda spec, prompt: entry)
    monkeypatch.setattr(agreement, "forced_run", forced_run)
    return agreement.spec_full(out, out)


@pytest.mark.parametrize("arm", ["plugin", "stock"])
@pytest.mark.parametrize(
    ("wrong", "failed"),
    [
        ({"forced": 0.2}, "forced worst above 0.1"),
        ({"tie": 0.1}, "a flip beyond its tie margin"),
        ({"logprobs": torch.tensor([-0.99, -1.01])}, ""),
        ({"logprobs": torch.tensor([-0.98, -1.02])}, "mean above 0.01"),
        ({"logprobs": torch.tensor([-1.0, -1.001])}, "likelihood moved by 0.00050"),
    ],
)
def test_one_arm_that_fails_fails_the_stage(load, monkeypatch, tmp_path, arm, wrong, failed):
    found = full(load, monkeypatch, tmp_path, **{arm: wrong})
    other = "stock" if arm == "plugin" else "plugin"
    assert found["arms"][arm]["failed"] == ([failed] if failed else [])
    assert found["arms"][other]["failed"] == found["arms"]["other order"]["failed"] == []
    assert found["ok"] is not bool(failed)


@pytest.mark.parametrize(("arm", "failed"), [("plugin", ["rows beyond the candidates"]), ("stock", [])])
def test_rows_beyond_the_candidates_are_the_plugins_fault_only(load, monkeypatch, tmp_path, arm, failed):
    """They are counted for both arms."""
    found = full(load, monkeypatch, tmp_path, **{arm: {"surplus": 1}})
    assert [name for row in found["arms"].values() for name in row["failed"]] == failed
    assert found["ok"] is not bool(failed)


@pytest.mark.parametrize("arm", ["plugin", "stock"])
def test_an_arm_of_other_prompts_is_refused(load, monkeypatch, tmp_path, arm):
    with pytest.raises(AssertionError, match="different prompts"):
        full(load, monkeypatch, tmp_path, **{arm: {"prompt": [1, 2, 4]}})


def saved(logprobs, topk):
    rows = len(logprobs)
    chosen = {"experts": {0: torch.zeros(rows, 2)}, "topk": {2: topk}, "margins": {0: torch.ones(rows)}}
    return [{"logprobs": torch.tensor(logprobs), **chosen}]


@pytest.mark.parametrize(("off", "ok"), [(0.0199, True), (0.0201, False)])
def test_two_arms_may_differ_by_two_hundredths(load, tmp_path, off, ok):
    picked = torch.zeros(2, 4)
    other = picked.clone()
    other[1] = 7
    torch.save(saved([-1.0, -2.0], picked), tmp_path / "logprobs-plugin.pt")
    torch.save(saved([-1.0, -2.0 - 2 * off], other), tmp_path / "logprobs-stock.pt")
    found = load("comparison").compare(tmp_path, tmp_path)
    assert found["ok"] is ok
    assert (found["facts"]["rows_with_a_flip"], found["facts"]["mean_without_flip"]) == ("50.0%", 0.0)
    assert found["largest"][0]["topk_flipped_in_layers"] == [2]


def test_behind_the_token_where_two_texts_part_nothing_is_compared(load):
    """They are other texts from there on."""
    top = [[(4, -1.0), (5, -1.01)], [(5, -1.0), (6, -1.01)], [(8, -1.0), (9, -1.01)]]
    here = {"prompt": [1], "tokens": [4, 5, 8], "logprobs": [-1.0, -1.0, -1.0], "top": top}
    served = {"prompt": [1], "tokens": [4, 6, 300], "logprobs": [-1.0, -7.0, -9.0]}
    found = load("http_stages").judge([served], [here])
    assert (found["ok"], found["same"], found["largest_logprob_difference"]) == (True, 0, 0.0)
    served["logprobs"][0] = -1.5
    assert load("http_stages").judge([served], [here])["ok"] is False


@pytest.mark.parametrize("wrong", ["tp2", "pp2"])
def test_a_layout_that_differs_is_not_forgiven_for_another_that_agrees(load, tmp_path, wrong):
    for name in ("tp1", "tp2", "pp2"):
        logprobs = [[-1.0, -2.1]] if name == wrong else [[-1.0, -2.0]]
        (tmp_path / f"{name}.json").write_text(json.dumps({"ok": True, "tokens": [[5]]}))
        (tmp_path / f"{name}.values").write_text(json.dumps({"prompt_logprobs": logprobs, "top": [[[-1.0, -3.0]]]}))
    found = load("prove_multi_gpu").compare(tmp_path)
    assert found["rows"].keys() == {"tp2", "pp2"}
    assert found["ok"] is False


@pytest.mark.parametrize(("last", "refused"), [(4, False), (3, True), (5, True)])
def test_steps_must_end_with_the_last_token_but_one(load, last, refused):
    """A prompt of three and two tokens: four are computed."""
    recording, generated = load("recording"), load("generated")
    schedule = recording.Schedule()
    step = {"request": "1-ab", "prefill": True, "graph": "eager", "padded": 3, "replay_start": 0, "trimmed": False}
    schedule.steps = [{**step, "computed": 0, "scheduled": 3}]
    schedule.steps += [{**step, "computed": 3, "scheduled": last - 3}] if last > 3 else []
    done = Space(token_ids=[1, 2], logprobs=[{1: Space(logprob=-1.0)}, {2: Space(logprob=-1.0)}])
    output = Space(request_id="1", prompt_token_ids=[7, 7, 7], outputs=[done], num_cached_tokens=0)
    if refused:
        with pytest.raises(AssertionError, match="must follow each other up to the last token but one"):
            generated.request_of(output, schedule)
    else:
        assert len(generated.request_of(output, schedule)["steps"]) == 2


def answer(tokens, logprob=-1.0, cached=1):
    steps = [{token: Space(logprob=-1.0), 99: Space(logprob=logprob)} for token in tokens]
    return Space(outputs=[Space(token_ids=tokens, logprobs=steps)], num_cached_tokens=cached)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_outputs_are_complete_and_every_log_probability_a_number(load, value):
    stages = load("stages")
    assert stages.require_finite([answer([1, 2]), answer([3, 4])], 2) == 8
    with pytest.raises(AssertionError, match="1 tokens instead of 2"):
        stages.require_finite([answer([1, 2]), answer([3])], 2)
    with pytest.raises(AssertionError, match=f"log-probability {value}"):
        stages.require_finite([answer([1, 2]), answer([3, 4], value)], 2)


class Engine:
    """Answers ``tokens`` of each call in turn."""

    prompts = tuple([[n] * 3000 for n in range(8)])

    def __init__(self, runs, cached=1920):
        self.runs, self.cached, self.llm = iter(runs), cached, Space(reset_prefix_cache=lambda: None)

    def generate(self, prompts, tokens=64, **options):
        first = next(self.runs)
        return [answer([first] * 64, cached=self.cached) for _ in prompts]

    def result(self, **facts):
        return {"facts": facts}


def test_a_greedy_run_that_is_repeated_gives_the_same_tokens(load):
    found = load("stages")._generates(Engine([1, 2, 2, 3]))
    assert found["tokens"] == [[2] * 64] * 8
    assert found["facts"]["cached_tokens"] == 1920
    assert found["facts"]["logprobs_finite"] == (1 + 8 + 1) * 128
    with pytest.raises(AssertionError, match=r"gave other tokens, first at \[0, 0"):
        load("stages")._generates(Engine([1, 2, 4, 3]))
    with pytest.raises(AssertionError, match="no cached tokens on a shared prefix"):
        load("stages")._generates(Engine([1, 2, 2, 3], cached=0))


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_a_prompts_log_probabilities_are_numbers(load, value):
    def generate(prompts, tokens, prompt_logprobs):
        steps = [None, {5: Space(logprob=-1.0)}, {6: Space(logprob=value)}]
        return [Space(prompt_logprobs=steps)]

    with pytest.raises(AssertionError, match="not finite"):
        load("stages")._prompt_logprobs(Space(generate=generate), [4, 5, 6])
