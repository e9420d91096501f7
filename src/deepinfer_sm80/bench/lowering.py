"""For which compute capability kernels are compiled in this process: sm80, sm86, or native (what the GPU is).

On a newer GPU, sm80 and sm86 need a test aid that is not part of this package: a module ``ampere_disguise`` with
``apply()``, which reads AMPERE_DISGUISE=8.0 or 8.6 and makes Triton write code for that capability.
"""

from __future__ import annotations

import os
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

from deepinfer_sm80.errors import BenchmarkError

if TYPE_CHECKING:
    from deepinfer_sm80.hardware import Capability

CAPABILITIES: dict[str, Capability] = {"sm80": (8, 0), "sm86": (8, 6)}
LOWERINGS = (*CAPABILITIES, "native")
HELP = (
    "compute capability that kernels are compiled for; native: this GPU's own. Default: sm80 on a newer GPU where the "
    "test aid for it is importable, else native"
)
AID, SETTING = "ampere_disguise", "AMPERE_DISGUISE"


def enter(wanted: str | None, real: Capability) -> str:
    """Make this process compile for ``wanted`` and return the lowering's name for the rows.

    None: sm80 where the aid can be found, else native. A GPU of 8.0 or 8.6 is its own lowering: native is then called
    sm80 or sm86. Raises BenchmarkError where the lowering cannot be had here.
    """
    own = next((name for name, capability in CAPABILITIES.items() if capability == real), None)
    if own is not None:
        if wanted not in (None, "native", own):
            raise BenchmarkError(
                what="--lowering",
                allowed=f"{own} or native on this GPU",
                found=wanted,
                remedy="Code for another 8.x GPU says nothing about this one.",
            )
        return own
    if wanted is None:
        wanted = "native" if find_spec(AID) is None else "sm80"
    if wanted == "native":
        if os.environ.get(SETTING):
            raise BenchmarkError(
                what=SETTING, allowed="unset for --lowering native", found=os.environ[SETTING], remedy="Unset it."
            )
        return "native"
    _apply(wanted)
    return wanted


def _apply(wanted: str) -> None:
    text = ".".join(map(str, CAPABILITIES[wanted]))
    if os.environ.setdefault(SETTING, text) != text:
        raise BenchmarkError(
            what=SETTING, allowed=f"{text} for --lowering {wanted}", found=os.environ[SETTING], remedy="Correct it."
        )
    try:
        import_module(AID).apply()
    except ImportError as error:
        del os.environ[SETTING]
        raise BenchmarkError(
            what=f"--lowering {wanted}",
            allowed=f"used on a GPU of {text}, or with the test aid {AID} and the vLLM it needs",
            found=f"neither ({error})",
            remedy="Put them on PYTHONPATH, or take --lowering native.",
        ) from error
