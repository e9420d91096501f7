"""Rows of measurements, the summary that charts are drawn from, and the comparison with a baseline.

A row is one JSON line with KEYS and more. Standard library only.
"""

from __future__ import annotations

import json
import os
import re
from typing import TYPE_CHECKING, Any

from deepinfer_sm80.errors import BenchmarkError, reason

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

Row = dict[str, Any]

KEYS = (
    "op",
    "case",
    "provider",
    "lowering",
    "gpu",
    "p20_us",
    "p50_us",
    "p80_us",
    "bytes",
    "flops",
    "roofline_share",
    "gate",
    "commit",
    "torch",
    "triton",
    "driver",
    "time",
)
IDENTITY = ("gpu", "lowering", "op", "case", "provider")
SUMMARY = "sm80_benchmark_summary.json"
ROWS = "microbench.jsonl"
STEPS = "step.jsonl"
STEP_IDENTITY = ("gpu", "checkpoint", "step", "context", "arm", "lowering")
SLOWER = 0.15
"""Against a baseline, a median this share above it, or more, fails."""

_RESOURCE_NUMBERS = ("shared", "registers", "spills", "stack", "ctas_per_sm")


def gpu_folder(gpu: str) -> str:
    """The folder name of a GPU: "NVIDIA H200" -> "nvidia-h200"."""
    return re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-")


def append_rows(results: Path, rows: Sequence[Row]) -> None:
    """Append to ``results``/<gpu>/microbench.jsonl. Raises BenchmarkError for a row that may not exist."""
    for row in rows:
        missing = [key for key in KEYS if key not in row]
        if missing or row["gate"] is not True:
            fault = f"without {', '.join(missing)}" if missing else f"with gate {row['gate']!r}"
            raise BenchmarkError(
                what="a row", allowed="all keys and gate true", found=fault, remedy="Nothing was written."
            )
    for row in rows:
        path = results / gpu_folder(row["gpu"]) / ROWS
        path.parent.mkdir(parents=True, exist_ok=True)
        append_line(path, row)


def append_line(path: Path, item: Row) -> None:
    """Add one JSON line and have it on the disk: what is killed afterwards has lost nothing."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(item) + "\n")
        file.flush()
        os.fsync(file.fileno())


def read_rows(path: Path) -> list[Row]:
    """The rows of one JSON-lines file. Raises BenchmarkError where it cannot be read as such."""
    found: list[Any] = []
    number = 0
    try:
        for line in path.read_text(encoding="utf-8").splitlines():
            number += 1
            if line.strip():
                found.append(json.loads(line))
    except json.JSONDecodeError as error:
        raise _no_rows(path, f"what is no JSON object in line {number}") from error
    except (OSError, ValueError) as error:
        raise _no_rows(path, reason(error)) from error
    other = next((item for item in found if not isinstance(item, dict)), None)
    if other is not None:
        raise _no_rows(path, f"a {type(other).__name__} among them")
    return found


def read_baseline(path: Path) -> list[Row]:
    """The rows to compare with: a file that the microbenchmarks recorded, or what ``bench --json`` printed.

    Raises BenchmarkError for anything else, and for one without a row.
    """
    try:
        printed = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        printed = None
    listed = printed.get("rows") if isinstance(printed, dict) else None
    found = listed if isinstance(listed, list) else read_rows(path)
    if not found:
        raise _no_rows(path, "no row")
    for row in found:
        lacking = [key for key in (*IDENTITY, "p50_us") if not isinstance(row, dict) or key not in row]
        if lacking:
            raise _no_rows(path, f"a row without {', '.join(lacking)}")
    return found


def _no_rows(path: Path, found: str) -> BenchmarkError:
    return BenchmarkError(
        what=path,
        allowed=f"a file of rows, one JSON object a line, such as benchmarks/results/<gpu>/{ROWS}",
        found=found,
        remedy="Name another file.",
    )


def latest(rows: Iterable[Row], identity: Sequence[str] = IDENTITY) -> list[Row]:
    """The last row of every ``identity``, ordered by it."""
    found = {tuple(row[key] for key in identity): row for row in rows}
    return [found[key] for key in sorted(found)]


def beside(rows: Iterable[Row]) -> list[Row]:
    """Of step rows, those to set beside one another, ordered: for each step the latest of the last commit that has
    every arm of this GPU and checkpoint. Arms of two runs differ by the host and by what else it did; without such a
    commit, none."""
    arms: dict[tuple[Any, ...], set[str]] = {}
    steps: dict[tuple[Any, ...], dict[str, list[Row]]] = {}
    for row in rows:
        arms.setdefault(_step(row)[:2], set()).add(row["arm"])
        commits = steps.setdefault(_step(row), {})
        commits[row["commit"]] = [*commits.pop(row["commit"], []), row]  # the last written comes last
    found = []
    for step, commits in steps.items():
        whole = [run for run in commits.values() if {row["arm"] for row in run} == arms[step[:2]]]
        found += whole[-1] if whole else []
    return latest(found, STEP_IDENTITY)


def alone(rows: Sequence[Row]) -> list[Row]:
    """Of step rows, the latest that were written after those of ``beside`` of their step: arms without another."""
    shown = beside(rows)
    last = {_step(row): number for number, row in enumerate(rows) if row in shown}
    return latest((row for number, row in enumerate(rows) if number > last.get(_step(row), -1)), STEP_IDENTITY)


def _step(row: Row) -> tuple[Any, ...]:
    return tuple(row[key] for key in STEP_IDENTITY[:4])


def read_all(results: Path, name: str) -> list[Row]:
    """The rows of every GPU's file of this name."""
    return [row for path in sorted(results.glob(f"*/{name}")) for row in read_rows(path)]


def summarise(results: Path, resource_page: Path) -> dict[str, Any]:
    """What every row file below ``results`` says last, and the resources of the compiled kernels."""
    return {
        "resources": read_resources(resource_page),
        "rows": latest(read_all(results, ROWS)),
        "steps": beside(read_all(results, STEPS)),
    }


def write_summary(results: Path, resource_page: Path) -> Path:
    """Write ``summarise`` to ``results``; one line for each row and each kernel."""
    summary, path = summarise(results, resource_page), results / SUMMARY
    parts = []
    for name, items in summary.items():
        lines = ",\n".join(json.dumps(item) for item in items)
        parts.append(f'"{name}": [\n{lines}\n]' if items else f'"{name}": []')
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("{" + ",\n".join(parts) + "}\n", encoding="utf-8")
    return path


def read_resources(page: Path) -> list[Row]:
    """The table of docs/resources.md as rows: op, variant, arch, triton, and numbers in bytes and registers."""
    found = []
    for line in page.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip().strip("`") for cell in line.strip("|").split("|")]
        if len(cells) == 9 and cells[2].startswith("sm_"):
            numbers = dict(zip(_RESOURCE_NUMBERS, map(int, cells[4:]), strict=True))
            found.append({"op": cells[0], "variant": cells[1], "arch": cells[2], "triton": cells[3], **numbers})
    return found


def regressions(rows: Iterable[Row], baseline: Iterable[Row]) -> tuple[list[str], int]:
    """Sentences about medians of ours SLOWER or more above the baseline's, and how many rows had a baseline.

    Rows are compared that have GPU, lowering, operator, case and provider in common.
    """
    before = {tuple(row[key] for key in IDENTITY): row["p50_us"] for row in latest(baseline)}
    slower, compared = [], 0
    for row in rows:
        known = before.get(tuple(row[key] for key in IDENTITY))
        if row["provider"] != "ours" or known is None:
            continue
        compared += 1
        if row["p50_us"] >= known * (1 + SLOWER):
            slower.append(
                f"{row['op']} {row['case']}: {row['p50_us']:.2f} us, {row['p50_us'] / known - 1:+.1%} against "
                f"{known:.2f} us (allowed: below {SLOWER:+.0%})"
            )
    return slower, compared
