"""What the planner says has run is what the committed results say."""

import json
import re
from pathlib import Path

import pytest

from deepinfer_sm80 import cli
from deepinfer_sm80.topology import ran

ROOT = Path(__file__).parents[2]
PASSED = [
    (path.stem, content)
    for path in sorted((ROOT / "benchmarks/results").glob("*/prove_*/*.json"))
    if (content := json.loads(path.read_text(encoding="utf-8"))).get("ok")
]


def passed(kind):
    """Whether a stage of ``kind`` such as pp2, with graphs as the commands have them, has passed."""
    return any(re.search(rf"(^|-){kind}\d+", name) and "eager" not in name for name, _ in PASSED)


def test_the_facts_are_those_of_the_results():
    assert PASSED
    assert passed("tp"), "the names of the stages are those that are looked for"
    assert "pp2" in {name for name, _ in PASSED}, "two stages, with graphs: the planner ranks pipelines as they are"
    assert passed("dp") == ran.REPLICAS
    assert any(content.get("executor") == "ray" for _, content in PASSED) == ran.RAY
    assert max((content.get("facts") or {}).get("gpus") or 1 for _, content in PASSED) == ran.GPUS


@pytest.mark.parametrize("runs", [False, True])
def test_everything_that_plan_prints_follows_the_facts(capsys, monkeypatch, runs):
    monkeypatch.setattr(ran, "REPLICAS", runs)
    monkeypatch.setattr(ran, "RAY", runs)
    for args in (("--gpus", "16xA40", "--hosts", "2", "--dp", "2"), ("--smallest",), ("--page",)):
        cli.main(["plan", *args])
        out = " ".join(capsys.readouterr().out.split())
        assert (ran.NO_REPLICAS in out) is not runs, args
        assert (f"Ray, which {ran.NEVER}" in out or f"hosts, which {ran.NEVER}" in out) is not runs, args
