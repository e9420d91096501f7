"""``deepinfer-sm80 verify``: does every operator keep its contract on this GPU?"""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from typing import TYPE_CHECKING

from deepinfer_sm80 import hardware, ops
from deepinfer_sm80.bench import lowering, report
from deepinfer_sm80.cli.needs import need
from deepinfer_sm80.errors import OptionError, UnknownOpError

if TYPE_CHECKING:
    import argparse

    from deepinfer_sm80.testing.verification import Verdict


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "verify",
        help="run every operator beside its reference on this GPU (without one: a subset, interpreted)",
        description="Run every operator on its cases beside its reference and compare: on a GPU all cases, also "
        "replayed from a CUDA graph; without one the smallest cases, through Triton's interpreter, in seconds. Exit "
        "code 0: every operator keeps its contract, 1: one does not.",
    )
    parser.add_argument("--op", action="append", metavar="OP", help="only this operator (see ops); may be repeated")
    parser.add_argument("--lowering", choices=lowering.LOWERINGS, help=lowering.HELP)
    parser.add_argument("--commit", default="", help="commit for --json, where the sources lie outside git")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")


def run(args: argparse.Namespace) -> int:
    """Print a row for each operator. Returns 0 when all keep their contract, else 1.

    Raises UnknownOpError for a name that is none, MissingTorchError without a package, BenchmarkError or
    OptionError for a lowering that cannot be had here.
    """
    chosen = args.op or list(ops.OPS)
    for op in chosen:
        if op not in ops.OPS:
            raise UnknownOpError(op=op, known=", ".join(ops.OPS))
    need("verify", "torch", "triton")
    gpu = hardware.current_gpu() if hardware.torch_sees_a_gpu() else None
    code = None
    if gpu is None and args.lowering:
        raise OptionError(
            option="--lowering",
            allowed="left out where there is no GPU",
            found=args.lowering,
            remedy="Drop the option: kernels go through Triton's interpreter here.",
        )
    if gpu is None:
        need("verify", "numpy")  # the interpreter computes with it
        os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it when a kernel module is imported
        where = "no GPU: the smallest cases, kernels through Triton's interpreter"
    else:
        code = lowering.enter(args.lowering, gpu.capability)  # before a kernel module is imported
        where = gpu.name
    from deepinfer_sm80.testing.verification import verify

    if not args.json:
        said = where if code is None else f"{where}, lowering {code}"
        print(f"{said}\n\n{'operator':30} {'form':8} {'cases':>5}  {'graph':10} {'seconds':>7}  agreement")
    verdicts = []
    for op in chosen:
        verdicts.append(verify(op, "cpu" if gpu is None else "cuda"))
        if not args.json:
            print(_row(verdicts[-1]), flush=True)
    failed = [v.op for v in verdicts if not v.ok]
    if args.json:
        facts = {"device": where, "lowering": code, "commit": args.commit or report.source_commit(), "ok": not failed}
        print(json.dumps(facts | {"operators": [asdict(v) for v in verdicts]}, indent=1))
    else:
        print(f"\n{len(verdicts) - len(failed)} of {len(verdicts)} operators keep their contract here")
    return 1 if failed else 0


def _row(v: Verdict) -> str:
    graph = (
        {None: "no GPU", True: "replayed", False: "FAILED"}[v.captured] if v.ok or v.captured is False else "not tried"
    )
    agreement = v.detail if v.ok else f"FAILED  {v.detail}"
    return f"{v.op:30} {v.form:8} {v.cases:5}  {graph:10} {v.seconds:7.2f}  {agreement}"
