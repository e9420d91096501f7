"""``deepinfer-sm80 verify``: a right operator passes, a wrong one is named, and the exit code says which."""

import json
import warnings

import pytest
import torch

from deepinfer_sm80 import cli, ops
from deepinfer_sm80.testing import verification

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
