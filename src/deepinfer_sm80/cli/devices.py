"""The option ``--device``."""

from __future__ import annotations

from deepinfer_sm80 import hardware
from deepinfer_sm80.errors import OptionError


def usable(device: str) -> str:
    """``device`` itself. Raises OptionError where it is neither cpu nor a CUDA GPU that torch sees."""
    kind, _, number = device.partition(":")
    there = hardware.torch_sees_a_gpu()
    if device == "cpu" or (kind == "cuda" and there and (not number or number.isdigit())):
        return device
    allowed = "cpu, cuda or cuda:N (N: its number)" if there else "cpu here, where torch sees no CUDA GPU"
    remedy = "Correct it, or drop the option."
    raise OptionError(option="--device", allowed=allowed, found=device, remedy=remedy)
