"""``deepinfer-sm80 verify``: a right operator passes, a wrong one is named, and the exit code says which."""

import json
import re
import subprocess
import warnings

import pytest
import torch

from deepinfer_sm80 import cli, hardware, ops
from deepinfer_sm80.bench import lowering, report
from deepinfer_sm80.hardware import Gpu
from deepinfer_sm80.testing import verification
from deepinfer_sm80.testing.verification import Verdict

QUICK = ("mhc_post", "engram_lookup", "grouped_output_projection")


def test_table_and_exit_code(capsys):
    assert cli.main(["verify", *(f"--op={op}" for op in QUICK)]) == 0
    out = capsys.readouterr().out
    assert "3 of 3 operators keep their contract here" in out
    assert [line.split()[0] for line in out.splitlines()[3:6]] == list(QUICK)


def test_an_overflow_that_the_reference_has_too_is_no_warning():
    """engram_lookup's cases hold scales of 2^127; a GPU says nothing of the infinities, nor does the interpreter."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        found = verification.verify("engram_lookup", "cuda" if torch.cuda.is_available() else "cpu")
    assert found.ok, found.detail


@pytest.mark.parametrize("commit", ["abc1234", None])
def test_json_names_lowering_and_commit(capsys, monkeypatch, commit):
    """A result without its commit and the code that it ran says nothing later."""
    gpu, entered = Gpu("NVIDIA H200", (9, 0), 0), []
    monkeypatch.setattr(hardware, "torch_sees_a_gpu", lambda: True)
    monkeypatch.setattr(hardware, "current_gpu", lambda: gpu)
    monkeypatch.setattr(lowering, "enter", lambda wanted, real: entered.append((wanted, real)) or "sm80")
    monkeypatch.setattr(report, "source_commit", lambda: commit)
    right = Verdict("mhc_post", "kernel", 5, True, True, "within 1 ulp", 0.1)
    monkeypatch.setattr(verification, "verify", lambda op, device: right)
    assert cli.main(["verify", "--op=mhc_post", "--json", "--lowering=sm80"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["device"], found["lowering"], found["commit"]) == ("NVIDIA H200", "sm80", commit)
    assert entered == [("sm80", (9, 0))]
    assert cli.main(["verify", "--op=mhc_post", "--json", "--commit=def5678"]) == 0
    assert json.loads(capsys.readouterr().out)["commit"] == "def5678"
    assert cli.main(["verify", "--op=mhc_post"]) == 0
    assert capsys.readouterr().out.startswith("NVIDIA H200, lowering sm80\n")


def test_a_commit_is_that_of_our_checkout_or_none(monkeypatch, tmp_path):
    """An installed package may lie inside somebody else's repository."""
    identity = ("-c", "user.name=x", "-c", "user.email=x")
    file = tmp_path / "report.py"
    monkeypatch.setattr(report, "__file__", str(file))
    file.write_text("1")
    assert report.source_commit() is None, "no repository"
    for words in (("init", "-q"), (*identity, "commit", "-q", "--allow-empty", "-m", "theirs")):
        subprocess.run(["git", *words], cwd=tmp_path, check=True)
    assert report.source_commit() is None, "a repository that does not hold it"
    for words in (("add", "report.py"), (*identity, "commit", "-q", "-m", "ours")):
        subprocess.run(["git", *words], cwd=tmp_path, check=True)
    assert re.fullmatch("[0-9a-f]{40}", report.source_commit())
    file.write_text("2")
    assert re.fullmatch(r"[0-9a-f]{40}\+changes", report.source_commit())


def test_json_and_a_wrong_result(capsys, monkeypatch):
    right = ops.kernel("mhc_post")

    def wrong(**kwargs):
        out = right(**kwargs)
        out.view(-1)[:1] += 1.0
        return out

    monkeypatch.setattr(ops, "kernel", lambda op: wrong)
    assert cli.main(["verify", "--op=mhc_post", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] is False
    assert found["operators"][0]["ok"] is False
    assert "(0, 0, 0)" in found["operators"][0]["detail"]


def test_a_changed_input_is_a_fault(monkeypatch):
    right = ops.kernel("mhc_post")

    def untidy(**kwargs):
        out = right(**kwargs)
        kwargs["x"].view(-1)[:1] += 1.0
        return out

    monkeypatch.setattr(ops, "kernel", lambda op: untidy)
    found = verification.verify("mhc_post", "cuda" if torch.cuda.is_available() else "cpu")
    assert not found.ok
    assert found.detail.endswith("wrote outside its results: x")


def test_unknown_operator(capsys):
    assert cli.main(["verify", "--op=sparse_mla"]) == 2
    assert "No operator 'sparse_mla'. Known operators: engram_lookup" in capsys.readouterr().err


@pytest.mark.slow
def test_every_operator(capsys):
    """Without a GPU some seconds an operator in the interpreter; with one, everything."""
    assert cli.main(["verify", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["op"] for row in found["operators"]] == list(ops.OPS)
    assert all(row["cases"] for row in found["operators"])
