"""The generated pages say what the code says now, and links in the documents lead somewhere."""

import json
import re
from pathlib import Path

import pytest

from deepinfer_sm80 import envs
from deepinfer_sm80.cli import env, sensitivity
from deepinfer_sm80.cli import ops as ops_command
from deepinfer_sm80.model.sensitivity import ROUNDING, ROUNDING_NOISE, SENSITIVITY
from deepinfer_sm80.model.switches import COMPONENTS
from deepinfer_sm80.ops import OPS

ROOT = Path(__file__).parents[2]
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]


def test_operator_page():
    assert (ROOT / "docs/operators.md").read_text(encoding="utf-8") == ops_command.page(), "run make docs"


def test_environment_page():
    assert (ROOT / "docs/environment.md").read_text(encoding="utf-8") == env.page(), "run make docs"


def test_sensitivity_page_shows_the_committed_measurements_and_every_component():
    results = ROOT / "benchmarks/results/nvidia-h200"
    both = [
        json.loads((results / f"sensitivity-{name}.json").read_text(encoding="utf-8")) for name in ("tiny", "layer")
    ]
    text = (ROOT / "docs/sensitivity.md").read_text(encoding="utf-8")
    assert text == sensitivity.page(both), "run make docs"
    for measured in both:
        assert [change["what"] for change in measured["changes"]] == [ROUNDING_NOISE, *COMPONENTS]
        assert all(change["mean"] <= -SENSITIVITY for change in measured["changes"][1:])
        assert measured["changes"][0]["size"] <= ROUNDING


@pytest.mark.parametrize("op", OPS)
def test_every_operator_has_a_summary(op):
    summary = ops_command.summary(op)
    assert 20 <= len(summary) <= 118
    assert summary.endswith((".", ":")), f"{op}: the first line of its reference is a sentence, got {summary!r}"


def test_every_variable_read_in_the_sources_is_listed():
    names = {v.name for v in envs.VARIABLES}
    read = set()
    for path in sorted((ROOT / "src").rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        read |= set(re.findall(r"\benvs\.(DEEPINFER_[A-Z0-9_]+)", text))
        if path.name != "envs.py":
            assert not re.search(r"environ.*DEEPINFER_|getenv.*DEEPINFER_", text), (
                f"{path.name}: read it through envs.py"
            )
    assert read == names
    assert all(getattr(envs, name).name == name for name in names)


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_links_and_named_files_exist(path):
    text = path.read_text(encoding="utf-8")
    links = [target.partition("#")[0] for target in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in target]
    named = re.findall(r"`((?:src|docs|tests|requirements)/[\w./-]+)`", text)
    missing = [t for t in links if t and not (path.parent / t).exists()] + [t for t in named if not (ROOT / t).exists()]
    assert not missing
