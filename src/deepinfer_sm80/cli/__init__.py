"""The command ``deepinfer-sm80``. Each subcommand is a module here with ``add_parser(subparsers)`` and ``run(args)``.

Exit codes: 0 yes, 1 no (``doctor``: would not serve; ``demo``, ``verify``: an operator disagrees; ``plan``: nothing
fits; ``sensitivity``: a component goes unnoticed), 2 an error in what was asked.
"""

from __future__ import annotations

import argparse
import sys
from importlib import import_module
from typing import TYPE_CHECKING

from deepinfer_sm80 import __version__
from deepinfer_sm80.errors import DeepInferError

if TYPE_CHECKING:
    from collections.abc import Sequence

COMMANDS: dict[str, str] = {
    "doctor": "doctor",
    "demo": "demo",
    "verify": "verify",
    "ops": "ops",
    "env": "env",
    "make-checkpoint": "make_checkpoint",
    "plan": "plan",
    "sensitivity": "sensitivity",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line ``argv`` (default: the process's own) and return its exit code."""
    modules = {command: import_module(f"{__name__}.{module}") for command, module in COMMANDS.items()}
    args = _parser(modules.values()).parse_args(argv)
    try:
        code: int = modules[args.command].run(args)
        sys.stdout.flush()
    except DeepInferError as error:
        # args[0]: str() of an error that is also a KeyError would quote the sentence
        print(f"deepinfer-sm80 {args.command}: {error.args[0]}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        sys.stderr.close()  # the reader (head, less) has what it wanted
        return 0
    except KeyboardInterrupt:
        return 130
    return code


def _parser(modules: object) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="deepinfer-sm80", description="DeepSeek-V4.1 through a stock vLLM on NVIDIA Ampere GPUs."
    )
    parser.add_argument("--version", action="version", version=f"deepinfer-sm80 {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for module in modules:  # type: ignore[attr-defined]
        module.add_parser(subparsers)
    return parser
