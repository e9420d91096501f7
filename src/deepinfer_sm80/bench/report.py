"""What a run says: a table, the arms without a row, and the line of a machine without a GPU."""

from __future__ import annotations

import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from deepinfer_sm80.bench.rows import Row

NO_GPU = "No GPU is visible here: nothing was timed and nothing was recorded."
_HEAD = f"{'case':34} {'provider':14} {'p50 us':>10} {'p20':>9} {'p80':>9} {'x ours':>7} {'roof':>8} {'launches':>8}"


def table(rows: Sequence[Row]) -> str:
    """Rows of one or more operators as text. ``x ours``: the provider's median over ours of the same case.

    ``~`` before a GPU's name: projected, see ``projected.py``.
    """
    ours = {(row["op"], row["case"]): row["p50_us"] for row in rows if row["provider"] == "ours"}
    others = list(dict.fromkeys(gpu for row in rows for gpu in row.get("projected_us", {})))
    head = _HEAD + "".join(f"{'~' + gpu:>12}" for gpu in others)
    lines, op = [], ""
    for row in rows:
        if row["op"] != op:
            op = row["op"]
            lines += ["", f"{op}  ({row['gpu']}, {row['lowering']})", head]
        known = ours.get((op, row["case"]))
        ratio = f"{row['p50_us'] / known:.2f}" if known else "-"
        known_elsewhere = row.get("projected_us", {})
        elsewhere = "".join(f"{known_elsewhere.get(gpu, '-'):>12}" for gpu in others)
        cold = "" if row["cold"] else "  warm: too small for 3x L2"
        lines.append(
            f"{row['case']:34} {row['provider']:14} {row['p50_us']:10.2f} {row['p20_us']:9.2f} {row['p80_us']:9.2f} "
            f"{ratio:>7} {row['roofline_share']:8.1%} {_count(row['launches']):>8}{elsewhere}{cold}"
        )
    return "\n".join(lines).lstrip("\n")


def _count(launches: float | None) -> str:
    return "-" if launches is None else f"{launches:g}"


def absences(left_out: Iterable[dict[str, str]]) -> str:
    """One line for every operator, provider and reason; cases with the same are put together."""
    found: dict[tuple[str, str, str], list[str]] = {}
    for item in left_out:
        found.setdefault((item["op"], item["provider"], item["reason"]), []).append(item["case"])
    lines = [f"no row: {op}, {provider}, {', '.join(cases)}: {why}" for (op, provider, why), cases in found.items()]
    return "\n".join(lines)


def resource_table(resources: Iterable[Row]) -> str:
    """What the kernels need where they cannot be timed; sizes in bytes, registers per thread."""
    head = f"{'operator':30} {'variant':16} {'arch':6} {'Triton':7} {'shared':>7} {'regs':>5} {'spills':>6} {'CTAs':>5}"
    lines = [
        f"{r['op']:30} {r['variant']:16} {r['arch']:6} {r['triton']:7} {r['shared']:7} {r['registers']:5} "
        f"{r['spills']:6} {r['ctas_per_sm']:5}"
        for r in resources
    ]
    return "\n".join([head, *lines])


def facts(driver: str, commit: str = "") -> dict[str, str]:
    """Where and when: commit (``commit``, else git's, else "unknown"), torch, triton, driver and UTC time."""
    import torch
    import triton

    return {
        "commit": commit or source_commit() or "unknown",
        "torch": str(torch.__version__),
        "triton": str(triton.__version__),
        "driver": driver,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def source_commit() -> str | None:
    """The commit of the checkout that this package runs from, with "+changes" where files differ from it.

    None where it is no checkout of ours: an installed package may lie inside somebody else's.
    """
    here = Path(__file__)
    try:
        _, commit, changes = (
            subprocess.run(["git", *words], cwd=here.parent, capture_output=True, text=True, check=True).stdout.strip()
            for words in (
                ("ls-files", "--error-unmatch", here.name),
                ("rev-parse", "HEAD"),
                ("status", "--porcelain", "--", "."),
            )
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return f"{commit}+changes" if changes else commit
