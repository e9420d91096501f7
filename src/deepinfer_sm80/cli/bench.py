"""``deepinfer-sm80 bench FAMILY``: how fast the operators of a family are on this GPU, and whether that got worse."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from deepinfer_sm80 import ops
from deepinfer_sm80.bench import lowering, rows
from deepinfer_sm80.bench.report import NO_GPU
from deepinfer_sm80.cli.needs import need
from deepinfer_sm80.errors import OptionError
from deepinfer_sm80.hardware import torch_sees_a_gpu

if TYPE_CHECKING:
    import argparse

    from deepinfer_sm80.bench.gpu import Device

FAMILIES = ("engram", "mhc", "kv_cache", "indexer", "attention", "projection", "moe")


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "bench",
        help="time the operators of a family beside their baselines on this GPU",
        description="Time the operators of FAMILY beside their baselines on this machine's first GPU. Nothing is "
        "recorded: benchmarks/microbench.py of the repository does that. Exit code 1: slower than --against allows, "
        "no comparison where one was asked for, or a GPU that was lost.",
    )
    parser.add_argument("family", metavar="FAMILY", choices=FAMILIES, help=", ".join(FAMILIES))
    parser.add_argument("--op", action="append", metavar="OP", help="only this operator (see ops); may be repeated")
    parser.add_argument(
        "--against",
        type=Path,
        metavar="FILE",
        help=f"rows of an earlier run on this GPU, as --json printed or the microbenchmarks recorded them: exit code 1 "
        f"where a median is {rows.SLOWER:.0%}% or more above",
    )
    parser.add_argument("--quick", action="store_true", help="one case an operator, fewer rounds")
    parser.add_argument("--lowering", choices=lowering.LOWERINGS, help=lowering.HELP)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")


def run(args: argparse.Namespace, device: Device | None = None) -> int:
    """Print the table. Returns 1 for a median 15 % or more above the baseline's, a baseline and no GPU, or a lost GPU.

    ``device``: by default this machine's first GPU. Raises BenchmarkError, OptionError, MissingTorchError.
    """
    chosen = _chosen(args.family, args.op)
    baseline = rows.read_baseline(args.against) if args.against else []
    need("bench", "torch", "triton")
    if device is None:
        if not torch_sees_a_gpu():
            print(json.dumps({"gpu": None, "rows": []}) if args.json else NO_GPU)
            return 1 if args.against else 0
        from deepinfer_sm80.bench.gpu import CudaDevice

        device = CudaDevice()
    from deepinfer_sm80.bench import measure, report, runner

    lost = False
    try:
        found = runner.run_operators(
            chosen, device, args.lowering, quick=args.quick, say=(lambda _: None) if args.json else print
        )
    except measure.DeviceLostError as error:
        found, lost = error.outcome, True
    slower, compared = rows.regressions(found.rows, baseline)
    if args.json:
        answer = {"gpu": device.name, "rows": found.rows, "left_out": found.left_out, "slower": slower}
        print(json.dumps(answer | {"compared": compared}, indent=1))
    else:
        print(report.absences(found.left_out))
        print(_verdict(args.against, slower, compared, len(found.rows)))
    return 1 if slower or lost else 0


def _chosen(family: str, named: list[str] | None) -> list[str]:
    """The operators of ``family``, or those of them that are named. Raises OptionError for another one."""
    known = [op for op in ops.OPS if ops.OPS[op] == family]
    for op in named or ():
        if op not in known:
            raise OptionError(
                option="--op",
                allowed=f"of the family {family} ({', '.join(known)})",
                found=op,
                remedy="Name one of these, or its own family (deepinfer-sm80 ops lists all).",
            )
    return [op for op in known if op in (named or known)]


def _verdict(against: Path | None, slower: list[str], compared: int, total: int) -> str:
    if against is None:
        return f"\n{total} rows; no baseline was named (--against FILE)"
    lines = [f"SLOWER  {sentence}" for sentence in slower]
    return "\n".join(["", *lines, f"{compared} rows of ours have a baseline in {against}, {len(slower)} are slower"])
