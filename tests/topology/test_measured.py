"""The measured times that the planner shows are the committed ones, and a card without any is told so."""

import dataclasses
import json
import re
from pathlib import Path

import pytest

from deepinfer_sm80 import cli
from deepinfer_sm80.topology import measured, page, roofline
from deepinfer_sm80.topology.cluster import KNOWN, LINKS, Link, cluster, same_card

ROOT = Path(__file__).parents[2]
COMMITTED = {
    path.stem.removesuffix("-times"): content
    for path in sorted((ROOT / "benchmarks/results").glob("*/prove_multi_gpu/*-times.json"))
    if (content := json.loads(path.read_text(encoding="utf-8"))).get("ok")
}
A100 = dataclasses.replace(measured.ROWS[0], gpu="NVIDIA A100-SXM4-80GB", decode_ms=7.125, prefill_ms=300.0)


def key(row):
    return (
        (f"pp{row.pp}" if row.pp > 1 else f"tp{row.tp}") + ("-ep" if row.ep > 1 else "") + ("-ring" if row.way else "")
    )


def test_the_rows_are_the_committed_ones():
    assert COMMITTED
    assert {key(row) for row in measured.ROWS} == set(COMMITTED)
    for row in measured.ROWS:
        content = COMMITTED[key(row)]
        facts, names = content["facts"], ("gpu", "lowering", "checkpoint", "commit")
        assert tuple(content[name] for name in names) == tuple(getattr(row, name) for name in names)
        assert (facts["decode_ms_batch_1"], facts["prefill_ms_2048"]) == (row.decode_ms, row.prefill_ms)


def test_the_constants_of_links_are_those_that_were_measured():
    """They are rounded as the file has them."""
    found = [
        json.loads(path.read_text(encoding="utf-8")) for path in (ROOT / "benchmarks/results").glob("*/*/links.json")
    ]
    (run,) = [content for content in found if content["ok"]]
    pair = run["constants"]["all_reduce"]
    assert (LINKS["nvlink"].latency, LINKS["nvlink"].rate) == (pair["latency_us"], pair["gb_s"])
    assert run["gpu"] in LINKS["nvlink"].source
    assert pytest.approx(run["constants"]["hop"]["latency_us"], abs=0.5) == 1e6 * roofline.HAND_OVER
    assert {link.source for name, link in LINKS.items() if name != "nvlink"} == {"assumed"}


@pytest.mark.parametrize("row", measured.ROWS, ids=key)
def test_the_estimates_are_those_that_were_stored_beside_the_times(row, monkeypatch):
    """The formulas gave the same when the times were taken: whoever changes them sees what that does to real times.
    Link and hand-over were assumed then."""
    monkeypatch.setitem(LINKS, "nvlink", Link("nvlink", 200.0, 12.0))
    monkeypatch.setattr(roofline, "HAND_OVER", 12e-6)
    planned = COMMITTED[key(row)]["planned"]
    assert row.estimated() == pytest.approx((planned["decode_ms_batch_1"], planned["prefill_ms_2048"]), rel=1e-6)


def test_a_plan_says_that_nothing_was_measured_on_the_card_and_what_was_elsewhere(capsys):
    cli.main(["plan", "--gpus", "8xA100-80GB"])
    out = capsys.readouterr().out
    assert "nothing here was measured on these GPUs" in out
    assert "\nMeasured: no layout was measured on A100 or any other Ampere GPU. Elsewhere (estimated" in out
    assert "  NVIDIA H200, layer checkpoint, TP1: 1.89 / 2.95, 159 / 53\n" in out
    cli.main(["plan", "--gpus", "8xA100-80GB", "--json"])
    found = json.loads(capsys.readouterr().out)["estimates"]["measured"]
    assert found["on_these_gpus"] is False
    assert [row["decode_ms"] for row in found["rows"]] == [row.decode_ms for row in measured.ROWS]
    assert found["rows"][0]["estimated_decode_ms"] == 1.894


def test_a_row_of_the_card_stands_in_its_plan(capsys, monkeypatch):
    monkeypatch.setattr(measured, "ROWS", (*measured.ROWS, A100))
    for function in (measured.of, measured.none_of, measured.lines, measured.as_json):
        monkeypatch.setattr(function, "__defaults__", (measured.ROWS,))
    cli.main(["plan", "--gpus", "8xA100-80GB"])
    out = capsys.readouterr().out
    assert "what was measured on this card stands below" in out
    assert re.search(
        r"\nMeasured on A100 \(estimated.*\n  NVIDIA A100-SXM4-80GB, layer checkpoint, TP1: .* / 7.12, ", out
    )
    assert "NVIDIA H200, layer" not in out
    assert measured.as_json(cluster("8xA100-80GB").gpu)["on_these_gpus"] is True
    cli.main(["plan", "--gpus", "8xA100-40GB"])
    assert "no layout was measured on A100." in measured.lines(cluster("8xA100-40GB").gpu)[0], "another size"
    assert "No row is of an Ampere GPU" not in page.page()


@pytest.mark.parametrize(
    ("said", "name", "memory"),
    [
        ("NVIDIA A100-SXM4-80GB", "A100", 80),
        ("NVIDIA A100-PCIE-40GB", "A100", 40),
        ("NVIDIA A100 80GB PCIe", "A100", 80),
        ("NVIDIA GeForce RTX 3090", "RTX3090", 24),
        ("NVIDIA GeForce RTX 3090 Ti", "RTX3090Ti", 24),
        ("NVIDIA RTX A6000", "A6000", 48),
        ("NVIDIA A10", "A10", 24),
        ("NVIDIA A40", "A40", 48),
    ],
)
def test_names_of_cuda_are_the_cards_of_the_planner(said, name, memory):
    assert [(gpu.name, gpu.memory) for gpu in KNOWN if same_card(said, gpu)] == [(name, memory)]


def test_what_the_page_says_of_the_rows_is_so():
    found = {key(row): (row.estimated(), (row.decode_ms, row.prefill_ms)) for row in measured.ROWS}
    assert all(step < taken and chunk > prompt for (step, chunk), (taken, prompt) in found.values())
    (one, _), (one_taken, _) = found["tp1"]
    (two, _), (two_taken, _) = found["tp2"]
    assert two < one
    assert two_taken > one_taken


def test_another_card_is_none_of_the_planners():
    assert not any(same_card(said, gpu) for said in ("NVIDIA H200", "NVIDIA A16", "") for gpu in KNOWN)
