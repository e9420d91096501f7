"""The capture check must refuse what CUDA graph capture refuses, and let plain tensor code pass."""

import pytest
import torch

from deepinfer_sm80.testing.graphs import HostSyncError, NoHostSync

SYNCS = {
    "item": lambda x: x[0].item(),
    "int": lambda x: int(x[0]),
    "bool": lambda x: bool(x[0] > 0),
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: x.numpy(),
    "mask read": lambda x: x[x > 1],
    "mask write": lambda x: x.__setitem__(x > 1, x.sum()),
    "nonzero": lambda x: x.nonzero(),
    "tensor from the host": lambda x: torch.tensor([1, 2]),
    "repeats from data": lambda x: x.repeat_interleave(x.long()),
    "slice by data": lambda x: x[: x[1].long()],
}


@pytest.mark.parametrize("name", SYNCS)
def test_sync_is_refused(name):
    with pytest.raises(HostSyncError), NoHostSync():
        SYNCS[name](torch.arange(4.0))


def test_masked_arithmetic_passes():
    x = torch.arange(4.0)
    with NoHostSync():
        y = torch.where(x > 1, x, 0.0)[x.long().clamp(0, 3)]
    assert y.tolist() == [0.0, 0.0, 2.0, 3.0]
