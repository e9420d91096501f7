"""The command ``deepinfer-sm80``. Each subcommand is a module here with ``add_parser(subparsers)`` and ``run(args)``.

Exit codes: 0 yes, 1 no (``doctor``: would not serve; ``demo``, ``verify``: an operator disagrees; ``plan``: vLLM serves
no layout that holds what was asked for; ``sensitivity``: a component goes unnoticed; ``bench``: slower than the
baseline), 2 an error in what was asked, 128 + N ended by signal N.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
import threading
from importlib import import_module
from typing import TYPE_CHECKING

from deepinfer_sm80 import __version__, envs
from deepinfer_sm80.cli import needs
from deepinfer_sm80.errors import DeepInferError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import FrameType

COMMANDS: dict[str, str] = {
    "doctor": "doctor",
    "demo": "demo",
    "verify": "verify",
    "ops": "ops",
    "env": "env",
    "make-checkpoint": "make_checkpoint",
    "plan": "plan",
    "sensitivity": "sensitivity",
    "bench": "bench",
}
OPERATING = ("demo", "verify", "sensitivity", "bench")  # a variable that is wrong stops them, as it stops the plugin


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line ``argv`` (default: the process's own) and return its exit code."""
    modules = {command: import_module(f"{__name__}.{module}") for command, module in COMMANDS.items()}
    args = _parser(modules.values()).parse_args(argv)
    try:
        with _signals_clean_up():
            if args.command in OPERATING:
                envs.check()
            code: int = modules[args.command].run(args)
            sys.stdout.flush()
    except DeepInferError as error:
        # args[0]: str() of an error that is also a KeyError would quote the sentence
        print(f"deepinfer-sm80 {args.command}: {error.args[0]}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        if not needs.is_needed(error.name):
            raise
        print(f"deepinfer-sm80 {args.command}: {needs.missing(args.command, error.name)}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        sys.stderr.close()  # the reader (head, less) has what it wanted
        return 0
    except KeyboardInterrupt:
        return 130
    except Terminated as ended:
        return 128 + ended.number
    return code


class Terminated(BaseException):
    """The process was asked to end by the signal ``number``."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


@contextlib.contextmanager
def _signals_clean_up() -> Iterator[None]:
    """SIGTERM and SIGHUP end a command as Ctrl-C does, through its clean-up: a container is stopped with SIGTERM.

    A signal that somebody handles or ignores (``nohup``) is left to him.
    """
    numbers = [n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) is signal.SIG_DFL]
    if threading.current_thread() is not threading.main_thread():
        numbers = []

    def end(number: int, frame: FrameType | None) -> None:
        del frame
        for each in numbers:
            signal.signal(each, signal.SIG_IGN)  # a second one must not interrupt the clean-up
        raise Terminated(number)

    for number in numbers:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)


def _parser(modules: object) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="deepinfer-sm80",
        description="DeepSeek-V4.1 through a stock vLLM on NVIDIA Ampere GPUs. Serving needs none of these commands: "
        "vLLM finds the installed package by itself. Begin with doctor; deepinfer-sm80 COMMAND --help explains each.",
        epilog="Exit codes: 0 yes, 1 no (each command says what of), 2 an error in what was asked.",
    )
    parser.add_argument("--version", action="version", version=f"deepinfer-sm80 {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for module in modules:  # type: ignore[attr-defined]
        module.add_parser(subparsers)
    return parser
