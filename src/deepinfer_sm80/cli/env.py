"""``deepinfer-sm80 env``: the environment variables this package reads, and what they are now."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deepinfer_sm80 import envs

if TYPE_CHECKING:
    import argparse

INTRODUCTION = """# Environment variables

Written by `make docs` from `src/deepinfer_sm80/envs.py`; do not edit. Each is read when it is used, in every process.
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "env",
        help="list the environment variables this package reads",
        description="One line for each variable: its name, its value in force, its meaning. Exit code 2: one is set to "
        "a value that it cannot have.",
    )
    parser.add_argument("--markdown", action="store_true", help="print docs/environment.md")


def run(args: argparse.Namespace) -> int:
    """Print the page or the values in force. Raises EnvironmentValueError for a variable set to nonsense."""
    if args.markdown:
        print(page(), end="")
        return 0
    width = max(len(v.name) for v in envs.VARIABLES)
    for variable in envs.VARIABLES:
        print(f"{variable.name:{width}}  {envs.in_force(variable)}  {variable.meaning}")
    if unknown := envs.unknown():
        print(f"warning: {unknown}")
    return 0


def page() -> str:
    """The text of docs/environment.md."""
    return f"{INTRODUCTION}\n{envs.markdown()}\n"
