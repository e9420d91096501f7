import importlib
import os

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from deepinfer_sm80 import ops
from deepinfer_sm80.testing.cloning import clone_arguments, storage_bytes
from deepinfer_sm80.testing.poison import poisoned_empty

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


@pytest.fixture
def kernel_gives_the_same_bits():
    """``f(op, kwargs)``: an exact kernel gives its reference's bits in poisoned memory and writes no other byte."""

    def check(op, kwargs):
        kernel = getattr(importlib.import_module(f"{ops.__name__}.{ops.OPS[op]}.{op}.kernel"), op)
        for_kernel, for_reference = clone_arguments(kwargs), clone_arguments(kwargs)
        with poisoned_empty():
            got = kernel(**for_kernel)
        want = ops.spec(op).reference(**for_reference)
        got, want = (v if isinstance(v, tuple) else (v,) for v in (got, want))
        for g, w in zip(got, want, strict=True):
            assert (g is None and w is None) or (g.dtype, g.shape) == (w.dtype, w.shape)
            assert g is None or torch.equal(g.contiguous().view(torch.uint8), w.contiguous().view(torch.uint8))
        for name, value in kwargs.items():
            if isinstance(value, torch.Tensor):
                assert torch.equal(storage_bytes(for_kernel, name), storage_bytes(for_reference, name)), name

    return check
