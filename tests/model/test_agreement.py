"""The proof's stages with the specification itself, on arms that it makes in another order of sums."""

import importlib
import sys
from pathlib import Path

import pytest
import torch

from deepinfer_sm80.model import sensitivity
from deepinfer_sm80.model.choices import Choices
from deepinfer_sm80.model.replay import StepMode

SERVING = Path(__file__).parents[2] / "benchmarks/serving"
PROMPTS = [[(i * i * step) % 1000 + 5 for i in range(length)] for step, length in ((37, 40), (41, 12))]
LONG = [(i * i * 7) % 1000 + 5 for i in range(260)]
NEW = 4


@pytest.fixture(scope="module")
def agreement():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(SERVING))
        patch.delitem(sys.modules, "agreement", raising=False)
        yield importlib.import_module("agreement")


@pytest.fixture(scope="module")
def models(agreement, choosy):
    made = {False: choosy(), True: choosy(bounded_replay=True)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(agreement, "specification", lambda model, bounded_replay=False: made[bounded_replay])
        yield made


def recorded(mask):
    return torch.where(mask, torch.arange(mask.shape[1]), -1).sort(-1).values[:, -8:].to(torch.int32)


@pytest.fixture(scope="module")
def arm(agreement, models):
    """What logprobs-ARM saves."""
    entries = []
    with torch.no_grad(), sensitivity.other_order():
        for prompt in PROMPTS:
            seen = Choices()
            logprobs = models[False].prompt_logprobs(prompt, seen)
            experts, rows = ({k: recorded(v[0].own) for k, v in found.items()} for found in (seen.experts, seen.rows))
            experts = {k: v[:, -3:] for k, v in experts.items()}
            entries.append(
                {"prompt": prompt, "logprobs": logprobs, "repeated": logprobs, "experts": experts, "topk": rows}
            )
    return entries


def save(out, plugin, stock):
    torch.save(plugin, out / "logprobs-plugin.pt")
    torch.save(stock, out / "logprobs-stock.pt")
    return out


def changed(arm, name, change):
    """A copy of the arm with ``change`` applied to the first prompt's ``name``."""
    first = dict(arm[0])
    value = first[name]
    first[name] = {k: v.clone() for k, v in value.items()} if isinstance(value, dict) else value.clone()
    change(first[name])
    return [first, *arm[1:]]


def test_another_order_changes_results_and_is_taken_back(agreement, models):
    with torch.no_grad():
        before = models[False].prompt_logprobs(PROMPTS[1])
        with sensitivity.other_order():
            other = models[False].prompt_logprobs(PROMPTS[1])
        assert torch.equal(models[False].prompt_logprobs(PROMPTS[1]), before)
    assert 0 < (other - before).abs().mean() < 0.05


def test_an_arm_that_only_rounds_otherwise_agrees(agreement, arm, tmp_path, monkeypatch):
    monkeypatch.setattr(agreement, "MEAN", 0.05)  # a narrow model rounds more
    found = agreement.spec_full(tmp_path, save(tmp_path, arm, arm))
    assert found["arms"]["plugin"]["failed"] == []
    assert found["ok"] is True
    assert found["facts"]["tokens"] == 50
    assert found["arms"]["plugin"]["repeated"]["largest"] == 0
    layers = {(flip["kind"], flip["layer"]): flip["queries"] for flip in found["arms"]["stock"]["flips"]}
    assert layers == {**{("experts", layer): 52 for layer in range(4)}, **{("rows", k): 52 for k in (1, 2, 3)}}
    assert found["arms"]["plugin"]["nll"] == found["arms"]["other order"]["nll"] != found["nll"]
    assert found["arms"]["plugin"]["forced"] == found["arms"]["other order"]["forced"]
    moves = found["limits"]["moves"]
    assert list(moves) == ["other order", "rounding 1", "rounding 2", "rounding 3"]
    assert len(set(moves.values())) == 4
    assert all(moves.values())


def test_an_expert_that_no_rounding_explains_fails_the_arm(agreement, arm, tmp_path, monkeypatch):
    monkeypatch.setattr(agreement, "MEAN", 0.05)

    def other(experts):
        experts[2][30] = torch.tensor([e for e in range(6) if e not in experts[2][30]])

    found = agreement.spec_full(tmp_path, save(tmp_path, changed(arm, "experts", other), arm))
    assert found["ok"] is False
    assert "a flip beyond its tie margin" in found["arms"]["plugin"]["failed"]
    flips = {(f["kind"], f["layer"]): f for f in found["arms"]["plugin"]["flips"]}
    assert flips["experts", 2]["beyond"] == 1
    assert found["arms"]["stock"]["failed"] == []


def test_either_arm_can_fail(agreement, arm, tmp_path, monkeypatch):
    """One log-probability of vLLM's own path that is off by 0.3 is seen in its row, and fails the stage."""
    monkeypatch.setattr(agreement, "MEAN", 0.05)

    def off(logprobs):
        logprobs[3] += 0.3

    found = agreement.spec_full(tmp_path, save(tmp_path, arm, changed(arm, "logprobs", off)))
    assert found["ok"] is False
    assert found["arms"]["plugin"]["failed"] == []
    assert "forced worst above 0.1" in found["arms"]["stock"]["failed"]
    assert found["arms"]["stock"]["free"]["largest"] > 0.25
    assert found["arms"]["stock"]["forced"]["largest"] > 0.25


def test_rows_beyond_the_candidates_fail_the_plugin(agreement, arm, tmp_path, monkeypatch):
    monkeypatch.setattr(agreement, "MEAN", 0.05)
    total = agreement.Flips.total
    monkeypatch.setattr(agreement.Flips, "total", lambda self, name: 1 if name == "surplus" else total(self, name))
    found = agreement.spec_full(tmp_path, save(tmp_path, arm, arm))
    assert found["arms"]["plugin"]["failed"] == ["rows beyond the candidates"]
    assert found["ok"] is False


def test_the_likelihoods_limit_is_that_of_the_moves(agreement, arm, tmp_path, monkeypatch):
    monkeypatch.setattr(agreement, "MEAN", 0.05)
    monkeypatch.setattr(agreement, "LIKELIHOOD", 1.0)
    found = agreement.spec_full(tmp_path, save(tmp_path, arm, arm))
    moves = found["limits"]["moves"].values()
    assert found["limits"]["nll"] == pytest.approx(4 * (sum(m * m for m in moves) / 4) ** 0.5, abs=3e-5)
    assert 0 < found["limits"]["nll"] < 0.05


def test_files_of_older_stages_are_refused(agreement, arm, tmp_path):
    old = [{k: v for k, v in entry.items() if k != "prompt"} for entry in arm]
    with pytest.raises(AssertionError, match=r"logprobs-stock.pt holds no prompts.*--again"):
        agreement.spec_full(tmp_path, save(tmp_path, arm, old))
    blind = [{**entry, "topk": {}} for entry in arm]
    with pytest.raises(AssertionError, match=r"logprobs-plugin.pt holds no choices of experts or rows"):
        agreement.spec_full(tmp_path, save(tmp_path, blind, arm))
    with pytest.raises(AssertionError, match="different prompts"):
        agreement.spec_full(tmp_path, save(tmp_path, arm, arm[::-1]))


def serve(model, prompt, chunks, state, cached=0):
    """A stand-in for vLLM's default path, eager: what ``generated.record`` saves."""
    steps, tokens, logprobs = [], [], []

    def run(ids):
        start, prefill = state.length, state.length < len(prompt)
        done = model.step(ids, state, StepMode())
        step = {"computed": start, "scheduled": len(ids), "graph": "eager", "padded": len(ids), "prefill": prefill}
        steps.append({**step, "replay_start": state.replay_start, "trimmed": not bool(done.kept.all())})
        return model.logits(done.hidden[-1:]).float().log_softmax(-1)[0]

    for chunk in chunks:
        spread = run(prompt[state.length : state.length + chunk])
    for number in range(NEW):
        tokens.append(int(spread.argmax()))
        logprobs.append(float(spread.max()))
        if number < NEW - 1:
            spread = run(tokens[-1:])
    return {
        "prompt": prompt, "tokens": tokens, "logprobs": torch.tensor(logprobs), "cached": cached, "steps": steps
    }  # fmt: skip


@pytest.fixture(scope="module")
def runs(agreement, models):
    """A prompt in one chunk and one that hits its first 256 tokens; the prompt in two chunks."""
    model, made = models[True], {}
    with torch.no_grad(), sensitivity.other_order():
        donor = model.new_state()
        made["whole"] = [serve(model, LONG, [260], donor)]
        hit, longer = donor.hit(256), LONG[:258] + PROMPTS[1]
        made["whole"].append(serve(model, longer, [len(longer) - hit.length], hit, cached=256))
        made["chunks"] = [serve(model, LONG, [131, 129], model.new_state())]
    return made


def save_runs(out, runs):
    for run, requests in runs.items():
        torch.save(requests, out / f"generated-{run}.pt")
    return out


def test_generated_tokens_agree_when_the_specification_takes_the_same_steps(agreement, models, runs, tmp_path):
    found = agreement.spec_replay(tmp_path, save_runs(tmp_path, runs))
    assert found["ok"] is True
    assert found["facts"]["tokens"] == 3 * NEW
    assert found["facts"]["mean"] < 0.01
    assert 3 * found["facts"]["mean"] < found["facts"]["mean_without_replay"], "the replay is noticed"
    rows = {(row["run"], row["cached"]): row for row in found["requests"]}
    assert rows["whole", 0]["chunks"] == "260"
    assert rows["chunks", 0]["chunks"] == "131 129"
    assert rows["chunks", 0]["trimmed"] == 2
    assert rows["whole", 256]["chunks"] == "142"


def test_the_same_steps_in_the_same_order_of_sums_are_the_same_bits(agreement, models, runs):
    states = []
    with torch.no_grad(), sensitivity.other_order():
        for request in runs["whole"]:
            assert torch.equal(agreement.stepwise(models[True], request, states), request["logprobs"])


def test_a_step_that_was_trimmed_otherwise_is_an_error(agreement, models, runs):
    request = dict(runs["whole"][0])
    request["steps"] = [dict(request["steps"][0], trimmed=False), *request["steps"][1:]]
    with torch.no_grad(), pytest.raises(AssertionError, match="trims otherwise than vLLM"):
        agreement.stepwise(models[True], request, [])


def test_a_prefix_nobody_computed_is_an_error(agreement, models, runs):
    with pytest.raises(AssertionError, match="begins with the 256 tokens"):
        agreement.stepwise(models[True], runs["whole"][1], [])


def test_a_request_that_begins_elsewhere_is_an_error(agreement, models, runs):
    request = dict(runs["whole"][0])
    request["steps"] = [dict(request["steps"][0], computed=5), *request["steps"][1:]]
    with pytest.raises(AssertionError, match="computed 5 tokens before a step, the state 0"):
        agreement.stepwise(models[True], request, [])
