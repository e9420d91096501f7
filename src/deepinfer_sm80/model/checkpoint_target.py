"""Whether a checkpoint can be written where the user says."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from deepinfer_sm80.errors import CheckpointError

FIXED = "this is {}, whose place a finished checkpoint cannot take"
HEADROOM = 64_000_000  # tokenizer, headers, index: never more than this


def check_target(target: Path, size: int) -> None:
    """Raises CheckpointError where a checkpoint of ``size`` bytes cannot become ``target``; writes nothing.

    An OSError of the file system passes through.
    """
    _check_parent(target.parent, target)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        kind = "a directory that is not empty" if target.is_dir() else "a file"
        raise CheckpointError(path=target, problem=f"this is {kind}", remedy="Remove it or name another directory")
    if target.exists() and (os.path.ismount(target) or target.samefile(Path.cwd())):
        kind = "a mount point" if os.path.ismount(target) else "the current directory"
        raise CheckpointError(path=target, problem=FIXED.format(kind), remedy=f"Name one inside it: {target / 'model'}")
    free = shutil.disk_usage(target.parent).free
    if free < size + HEADROOM:
        raise CheckpointError(
            path=target,
            problem=f"it needs {(size + HEADROOM) / 1e9:.2f} GB and the disk has {free / 1e9:.2f} GB free",
            remedy="Free some space or name a directory on another disk",
        )


def _check_parent(parent: Path, target: Path) -> None:
    if not parent.is_dir():
        kind = "is not a directory" if os.path.lexists(parent) else "does not exist"
        remedy = f"Correct the name, or make that directory first (mkdir -p {parent})"
        raise CheckpointError(path=target, problem=f"{parent}, where it would be, {kind}", remedy=remedy)
    if not shutil.disk_usage(parent).total:
        problem = f"{parent} is in a file system of the kernel, such as /proc or /sys, which keeps no files"
        raise CheckpointError(path=target, problem=problem, remedy="Name a directory on a disk")
