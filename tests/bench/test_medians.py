"""docs/6-benchmarking.md shows medians that were recorded, the arms of a row from one run."""

import importlib.util
import re
import sys
from pathlib import Path

import pytest

from deepinfer_sm80.bench import rows

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/6-benchmarking.md").read_text(encoding="utf-8")
PROVIDERS = ("ours", "vllm", "flashmla", "unfused", "pytorch-graph")


@pytest.fixture(scope="module")
def medians():
    spec = importlib.util.spec_from_file_location("medians", ROOT / "docs/medians.py")
    module = sys.modules["medians"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_in_step(medians):
    assert medians.rendered(PAGE) == PAGE, "run make docs"


def test_every_number_was_recorded_in_the_row_s_run():
    table = re.findall(r"^\| `(\w+)` (\S+) \|(.*)\|$", PAGE, re.MULTILINE)
    recorded = [row for row in rows.read_all(ROOT / "benchmarks/results", rows.ROWS) if row["lowering"] == "sm80"]
    of = {(row["commit"][:7], row["op"], row["case"], row["provider"]): row["p50_us"] for row in recorded}
    assert len(table) >= 76
    assert len({op for op, _, _ in table}) == 18
    for op, case, cells in table:
        *shown, share, commit = (cell.strip() for cell in cells.split("|"))
        assert re.fullmatch(r"\d+\.\d%", share)
        for provider, cell in zip(PROVIDERS, shown, strict=True):
            median = of.get((commit, op, case, provider))
            assert cell == ("" if median is None else f"{median:.1f}"), (op, case, provider)


def row(commit, provider, us):
    return {"op": "mhc_post", "case": "T8-H5120", "commit": commit, "provider": provider, "p50_us": us}


@pytest.mark.parametrize(
    ("recorded", "shown"),
    [
        ([row("a", "ours", 1), row("a", "vllm", 2), row("b", "ours", 3)], {"ours": 1, "vllm": 2}),
        ([row("a", "ours", 1), row("b", "ours", 3)], {"ours": 3}),
        ([row("a", "ours", 1), row("a", "ours", 4)], {"ours": 4}),
    ],
)
def test_a_row_is_of_one_run(medians, recorded, shown):
    arms = medians.runs(recorded)["mhc_post", "T8-H5120"]
    assert {provider: row["p50_us"] for provider, row in arms.items()} == shown
