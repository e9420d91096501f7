"""demo: what it says about agreement is true, and a disagreement fails it."""

import dataclasses
import functools
import sys
from pathlib import Path

import pytest
import torch

from deepinfer_sm80 import hardware, ops
from deepinfer_sm80.cli import COMMANDS, demo, demo_serve, main
from deepinfer_sm80.cli.demo_operators import Step
from deepinfer_sm80.cli.demo_table import Compilation
from deepinfer_sm80.errors import DemoError
from deepinfer_sm80.ops import OPS
from deepinfer_sm80.testing.agreement import compare_with_reference

OP = "mhc_post"
FAKE = Path(__file__).parents[1] / "bench/fake_vllm.py"


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


NEEDS = {"shared_bytes": 66_816, "registers": 255, "spill_bytes": 0}
RESOURCES = [
    {"op": OP, "arch": arch, **NEEDS, "shared_bytes": shared}
    for arch, shared in (("sm_80", 512), ("sm_80", 66_816), ("sm_86", 33_000))
]


class Compiled:
    """In place of the process that compiles every kernel."""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def done(self):
        return False

    def resources(self):
        return RESOURCES


@pytest.fixture
def parts(monkeypatch, tmp_path):
    """The demo with its long parts answered at once; a test changes what one of them says."""
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    right = compare_with_reference(OP, arguments())
    steps = [Step("prefill", 3, "T3-H200", right), *(Step("decode", n, "T1-ctx4", right) for n in (4, 5))]
    monkeypatch.setattr("deepinfer_sm80.cli.demo_operators.walk", lambda directory, device: iter(steps))
    monkeypatch.setattr(demo, "Compilation", Compiled)
    monkeypatch.setattr(demo, "_print_sensitivity", lambda directory, device: None)
    monkeypatch.setattr(demo, "_print_cached", lambda directory: True)
    return steps


def run_demo(directory, capsys):
    code = main(["demo", "--dir", str(directory), "--device", "cpu"])
    return code, capsys.readouterr().out


def test_what_it_ends_with(parts, tmp_path, capsys):
    code, out = run_demo(tmp_path, capsys)
    assert code == 0
    assert "through the paged caches ..\n" in out, "a dot for each token"
    assert "2 x T1 " in out
    (row,) = [line for line in out.splitlines() if line.startswith(f"   {OP} ") and "66,816" in line]
    assert row.split() == [OP, "bit", "for", "bit", "66,816", "255", "0", "33,000", "255", "0"]
    assert "grouped_output_projection      not run" in out
    assert "a matrix product" in out
    assert "Where to go next" in out


def test_the_commands_it_ends_with_exist_where_they_are_said_to_be(monkeypatch, capsys, tmp_path):
    assert {words.split()[0] for words, _ in demo.NEXT} <= set(COMMANDS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(tmp_path / ".venv/bin/deepinfer-sm80"), "demo"])
    for found, command in ((None, ".venv/bin/deepinfer-sm80"), ("/usr/bin/deepinfer-sm80", "deepinfer-sm80")):
        monkeypatch.setattr(demo.shutil, "which", lambda name, found=found: found)
        demo._print_next()
        assert f"   {command} doctor  " in capsys.readouterr().out


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_disagreement_is_shown_and_fails(parts, tmp_path, capsys, phase):
    found = parts[0].found
    wrong = dataclasses.replace(found, agrees=False, detail="mhc_post.out: worst element 9 ulp")
    parts.append(Step(phase, 6, "T3", wrong))
    code, out = run_demo(tmp_path, capsys)
    assert code == 1
    assert "mhc_post T3: mhc_post.out: worst element 9 ulp" in out
    assert f"{OP:30} DISAGREES" in out
    assert "1 disagree" in out


def test_caches_that_change_a_result_fail(parts, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(demo, "_print_cached", lambda directory: False)
    assert run_demo(tmp_path, capsys)[0] == 1


def test_a_compiler_that_fails_is_reported(monkeypatch, capsys, tmp_path, parts):
    monkeypatch.setattr(demo, "Compilation", Compilation)
    monkeypatch.setattr("deepinfer_sm80.cli.demo_table.ARCHITECTURES", {"sm_80": "5.2"})
    assert main(["demo", "--dir", str(tmp_path), "--device", "cpu"]) == 2
    assert "stopped while compiling the kernels" in capsys.readouterr().err


@pytest.fixture
def served(monkeypatch, parts, tmp_path):
    """A machine whose vLLM is the fake one; called with its fault."""

    def here(*options):
        monkeypatch.setattr(demo, "_device", lambda choice: "cuda")
        monkeypatch.setattr("deepinfer_sm80.cli.doctor.plugin_decision", lambda: (True, "compute capability 8.0"))
        monkeypatch.setattr("deepinfer_sm80.cli.doctor.verdict", lambda: ("vLLM would serve", True))
        # the model and the flags of vllm serve come after it, and its parser leaves them alone
        command = (sys.executable, str(FAKE), *options)
        monkeypatch.setattr("deepinfer_sm80.cli.demo_serve.serve_and_ask", functools.partial(ask, command=command))
        return main(["demo", "--dir", str(tmp_path)])

    ask = demo_serve.serve_and_ask
    return here


def test_the_checkpoint_is_served_and_asked(served, capsys):
    assert served() == 0
    out = capsys.readouterr().out
    assert "/v1/completions: 16 tokens, log-probabilities -1.01 to -1.00" in out
    assert "/v1/chat/completions: 16 tokens" in out


@pytest.mark.parametrize(
    ("fault", "said"),
    [("nan", "not finite: [None]"), ("minus-infinity", "not finite: [-9999.0]"), ("short", "15 log-")],
)
def test_a_wrong_answer_ends_the_demo(served, capsys, fault, said):
    assert served("--fault", fault) == 2
    assert said in capsys.readouterr().err


def test_a_server_that_dies_is_reported_with_its_log(served, capsys):
    assert served("--fault", "unheard-of") == 2
    err = capsys.readouterr().err
    assert "vllm serve ended with exit code 2" in err
    assert "invalid choice" in err


@pytest.mark.parametrize("package", ["torch", "triton"])
def test_what_is_missing_is_said_before_anything_is_written(monkeypatch, capsys, tmp_path, package):
    monkeypatch.setattr("deepinfer_sm80.cli.needs.find_spec", lambda name: None if name == package else True)
    assert main(["demo", "--dir", str(tmp_path / "new")]) == 2
    assert f"demo needs {package}, which is not installed" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_a_gpu_that_is_not_there_is_refused(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(hardware, "torch_sees_a_gpu", lambda: False)
    assert main(["demo", "--dir", str(tmp_path / "new"), "--device", "cuda"]) == 2
    assert "torch sees no CUDA GPU" in capsys.readouterr().err


@pytest.mark.slow
def test_whole_demo(capsys):
    """Writes the tiny checkpoint (about 1 GB) and walks through every operator: two minutes on two cores."""
    assert main(["demo", "--device", "cpu"]) == 0
    out = capsys.readouterr().out
    assert {op for op in OPS if f"   {op} " in out} == set(OPS), "every operator is shown"
    assert "every operator agrees with its reference" in out
    assert "cached = full, bit for bit" in out


@pytest.mark.parametrize("fault", [TimeoutError("timed out"), ConnectionResetError("reset"), ValueError("no JSON")])
def test_a_server_that_does_not_answer_is_one_sentence(monkeypatch, fault):
    def fail(*given, **options):
        raise fault

    monkeypatch.setattr(demo_serve.DIRECT, "open", fail)
    with pytest.raises(DemoError, match=f"asking /v1/completions.*{type(fault).__name__}: {fault}"):
        demo_serve._ask("http://127.0.0.1:1", "completions", {})
