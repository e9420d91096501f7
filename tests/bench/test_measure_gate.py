"""Which results the gate looks at: every arm's, of the first and the last copy; what it cannot judge leaves no row."""

import importlib.util
from pathlib import Path

import pytest
import torch

from deepinfer_sm80 import ops
from deepinfer_sm80.bench import cases, gate, measure, providers
from deepinfer_sm80.bench.ceilings import Ceilings
from deepinfer_sm80.bench.providers import Arm

spec = importlib.util.spec_from_file_location("fake_device", Path(__file__).with_name("fake_device.py"))
fake_device = importlib.util.module_from_spec(spec)
spec.loader.exec_module(fake_device)

CASE, RIGHT = cases.mhc(2), ops.pytorch("mhc_post")
INSERT = cases.insert(5)


def outcome_of(case, arms, copies=3):
    one = ops.spec(case.op).cost(**case.arguments("cpu", 0)).bytes
    device = fake_device.FakeDevice(l2_bytes=(copies * one) // 3)
    run = measure.Run(device, "native", Ceilings(copy=1e12, dot=1e14), {"commit": "c"}, 3)
    assert len(measure._copies(case, device).arguments) == copies
    return measure.measure(case, run, arms)


def wrong_in(number, good, bad, provider="vllm", **options):
    """An arm that calls ``bad`` for the copy ``number`` in the order of preparation, and ``good`` for the others."""
    prepared = []

    def prepare(kwargs):
        prepared.append(kwargs)
        call = bad if len(prepared) - 1 == number else good
        return lambda: call(**kwargs)

    return Arm(provider, prepare, **options)


def one_off(**kwargs):
    result = RIGHT(**kwargs).clone()
    result[-1, -1, -1] += 1
    return result


@pytest.mark.parametrize("graphed", [True, False])
@pytest.mark.parametrize("number", [0, 2])
def test_a_wrong_result_of_the_first_or_the_last_copy_leaves_no_row(number, graphed):
    arms = [wrong_in(number, RIGHT, one_off, graphed=graphed), wrong_in(None, RIGHT, one_off, "ours")]
    outcome = outcome_of(CASE, arms)
    assert [row["provider"] for row in outcome.rows] == ["ours"]
    assert [item["provider"] for item in outcome.left_out] == ["vllm"]
    assert outcome.left_out[0]["reason"].startswith(f"disagrees: copy {number}: mhc_post.out")


@pytest.mark.parametrize("number", [0, 2])
def test_what_is_not_written_into_the_first_or_the_last_copy_leaves_no_row(number):
    """Although another arm has written the same there."""
    write = ops.pytorch(INSERT.op)
    arms = [wrong_in(number, write, lambda **kwargs: None), wrong_in(None, write, write, "ours")]
    outcome = outcome_of(INSERT, arms)
    assert [row["provider"] for row in outcome.rows] == ["ours"]
    assert outcome.left_out[0]["reason"].startswith(f"disagrees: copy {number}: {INSERT.op}.")


@pytest.mark.parametrize("provider", providers.PROVIDERS)
def test_no_provider_is_above_the_gate(provider):
    """Not the forms that others are compared with either: a wrong one has no time."""
    for options in ({}, {"graphed": False}, {"eager_too": True}):
        outcome = outcome_of(CASE, [wrong_in(0, RIGHT, one_off, provider, **options)], copies=1)
        assert not outcome.rows
        assert [item["provider"] for item in outcome.left_out] == [provider]


def lost(kwargs, result):
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


@pytest.mark.parametrize(
    ("call", "finish", "said"),
    [
        (RIGHT, lost, "an illegal memory access"),
        (lambda **kwargs: (RIGHT(**kwargs), torch.zeros(1)), None, "zip()"),
        (lambda **kwargs: None, None, ""),
    ],
    ids=["raises", "one result too many", "no result"],
)
def test_a_result_that_cannot_be_compared_leaves_no_row(call, finish, said):
    options = {} if finish is None else {"finish": finish}
    arms = [wrong_in(None, call, call, **options), wrong_in(-1, RIGHT, RIGHT, "ours")]
    outcome = outcome_of(CASE, arms)
    assert [row["provider"] for row in outcome.rows] == ["ours"], "the others are judged all the same"
    (item,) = outcome.left_out
    assert item["provider"] == "vllm"
    assert item["reason"].startswith("could not be compared: ")
    assert said in item["reason"]


def test_a_row_that_the_reference_does_not_compute_is_judged_beside_pytorch():
    """The reference computes 8 of 40 rows; which, ``gate.parts`` decides."""
    case = cases.mhc(40)
    (part,) = gate.parts(case.op, case.arguments("cpu", 0))
    unchecked = next(t for t in range(40) if t not in part.select(torch.arange(40)).tolist())

    def off_in_one_row(**kwargs):
        result = RIGHT(**kwargs).clone()
        result[unchecked] += 1
        return result

    outcome = outcome_of(case, [wrong_in(0, RIGHT, off_in_one_row)], copies=1)
    assert not outcome.rows
    assert "mhc_post.out beside PyTorch" in outcome.left_out[0]["reason"]


def test_an_arm_that_spoils_its_input_is_judged_by_what_it_was_given():
    def spoiling(**kwargs):
        kwargs["x"].zero_()
        return RIGHT(**kwargs)

    outcome = outcome_of(CASE, [wrong_in(0, RIGHT, spoiling)], copies=1)
    assert not outcome.rows
    assert outcome.left_out[0]["reason"].startswith("disagrees: copy 0: mhc_post.out")


class OnCuda(torch.Tensor):
    """A tensor that says it lies on a GPU."""

    is_cuda = True


@pytest.mark.parametrize("on_cuda", [True, False])
def test_a_gpus_results_are_held_to_the_tolerance_without_the_interpreters_allowance(on_cuda, monkeypatch):
    bounds = []
    monkeypatch.setattr(gate, "assert_agrees", lambda what, actual, want, bound: bounds.append((what, bound)))
    kwargs = CASE.arguments("cpu", 0)
    result = RIGHT(**kwargs)
    want = gate.expected(CASE.op, kwargs, {"out": result})
    assert gate.disagreement(CASE.op, want, kwargs, result.as_subclass(OnCuda) if on_cuda else result) == ""
    strict = ops.spec(CASE.op).tolerance_of("out")
    bound = strict if on_cuda else strict.interpreted()
    assert bounds == [("mhc_post.out", bound), ("mhc_post.out beside PyTorch", bound)]
    assert strict != strict.interpreted()
