"""``deepinfer-sm80 ops``: every operator, its contract (``--markdown``, ``--json``), its kernels (``--resources``)."""

from __future__ import annotations

import ast
import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepinfer_sm80 import ops
from deepinfer_sm80.cli.needs import need
from deepinfer_sm80.errors import MissingTorchError, OptionError
from deepinfer_sm80.hardware import LIMITS
from deepinfer_sm80.ops import resources
from deepinfer_sm80.ops.variants import all_variants

if TYPE_CHECKING:
    import argparse

    from deepinfer_sm80.ops.contract import OpSpec, Tolerance

INTRODUCTION = """# Operators

Written by `make docs` from the references (`src/deepinfer_sm80/ops/<family>/<operator>/reference.py`); do not edit.
Families come in forward-pass order. Exact: every bit equal to the reference. Otherwise each element is bounded in
units in the last place of the output's dtype (of the row's RMS / 16 where an element is smaller than that), and each
row's RMS error relative to the row's RMS.
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "ops",
        help="list the operators",
        description="List every operator with its family and what it does; the options print more about each.",
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--markdown", action="store_true", help="print docs/operators.md (needs torch)")
    form.add_argument("--json", action="store_true", help="print the contracts as JSON (needs torch)")
    parser.add_argument(
        "--resources",
        action="store_true",
        help="compile every kernel for compute capability 8.x and print what it needs (needs triton, no GPU)",
    )
    parser.add_argument(
        "--arch",
        action="append",
        choices=[f"{major}.{minor}" for major, minor in LIMITS],
        help="with --resources: only this compute capability; may be repeated (default: all of them)",
    )
    parser.add_argument(
        "--workers",
        type=int,
        default=os.cpu_count() or 1,
        help="with --resources: compilations at once (default: one a core)",
    )


def run(args: argparse.Namespace) -> int:
    """Print the list, the page or the JSON. Raises MissingTorchError without a package, OptionError."""
    if args.resources:
        wanted = [arch for arch in LIMITS if not args.arch or f"{arch[0]}.{arch[1]}" in args.arch]
        need("ops --resources", "triton")
        if args.workers < 1:
            raise OptionError(
                option="--workers", allowed="1 or more", found=args.workers, remedy="Correct it, or drop the option."
            )
        found = resources.compile_all(all_variants(), wanted, args.workers)
        print(json.dumps([asdict(r) for r in found], indent=1) if args.json else resource_page(found))
    elif args.markdown:
        print(page(), end="")
    elif args.json:
        print(json.dumps([contract(op) for op in ops.OPS], indent=2))
    else:
        width = max(map(len, ops.OPS))
        for op, family in ops.OPS.items():
            print(f"{family:10}  {op:{width}}  {summary(op)}")
    return 0


def resource_page(found: list[resources.Resources]) -> str:
    """A markdown table of compiled kernels; sizes in bytes, registers per thread."""
    head = "| operator | variant | arch | Triton | shared | registers | spills | stack | CTAs per SM |"
    return "\n".join([head, "|---|---|---|---|---:|---:|---:|---:|---:|", *resource_rows(found)])


def resource_rows(found: list[resources.Resources]) -> list[str]:
    """The rows of ``resource_page``."""
    rows = []
    for r in found:
        sizes = (r.shared_bytes, r.registers, r.spill_bytes, r.stack_bytes, r.ctas_per_sm)
        rows.append(f"| `{r.op}` | {r.variant} | {r.arch} | {r.triton} | " + " | ".join(map(str, sizes)) + " |")
    return rows


def summary(op: str) -> str:
    """First line of the reference's module docstring, read without importing it (and so without torch)."""
    path = Path(ops.__file__).parent / ops.OPS[op] / op / "reference.py"
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return text.partition("\n")[0]


def contract(op: str) -> dict[str, Any]:
    """Family, summary, results, arguments written in place and tolerances of ``op``, as JSON can hold them."""
    spec = _spec(op)
    compared = (*spec.outputs, *spec.mutates)
    return {
        "op": op,
        "family": ops.OPS[op],
        "summary": summary(op),
        "returns": list(spec.outputs),
        "writes": list(spec.mutates),
        "tolerance": {name: _tolerance(spec.tolerance_of(name)) for name in compared},
    }


def page() -> str:
    """The text of docs/operators.md."""
    rows = ["| family | operator | what it does | returns | writes in place | agreement |", "|---|---|---|---|---|---|"]
    for op in ops.OPS:
        found = contract(op)
        names = [", ".join(f"`{name}`" for name in found[key]) or "none" for key in ("returns", "writes")]
        bounds = found["tolerance"]
        same = len(set(bounds.values())) == 1
        agreement = next(iter(bounds.values())) if same else "; ".join(f"`{n}`: {b}" for n, b in bounds.items())
        what = found["summary"].replace("|", "\\|")
        rows.append(f"| {found['family']} | `{op}` | {what} | {names[0]} | {names[1]} | {agreement} |")
    return f"{INTRODUCTION}\n" + "\n".join(rows) + "\n"


def _tolerance(bound: Tolerance) -> str:
    return "exact" if bound.ulps == 0 else f"{bound.ulps:g} ulp, row RMS {bound.rms:.2g}"


def _spec(op: str) -> OpSpec:
    try:
        return ops.spec(op)
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("deepinfer_sm80"):
            raise
        raise MissingTorchError(what=f"The contract of {op}", package=error.name) from error
