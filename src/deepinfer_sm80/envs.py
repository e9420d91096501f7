"""Every environment variable this package reads. The table in docs/environment.md is written from this file.

A variable is an object that reads the environment when called, ``envs.DEEPINFER_FORCE()``, so a process may set it
after the import. Standard library only: vLLM loads the plugin in every process it starts.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from deepinfer_sm80.errors import EnvironmentValueError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection


@dataclass(frozen=True, slots=True)
class Switch:
    """A variable that is 1 (on) or 0 (off); unset or empty means ``default``. Anything else raises, naming it."""

    name: str
    meaning: str
    default: bool = False

    def __call__(self) -> bool:
        text = os.environ.get(self.name, "").strip()
        if text not in ("", "0", "1"):
            raise EnvironmentValueError(name=self.name, allowed="0 or 1", got=text, default=int(self.default))
        return self.default if text == "" else text == "1"


@dataclass(frozen=True, slots=True)
class Names:
    """A variable that lists names separated by commas; unset or empty is none of them. A name that is not ``known``
    raises, naming the variable."""

    name: str
    meaning: str
    known: Callable[[], Collection[str]]
    default: str = "none"

    def __call__(self) -> frozenset[str]:
        found = frozenset(os.environ.get(self.name, "").replace(",", " ").split())
        wrong = found - {"all", *self.known()}
        if wrong:
            allowed = f"all, or operators separated by commas (known: {', '.join(self.known())})"
            got = ", ".join(sorted(wrong))
            raise EnvironmentValueError(name=self.name, allowed=allowed, got=got, default=self.default)
        return found


def _operators() -> Collection[str]:
    from deepinfer_sm80.ops import OPS  # which imports this module

    return OPS


DEEPINFER_DISABLE = Switch(
    "DEEPINFER_DISABLE", "1: the plugin registers nothing and vLLM runs as if it were not installed."
)
DEEPINFER_FORCE = Switch(
    "DEEPINFER_FORCE",
    "1: the plugin acts although the GPU is not of compute capability 8.x. For development, not supported.",
)

DEEPINFER_PYTORCH_OPERATORS = Names(
    "DEEPINFER_PYTORCH_OPERATORS",
    "Operators that run as vectorised PyTorch instead of Triton kernels, `all` for every one: slow; to compare, or to "
    "find a suspect.",
    _operators,
)

SWITCHES: tuple[Switch, ...] = (DEEPINFER_DISABLE, DEEPINFER_FORCE)
VARIABLES: tuple[Switch | Names, ...] = (*SWITCHES, DEEPINFER_PYTORCH_OPERATORS)
PREFIX = "DEEPINFER_"


def check() -> None:
    """Raises EnvironmentValueError for the first variable that is set to what it cannot be."""
    for variable in VARIABLES:
        variable()


def fault() -> str | None:
    """The sentence about the first variable that is set to what it cannot be, None where there is none."""
    try:
        check()
    except EnvironmentValueError as error:
        return str(error)
    return None


def unknown() -> str | None:
    """The sentence about variables of this package's prefix that are set and that nothing reads, None where there is
    none."""
    known = [variable.name for variable in VARIABLES]
    names = sorted(name for name in os.environ if name.startswith(PREFIX) and name not in known)
    if not names:
        return None
    return f"unknown variable{'s' * (len(names) > 1)} {', '.join(names)}; known are {', '.join(known)}"


def in_force(variable: Switch | Names) -> str:
    """The value of ``variable`` now, as one word. Raises EnvironmentValueError for nonsense."""
    value = variable()
    return str(int(value)) if isinstance(value, bool) else ",".join(sorted(value)) or "none"


def markdown() -> str:
    """The table of docs/environment.md."""
    rows = [
        f"| `{v.name}` | {v.default if isinstance(v, Names) else int(v.default)} | {v.meaning} |" for v in VARIABLES
    ]
    return "\n".join(["| variable | default | meaning |", "|---|---|---|", *rows])
