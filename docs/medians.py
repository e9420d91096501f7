#!/usr/bin/env python3
"""Write the table of medians in docs/6-benchmarking.md from the rows in benchmarks/results.

python3 docs/medians.py
"""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

from deepinfer_sm80.bench import cases, rows  # noqa: E402  (found through the path above)
from deepinfer_sm80.bench.lowering import LOWERINGS  # noqa: E402

PAGE = ROOT / "docs/6-benchmarking.md"
BEGIN, END = "<!-- medians: generated -->", "<!-- end of medians -->"
SHOWN = "sm80"
COLUMNS = (("ours", "ours, us"), ("vllm", "vLLM's kernel"), ("flashmla", "FlashMLA, its own code"))
COLUMNS += (("unfused", "unfused chain"), ("pytorch-graph", "PyTorch, graphed"))

Row = dict[str, Any]


def runs(recorded: list[Row]) -> dict[tuple[str, str], dict[str, Row]]:
    """(operator, case) -> provider -> row, of the run that has most arms; of two such the later one.

    A ratio holds within a run only, and a case that was measured again may have had fewer arms then.
    """
    found: dict[tuple[str, str], dict[str, dict[str, Row]]] = defaultdict(lambda: defaultdict(dict))
    for row in recorded:
        found[row["op"], row["case"]][row["commit"]][row["provider"]] = row
    return {place: max(enumerate(of.values()), key=lambda run: (len(run[1]), run[0]))[1] for place, of in found.items()}


def table(recorded: list[Row]) -> str:
    """Coverage by GPU and lowering, and every case of the lowering that serves."""
    known = cases.all_cases()
    order = {(case.op, case.name): place for place, case in enumerate(known)}
    lines = []
    for gpu in sorted({row["gpu"] for row in recorded}):
        here = [row for row in recorded if row["gpu"] == gpu and (row["op"], row["case"]) in order]
        counts = Counter({row["lowering"]: 0 for row in here})
        for lowering, *_ in {(row["lowering"], row["op"], row["case"]) for row in here if row["provider"] == "ours"}:
            counts[lowering] += 1
        cover = ", ".join(f"{counts[low]} in `{low}`" for low in LOWERINGS if low in counts)
        lines += [f"{gpu}, cases with a row of ours, of {len(order)}: {cover}.", ""]
        titles = " | ".join(title for _, title in COLUMNS)
        lines += [f"| operator, case (`{SHOWN}`) | {titles} | share of the roofline | commit |"]
        lines += ["|---|" + "---:|" * (len(COLUMNS) + 1) + "---|"]
        of_case = runs([row for row in here if row["lowering"] == SHOWN])
        for (op, case), arms in sorted(of_case.items(), key=lambda item: order[item[0]]):
            if "ours" not in arms:
                continue
            ours = arms["ours"]
            cells = [f"{arms[name]['p50_us']:.1f}" if name in arms else "" for name, _ in COLUMNS]
            share = f"{ours['roofline_share']:.1%}"
            lines.append(f"| `{op}` {case} | {' | '.join(cells)} | {share} | {ours['commit'][:7]} |")
        lines.append("")
    return "\n".join(lines).strip()


def rendered(text: str) -> str:
    """The page with its table written anew."""
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise ValueError(f"{PAGE.name} must hold {BEGIN!r} and {END!r} once each")
    before, _, rest = text.partition(BEGIN)
    part = table(rows.read_all(ROOT / "benchmarks/results", rows.ROWS))
    return f"{before}{BEGIN}\n\n{part}\n\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    PAGE.write_text(rendered(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
