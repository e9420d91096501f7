import importlib

import pytest
import torch

from deepinfer_sm80 import ops
from deepinfer_sm80.ops.variants import all_variants, launched
from deepinfer_sm80.testing.cloning import clone_arguments, storage_bytes
from deepinfer_sm80.testing.compare import assert_agrees
from deepinfer_sm80.testing.poison import poisoned_empty


def kernel_of(op):
    return getattr(importlib.import_module(f"{ops.__name__}.{ops.OPS[op]}.{op}.kernel"), op)


@pytest.fixture
def kernel_agrees():
    """``f(op, kwargs)``: a kernel agrees with its reference in poisoned memory, within its tolerance."""

    def check(op, kwargs):
        for_kernel, spec = clone_arguments(kwargs), ops.spec(op)
        with poisoned_empty():
            got = kernel_of(op)(**for_kernel)
        assert_agrees(op, got, spec.reference(**clone_arguments(kwargs)), spec.tolerance)
        for name, value in kwargs.items():
            if isinstance(value, torch.Tensor):
                assert torch.equal(storage_bytes(for_kernel, name), storage_bytes(kwargs, name)), name
        assert {key for key in launched if key.startswith(f"{op}/")} <= {v.key for v in all_variants()}

    return check


@pytest.fixture
def kernel_without_host_sync(monkeypatch, forbid_host_sync):
    """``f(op, kwargs)``: what surrounds the launches could be captured; the launches themselves are left out."""

    def check(op, kwargs):
        kernel = kernel_of(op)
        launches = []
        room = importlib.import_module(kernel.__module__)
        monkeypatch.setattr(room, "run", lambda variant, grid, *arguments: launches.append(variant.key))
        with forbid_host_sync():
            kernel(**kwargs)
        assert launches

    return check
