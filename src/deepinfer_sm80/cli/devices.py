"""The option ``--device``."""

from __future__ import annotations

from deepinfer_sm80 import hardware
from deepinfer_sm80.errors import UnsupportedOptionError


def usable(device: str) -> str:
    """``device`` itself. Raises UnsupportedOptionError where it is neither cpu nor a CUDA GPU that torch sees."""
    kind, _, number = device.partition(":")
    there = hardware.torch_sees_a_gpu()
    if device == "cpu" or (kind == "cuda" and there and (not number or number.isdigit())):
        return device
    allowed = "cpu, cuda or cuda:N" if there else "cpu here: torch sees no CUDA GPU"
    raise UnsupportedOptionError(option="--device", found=device, allowed=allowed, remedy="Drop the option.")
