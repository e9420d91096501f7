#!/usr/bin/env python3
"""Write the generated parts of README.md: what ran where, the serve commands, the two commands' output, the limits.

    python3 docs/readme_blocks.py

Sources: benchmarks/results (support, limits), ``deepinfer-sm80 plan`` (serve), docs/transcripts (output). A part stands
between the lines ``<!-- NAME: generated -->`` and ``<!-- end of NAME -->``.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import sys
import textwrap
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

from deepinfer_sm80.cli import main as command  # noqa: E402  (found through the path above)
from deepinfer_sm80.topology import ran  # noqa: E402  (found through the path above)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

RESULTS = ROOT / "benchmarks/results"
TRANSCRIPTS = ROOT / "docs/transcripts"
BEFORE_IT_WAS_RECORDED = "0.33.0"  # vLLM of results without the key
AMPERE = re.compile(r"\b(A100|A800|A40|A30|A16|A10|A2|A[456]000|RTX 30\d0)\b")
MACHINES = (
    ("Eight A100 of 80 GB", "8xA100-80GB"),
    ("Sixteen RTX 3090", "16xRTX3090"),
    ("Six GPUs of 64 GB", "6xA100-64GB"),
)
WIDTH = 120

Result = dict[str, Any]


@dataclass(frozen=True)
class Run:
    """Stages of one results folder that ran the same code: where, with what, which passed and which did not."""

    gpu: str
    code: str
    versions: str
    commit: str
    folder: str
    passed: tuple[str, ...]
    failed: tuple[str, ...]


def results() -> dict[Path, dict[str, Result]]:
    """Folder -> stage -> result, of every folder benchmarks/results/*/prove_*."""
    found: dict[Path, dict[str, Result]] = {}
    for path in sorted(RESULTS.glob("*/prove_*/*.json")):
        content = json.loads(path.read_text(encoding="utf-8"))
        if "ok" in content:
            found.setdefault(path.parent, {})[path.stem] = content
    return found


def runs(found: dict[Path, dict[str, Result]]) -> list[Run]:
    """A stage without a GPU of its own either judged what others left, and has facts, or died before it knew."""
    rows = []
    for folder, stages in found.items():
        machines = [r for r in stages.values() if r.get("gpu")]
        common = Counter(r["lowering"] for r in machines).most_common(1)[0][0]
        groups: dict[str, dict[str, Result]] = {}
        for name, result in stages.items():
            code = result.get("lowering") or ("judged" if result.get("facts") else common)
            groups.setdefault(code, {})[name] = result
        for code, group in sorted(groups.items(), key=lambda item: item[0] == "judged"):
            machine = next((r for r in group.values() if r.get("gpu")), machines[0])
            whole = stages if code == "judged" else group  # what judges uses no GPU: it belongs to the run
            gpus = max(r.get("facts", {}).get("gpus") or 1 for r in whole.values())
            torch, triton = machine["torch"].partition("+")[0], machine["triton"]
            vllm = machine.get("vllm", BEFORE_IT_WAS_RECORDED)
            rows.append(
                Run(
                    gpu=f"{gpus} x {machine['gpu']}" if gpus > 1 else machine["gpu"],
                    code={"native": "its own", "judged": "compared afterwards"}.get(code, f"{code} in its place"),
                    versions=f"{vllm}, {torch}, {triton}",
                    commit=", ".join(sorted({r["commit"] for r in group.values() if r.get("commit")})),
                    folder=folder.relative_to(ROOT).as_posix(),
                    passed=tuple(sorted(name for name, r in group.items() if r["ok"])),
                    failed=tuple(sorted(name for name, r in group.items() if not r["ok"])),
                )
            )
    return rows


def support(found: dict[Path, dict[str, Result]]) -> str:
    rows = runs(found)
    lines = [
        "| GPU | code it ran | vLLM, torch, Triton | passed | failed | commit, results |",
        "|---|---|---|---|---|---|",
    ]
    if not any(AMPERE.search(row.gpu) for row in rows):
        lines.append("| any Ampere GPU (8.0: A100, A800, A30; 8.6: A40, A10, A6000, 3090) | its own | | none yet | | |")
    for row in rows:
        place = f"{row.commit}, [{Path(row.folder).name}]({row.folder})"
        passed, failed = ", ".join(row.passed) or "none", ", ".join(row.failed)
        lines.append(f"| {row.gpu} | {row.code} | {row.versions} | {passed} | {failed} | {place} |")
    return "\n".join(lines)


def _any(holds: Callable[[Result], bool]) -> Callable[[Iterable[Result]], bool]:
    return lambda all_results: any(r["ok"] and holds(r) for r in all_results)


LIMITS: tuple[tuple[str, Callable[[Iterable[Result]], bool]], ...] = (
    (
        "on real Ampere hardware",
        _any(lambda r: r.get("lowering") == "native" and AMPERE.search(r.get("gpu", "")) is not None),
    ),
    ("on the released weights", _any(lambda r: r.get("checkpoint") == "released")),
    (
        "with torch 2.14 and Triton 3.8 on a GPU",
        _any(lambda r: r.get("torch", "").startswith("2.14") and r.get("triton", "").startswith("3.8")),
    ),
    ("with FlashInfer installed", _any(lambda r: bool(r.get("flashinfer")))),
    ("under Ray", _any(lambda r: r.get("executor") == "ray")),
    ("under Docker", _any(lambda r: bool(r.get("docker")))),
)
"""What counts as never run until a committed result that passed says otherwise."""


KINDS: tuple[tuple[str, Callable[[], bool]], ...] = (
    ("with data parallel replicas", lambda: ran.REPLICAS),
    (f"on more than {ran.GPUS} GPUs at once", lambda: False),
)
"""Kinds of layouts that count as never run until the planner's ran.py says otherwise."""


def limits(found: dict[Path, dict[str, Result]]) -> str:
    everything = [r for stages in found.values() for r in stages.values()]
    left = [what for what, was_run in LIMITS if not was_run(everything)]
    left += [what for what, has_run in KINDS if not has_run()]
    return "Never run so far:\n\n" + ";\n".join(_wrapped(f"- {what}", "  ") for what in left) + "."


def _wrapped(text: str, indent: str = "") -> str:
    return textwrap.fill(text, WIDTH - 1, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def serve() -> str:
    """For each of MACHINES the command that ``plan`` gives for the best layout that vLLM serves."""
    parts = []
    for name, gpus in MACHINES:
        best = _plan(gpus)["best_servable"]
        row = best["layout"]
        shape = f"tensor parallel {row['tp']}"
        shape += f", {row['pp']} pipeline stages" if row["pp"] > 1 else ""
        shape += f", data parallel {row['dp']}" if row["dp"] > 1 else ""
        shape += ", whole experts on each GPU" if row["ep"] > 1 else ""
        command_line = row["command"].replace(" --", " \\\n    --")
        part = f"{name}, {best['context']:,} tokens of context ({shape}):\n\n```\n{command_line}\n```"
        parts.append("\n\n".join([part, _wrapped(" ".join(row["cautions"]))]) if row["cautions"] else part)
    return "\n\n".join(parts)


def _plan(gpus: str) -> dict[str, Any]:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        command(["plan", "--gpus", gpus, "--json"])
    answer: dict[str, Any] = json.loads(out.getvalue())
    return answer


def output() -> str:
    """The end of both transcripts: the demo's table and verdict, the gate's last lines."""
    demo = (TRANSCRIPTS / "demo.txt").read_text(encoding="utf-8").splitlines()
    test = (TRANSCRIPTS / "test.txt").read_text(encoding="utf-8").splitlines()
    first = next(i for i, line in enumerate(demo) if line.startswith("6. "))
    last = next(i for i, line in enumerate(demo) if line.startswith("every operator agrees"))
    ends = [line for line in test if re.search(r"^skipped tests: |^\d+ passed", line)]
    shown = ["$ make demo", "...", *demo[first : last + 1], "", "$ make test", "...", *ends]
    return "```\n" + "\n".join(shown) + "\n```"


def rendered(text: str) -> str:
    """``text``, the README, with every part written anew. Raises ValueError where its lines are missing."""
    found = results()
    parts = {"support": support(found), "output": output(), "serve": serve(), "limits": limits(found)}
    for name, part in parts.items():
        begin, end = f"<!-- {name}: generated -->", f"<!-- end of {name} -->"
        if text.count(begin) != 1 or text.count(end) != 1:
            raise ValueError(f"README.md must hold {begin!r} and {end!r} once each")
        before, _, rest = text.partition(begin)
        after = rest.partition(end)[2]
        text = f"{before}{begin}\n\n{part}\n\n{end}{after}"
    return text


if __name__ == "__main__":
    readme = ROOT / "README.md"
    readme.write_text(rendered(readme.read_text(encoding="utf-8")), encoding="utf-8")
