"""``deepinfer-sm80 make-checkpoint``: a random DeepSeek-V4.1 in the released form, small enough for any machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deepinfer_sm80.model.checkpoint import write_checkpoint
from deepinfer_sm80.model.config import preset, preset_names

if TYPE_CHECKING:
    import argparse


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "make-checkpoint",
        help="write a random checkpoint of a small DeepSeek-V4.1",
        description="Write a random checkpoint of a small DeepSeek-V4.1 that vLLM loads and serves as text only: "
        "vllm serve DIR --limit-mm-per-prompt '{\"image\": 0}'.",
    )
    parser.add_argument("directory", metavar="DIR", help="folder to write; it must be empty or not exist yet")
    parser.add_argument(
        "--preset",
        choices=[name for name in preset_names() if name != "released"],
        default="tiny",
        help="tiny: 1 GB, half a minute on two cores (default); layer: the released widths in nine layers, 10 GB, "
        "four minutes, 5 GB of memory meanwhile",
    )
    parser.add_argument("--seed", type=int, default=0, help="the same seed gives the same weights (default 0)")


def run(args: argparse.Namespace) -> int:
    """Write the checkpoint, a line a shard and one of what was written. Raises CheckpointError, MissingPackageError."""
    written = write_checkpoint(
        args.directory, preset(args.preset), args.seed, progress=lambda line: print(line, flush=True)
    )
    print(f"{written.path}: {written.files} files, {written.bytes / 1e9:.2f} GB, {written.seconds:.0f} s")
    return 0
