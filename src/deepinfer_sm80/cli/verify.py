"""``deepinfer-sm80 verify``: does every operator keep its contract on this GPU?"""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from typing import TYPE_CHECKING

from deepinfer_sm80 import hardware, ops
from deepinfer_sm80.errors import MissingTorchError, UnknownOpError

if TYPE_CHECKING:
    import argparse

    from deepinfer_sm80.testing.verification import Verdict


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "verify", help="run every operator beside its reference on this GPU (without one: a subset, interpreted)"
    )
    parser.add_argument("--op", action="append", help="only this operator; may be repeated")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")


def run(args: argparse.Namespace) -> int:
    """Print a row for each operator. Returns 0 when all keep their contract, else 1.

    Raises UnknownOpError for a name that is none, MissingTorchError without torch or Triton.
    """
    chosen = args.op or list(ops.OPS)
    for op in chosen:
        if op not in ops.OPS:
            raise UnknownOpError(op=op, known=", ".join(ops.OPS))
    gpu = hardware.current_gpu() if hardware.torch_sees_a_gpu() else None
    device = "cpu" if gpu is None else "cuda"
    if gpu is None:
        os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it when a kernel module is imported
    try:
        from deepinfer_sm80.testing.verification import verify
    except ModuleNotFoundError as error:
        raise MissingTorchError(what="verify", package=error.name) from error
    where = "no GPU: the smallest cases, kernels through Triton's interpreter" if gpu is None else gpu.name
    if not args.json:
        print(f"{where}\n\n{'operator':30} {'form':8} {'cases':>5}  {'graph':10} {'seconds':>7}  agreement")
    verdicts = []
    for op in chosen:
        verdicts.append(verify(op, device))
        if not args.json:
            print(_row(verdicts[-1]), flush=True)
    failed = [v.op for v in verdicts if not v.ok]
    if args.json:
        print(json.dumps({"device": where, "ok": not failed, "operators": [asdict(v) for v in verdicts]}, indent=1))
    else:
        print(f"\n{len(verdicts) - len(failed)} of {len(verdicts)} operators keep their contract here")
    return 1 if failed else 0


def _row(v: Verdict) -> str:
    graph = (
        {None: "no GPU", True: "replayed", False: "FAILED"}[v.captured] if v.ok or v.captured is False else "not tried"
    )
    agreement = v.detail if v.ok else f"FAILED  {v.detail}"
    return f"{v.op:30} {v.form:8} {v.cases:5}  {graph:10} {v.seconds:7.2f}  {agreement}"
