"""``deepinfer-sm80 demo``: a tiny checkpoint, the plugin's decision, real text through the operators and the model."""

from __future__ import annotations

import os
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

    from deepinfer_sm80.testing.agreement import Agreement


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "demo", help="write a tiny checkpoint and push real text through the operators, each beside its reference"
    )
    parser.add_argument("--dir", type=Path, help="keep the checkpoint here (reused when it exists; default: temporary)")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: auto")


def run(args: argparse.Namespace) -> int:
    """Run the four steps. Returns 0 when every operator agrees with its reference, else 1."""
    device = _device(args.device)
    start = time.perf_counter()
    with _checkpoint(args.dir) as directory:
        print("\n2. What the plugin would do here")
        _print_decision()
        where = "on the GPU" if device == "cuda" else "on the CPU (Triton kernels through its interpreter)"
        print(f"\n3. Real text through the operators of one layer, {where}; each beside its reference")
        failed = _print_operators(directory, device)
        print("\n4. The whole model on 64 tokens of text, complete and with a part left out (docs/sensitivity.md: all)")
        _print_sensitivity(directory, device)
    seconds = time.perf_counter() - start
    verdict = "every operator agrees with its reference" if not failed else f"{failed} disagree with their references"
    print(f"\n{verdict} ({seconds:.0f} s)")
    return 1 if failed else 0


def _device(choice: str) -> str:
    # Triton decides between compiling and interpreting when a kernel module is imported, so this comes first.
    if choice == "auto":
        import torch

        choice = "cuda" if torch.cuda.is_available() else "cpu"
    if choice == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
    return choice


@contextmanager
def _checkpoint(directory: Path | None) -> Iterator[Path]:
    """The tiny checkpoint in ``directory``, or in a temporary one that is gone afterwards."""
    print("1. A checkpoint in DeepSeek-V4.1's released format, random weights, every kind of layer (preset tiny)")
    if directory is not None:
        if (directory / "config.json").exists():
            print(f"   {directory} exists and is used as it is")
        else:
            _write(directory)
        yield directory
        return
    with tempfile.TemporaryDirectory(prefix="deepinfer-demo-") as scratch:
        _write(Path(scratch) / "tiny")
        yield Path(scratch) / "tiny"


def _write(directory: Path) -> None:
    from deepinfer_sm80.model.checkpoint import write_checkpoint
    from deepinfer_sm80.model.config import preset

    written = write_checkpoint(directory, preset("tiny"), seed=0, progress=lambda line: print(f"   {line}", flush=True))
    print(f"   {written.path}: {written.files} files, {written.bytes / 1e9:.2f} GB, {written.seconds:.0f} s")


def _print_decision() -> None:
    from deepinfer_sm80.cli.doctor import plugin_decision
    from deepinfer_sm80.vllm_plugin.activation import ARCHITECTURES

    active, reason = plugin_decision()
    if active:
        print(f"   it would act: {reason}")
    else:
        print(f"   it would leave vLLM as it is: {reason}")
        print("   on a GPU of compute capability 8.x with a supported vLLM it would register:")
    for architecture, target in ARCHITECTURES.items():
        print(f"   {architecture} -> {target}")


def _print_operators(directory: Path, device: str) -> int:
    from deepinfer_sm80.cli.demo_operators import PROSE, walk

    print(f"   {PROSE[:96]}...\n")
    header = f"   {'operator':30} {'case':28} {'agreement':14} {'seconds':>8}"
    print(header + "\n   " + "-" * (len(header) - 3))
    failed = 0
    for case, found in walk(directory, device):
        failed += not found.agrees
        print(_row(case, found), flush=True)
    return failed


def _print_sensitivity(directory: Path, device: str) -> None:
    from deepinfer_sm80.cli.sensitivity import measure, rows

    table = measure(directory, (64,), device, ("attention", "mhc_mixing"))
    for line in (f"mean log-probability {table.complete:.3f} (nothing known: -11.771)", *rows(table)):
        print(f"   {line}")


def _row(case: str, found: Agreement) -> str:
    agreement = found.detail if found.agrees else "DISAGREES"
    row = f"   {found.op:30} {case:28} {agreement:14} {found.seconds:8.3f}"
    return row if found.agrees else f"{row}\n      {found.detail}"
