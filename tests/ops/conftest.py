import os

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"  # before any kernel module is imported


@pytest.fixture
def device():
    return DEVICE


class _ForbidHostSync(TorchDispatchMode):
    """Raises on what waits for the device or shapes a tensor by its values: a CUDA graph can record neither."""

    SYNCS = (
        "_local_scalar_dense",
        "nonzero",
        "masked_select",
        "unique",
        "bincount",
        "repeat_interleave.Tensor",
        "equal",
    )

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = str(func).removeprefix("aten.")
        if name.startswith(self.SYNCS):
            raise AssertionError(f"{name} cannot be captured in a CUDA graph")
        if name.startswith("index") and any(
            getattr(index, "dtype", None) in (torch.bool, torch.uint8)
            for argument in args
            if isinstance(argument, (list, tuple))
            for index in argument
        ):
            raise AssertionError(f"{name} with a mask cannot be captured in a CUDA graph")
        return func(*args, **(kwargs or {}))


@pytest.fixture
def forbid_host_sync():
    """``with forbid_host_sync(): launcher(...)`` fails where capture would, also on a CPU (PyTorch launchers only)."""
    return _ForbidHostSync
