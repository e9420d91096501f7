"""demo: what it says about agreement is true, and a disagreement fails it."""

import pytest
import torch

from deepinfer_sm80 import hardware, ops
from deepinfer_sm80.cli import main
from deepinfer_sm80.ops import OPS
from deepinfer_sm80.testing.agreement import compare_with_reference

OP = "mhc_post"


def arguments():
    return dict(dict(ops.spec(OP).cases("cpu"))["T3-H200"])


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")


def test_comparison_of_an_operator():
    kwargs = arguments()
    before = {name: value.clone() for name, value in kwargs.items()}
    found = compare_with_reference(OP, kwargs)
    assert found.agrees
    assert found.seconds > 0
    assert found.values[0].shape == (3, 4, 200)
    assert all(torch.equal(kwargs[name], before[name]) for name in before)


def test_comparison_of_a_fault():
    right = ops.pytorch(OP)

    def wrong(**kwargs):
        out = right(**kwargs)
        out[1, 2, 199] += 1.0
        return out

    found = compare_with_reference(OP, arguments(), wrong)
    assert not found.agrees
    assert "(1, 2, 199)" in found.detail


def test_disagreement_is_shown_and_fails(monkeypatch, capsys, tmp_path):
    wrong = compare_with_reference(OP, arguments())
    wrong = type(wrong)(OP, False, "mhc_post.out: worst element 9 ulp", 0.5, wrong.values, wrong.arguments, {})
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    monkeypatch.setattr("deepinfer_sm80.cli.demo_operators.walk", lambda directory, device: iter([("T3", wrong)]))
    monkeypatch.setattr("deepinfer_sm80.cli.demo._print_sensitivity", lambda directory, device: None)
    monkeypatch.setattr("deepinfer_sm80.cli.demo._print_cached", lambda directory: True)
    assert main(["demo", "--dir", str(tmp_path), "--device", "cpu"]) == 1
    out = capsys.readouterr().out
    assert "DISAGREES" in out
    assert "worst element 9 ulp" in out
    assert "1 disagree" in out


def test_caches_that_change_a_result_fail(monkeypatch, capsys, tmp_path):
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    monkeypatch.setattr("deepinfer_sm80.cli.demo_operators.walk", lambda directory, device: iter(()))
    monkeypatch.setattr("deepinfer_sm80.cli.demo._print_sensitivity", lambda directory, device: None)
    monkeypatch.setattr("deepinfer_sm80.cli.demo._print_cached", lambda directory: False)
    assert main(["demo", "--dir", str(tmp_path), "--device", "cpu"]) == 1


@pytest.mark.parametrize("package", ["torch", "triton"])
def test_what_is_missing_is_said_before_anything_is_written(monkeypatch, capsys, tmp_path, package):
    monkeypatch.setattr("deepinfer_sm80.cli.demo.find_spec", lambda name: None if name == package else True)
    assert main(["demo", "--dir", str(tmp_path / "new")]) == 2
    assert f"demo needs {package}, which is not installed" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_a_gpu_that_is_not_there_is_refused(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(hardware, "torch_sees_a_gpu", lambda: False)
    assert main(["demo", "--dir", str(tmp_path / "new"), "--device", "cuda"]) == 2
    assert "torch sees no CUDA GPU" in capsys.readouterr().err


@pytest.mark.slow
def test_whole_demo(capsys):
    """Writes the tiny checkpoint (about 1 GB) and walks through every operator."""
    assert main(["demo", "--device", "cpu"]) == 0
    out = capsys.readouterr().out
    assert {op for op in OPS if f"   {op} " in out} == set(OPS), "every operator is shown"
    assert "every operator agrees with its reference" in out
    assert "cached = full, bit for bit" in out
