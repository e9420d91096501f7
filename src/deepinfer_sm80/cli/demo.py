"""``deepinfer-sm80 demo``: a tiny checkpoint, the plugin's decision, text through operators, model and vLLM."""

from __future__ import annotations

import itertools
import os
import shutil
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from deepinfer_sm80 import hardware
from deepinfer_sm80.cli.demo_table import DISAGREES, Compilation, Tally, table
from deepinfer_sm80.cli.devices import usable
from deepinfer_sm80.cli.needs import need

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator


NEXT = (
    ("doctor", "would vLLM use this package on this machine?"),
    ("plan --gpus 8xA100-80GB", "which layouts of your GPUs hold the model, with the command for each"),
    ("verify", "every operator's contract on your own GPU"),
    ("make-checkpoint tiny", "to keep this checkpoint; vllm serve tiny --limit-mm-per-prompt '{\"image\": 0}'"),
)
"""Commands worth trying after the demo, and what each answers."""
PAGES = "README.md: install and serve    ARCHITECTURE.md: a token's way through the rooms    make test: every promise"
_HEADER = f"   {'operator':30} {'case':28} {'agreement':16} {'seconds':>8}\n   " + "-" * 85


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "demo",
        help="write a tiny checkpoint and push real text through the operators, each beside its reference",
        description="Six steps, minutes on two cores without a GPU: write a tiny checkpoint (1 GB), say what the "
        "plugin would do here, push text through every operator beside its reference, then through the whole model, "
        "serve the checkpoint where vLLM would use this package, and print a table. Exit code 0: everything agrees, "
        "1: something does not.",
    )
    parser.add_argument("--dir", type=Path, help="keep the checkpoint here (reused when it exists; default: temporary)")
    parser.add_argument(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="auto, the default: cuda where torch sees a GPU, else cpu (kernels through Triton's interpreter)",
    )


def run(args: argparse.Namespace) -> int:
    """Run the six steps. Returns 0 when every operator agrees with its reference, else 1.

    Raises MissingTorchError, OptionError, CheckpointError, DemoError, ServeError.
    """
    device = _device(args.device)
    start = time.perf_counter()
    with Compilation() as compiled, _checkpoint(args.dir) as directory:
        print("\n2. What the plugin would do here")
        sentence, possible = _print_decision()
        where = "on the GPU" if device == "cuda" else "on the CPU (Triton kernels through its interpreter)"
        print(f"\n3. Real text through the operators of one layer, {where}; each beside its reference")
        tallies = _print_operators(directory, device)
        print("\n4. The whole model on 64 tokens of text, complete and with a part left out (docs/sensitivity.md: all)")
        same = _print_cached(directory)
        _print_sensitivity(directory, device)
        print("\n5. The checkpoint behind vllm serve")
        _print_served(directory, sentence, possible and device == "cuda")
        print(
            "\n6. Every operator: the loosest bound it kept above, and the most that its kernels need on an Ampere SM"
        )
        if not compiled.done():
            print("   (waiting for the compiler)", flush=True)
        for line in table(tallies, compiled.resources()):
            print(f"   {line}")
    failed = sum(1 for tally in tallies.values() if tally.failed)
    verdict = "every operator agrees with its reference" if not failed else f"{failed} disagree with their references"
    print(f"\n{verdict} ({time.perf_counter() - start:.0f} s)")
    _print_next()
    return 1 if failed or not same else 0


def _device(choice: str) -> str:
    """The device, before anything is written. Raises MissingTorchError without a package, OptionError for a GPU that
    is not there."""
    need("demo", "torch", "triton", "numpy", "tokenizers")
    # Triton decides between compiling and interpreting when a kernel module is imported, so this comes first.
    choice = usable(choice) if choice != "auto" else "cuda" if hardware.torch_sees_a_gpu() else "cpu"
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


def _print_decision() -> tuple[str, bool]:
    """Print what the plugin would register; whether vLLM would serve with this package here, as ``doctor`` says it."""
    from deepinfer_sm80.cli.doctor import plugin_decision, verdict
    from deepinfer_sm80.vllm_plugin.activation import ARCHITECTURES

    active, reason = plugin_decision()
    if active:
        print(f"   it would act: {reason}")
    else:
        print(f"   it would leave vLLM as it is: {reason}")
        print("   on a GPU of compute capability 8.x with a supported vLLM it would register:")
    for architecture, target in ARCHITECTURES.items():
        print(f"   {architecture} -> {target}")
    return verdict()


def _print_operators(directory: Path, device: str) -> dict[str, Tally]:
    """Rows of the prompt as they come, dots for the tokens after it, then their sums; a tally of each operator."""
    from deepinfer_sm80.cli.demo_layer import PROSE
    from deepinfer_sm80.cli.demo_operators import DECODED, PREFILL, PROMPT, walk

    print(f"   {PROSE[:96]}...\n\n   prefill: {PROMPT} tokens at once\n{_HEADER}")
    tallies: dict[str, Tally] = {}
    decoded: dict[tuple[str, str], Tally] = {}
    last = 0
    for step in walk(directory, device):
        found = step.found
        if step.phase == PREFILL:
            print(_row(found.op, step.case, found.detail if found.agrees else DISAGREES, found.seconds), flush=True)
        else:
            if not decoded:
                print(f"\n   decode: {DECODED} tokens, one at a time, through the paged caches ", end="")
            print("." if step.last > last else "", end="", flush=True)
            row = decoded.setdefault((found.op, step.case.partition("-ctx")[0]), Tally())
            row.add(found.agrees, found.detail, found.seconds)
        if not found.agrees:
            print(f"\n      {found.op} {step.case}: {found.detail}", flush=True)
        tallies.setdefault(found.op, Tally()).add(found.agrees, found.detail, found.seconds)
        last = step.last
    if decoded:
        print(f"\n{_HEADER}")
    for (op, case), row in decoded.items():
        print(_row(op, f"{row.runs} x {case}", row.agreement, row.seconds))
    return tallies


def _print_cached(directory: Path) -> bool:
    """Whether steps over the paged caches, chunks and single tokens, leave the bits of one pass on one CPU thread."""
    import torch

    from deepinfer_sm80.model import prose
    from deepinfer_sm80.model.checkpoint_files import read_tokenizer
    from deepinfer_sm80.model.forward import TextModel

    tokenizer = read_tokenizer(directory)
    prompts = prose.prompts(lambda text: tokenizer.encode(text, add_special_tokens=False).ids)
    ids = next(prompt for prompt in prompts if len(prompt) == 64)[:40]
    model, threads = TextModel.from_checkpoint(directory), torch.get_num_threads()
    torch.set_num_threads(1)  # more threads share a product out by its size, and then it sums in another order
    try:
        with torch.no_grad():
            whole, state = model.hidden(ids), model.new_state()
            bounds = (0, 17, 34, *range(35, len(ids) + 1))
            steps = [model.step(ids[a:b], state).hidden for a, b in itertools.pairwise(bounds)]
    finally:
        torch.set_num_threads(threads)
    same = torch.equal(torch.cat(steps), whole)
    verdict = "cached = full, bit for bit" if same else "CACHED IS NOT FULL"
    print(f"   {verdict}: {len(ids)} tokens in two chunks and {len(bounds) - 3} single steps against one pass")
    return same


def _print_sensitivity(directory: Path, device: str) -> None:
    from deepinfer_sm80.cli.sensitivity import measure, rows

    table = measure(directory, (64,), device, ("attention", "mhc_mixing"))
    for line in (f"mean log-probability {table.complete:.3f} (nothing known: -11.771)", *rows(table)):
        print(f"   {line}")


def _print_served(directory: Path, sentence: str, possible: bool) -> None:
    """Serve and ask where vLLM would use this package; elsewhere say why not."""
    if not possible:
        print(f"   not here. {sentence}")
        print("   On an Ampere GPU with vLLM beside this package, this step starts vllm serve and asks it over HTTP.")
        return
    from deepinfer_sm80.cli.demo_serve import serve_and_ask

    with tempfile.TemporaryDirectory(prefix="deepinfer-demo-log-") as scratch:
        log = Path(scratch) / "vllm-serve.log"
        for line in serve_and_ask(directory, log, lambda line: print(f"   {line}", flush=True)):
            print(f"   {line}", flush=True)


def _print_next() -> None:
    """Where to go, with a command that works where this one was started: make leaves it in .venv, off PATH."""
    name = "deepinfer-sm80"
    here = Path(sys.argv[0])
    if shutil.which(name) is None and here.name == name:
        name = os.path.relpath(here)
    print("\nWhere to go next")
    for words, what in NEXT:
        print(f"   {name} {words:26} {what}")
    print(f"   {PAGES}")


def _row(op: str, case: str, agreement: str, seconds: float) -> str:
    return f"   {op:30} {case:28} {agreement:16} {seconds:8.3f}"
