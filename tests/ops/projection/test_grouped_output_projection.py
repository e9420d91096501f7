"""What the shared contract cannot say about grouped_output_projection."""

import pytest
import torch

from deepinfer_sm80 import ops
from deepinfer_sm80.errors import TensorContractError
from deepinfer_sm80.ops.contract import Tolerance
from deepinfer_sm80.testing.compare import assert_agrees
from deepinfer_sm80.testing.graphs import NoHostSync

OP = "grouped_output_projection"


def case(name, device):
    return dict(dict(ops.spec(OP).cases(device))[name])


def test_against_float64(device):
    kwargs = case("T3-G2-K4096-R200", device)
    want = torch.stack([kwargs["x"][:, g].double() @ kwargs["weight"][g].double().T for g in range(2)], dim=1)
    for out in (ops.spec(OP).reference(**kwargs), ops.pytorch(OP)(**kwargs)):
        assert out.is_contiguous()
        assert_agrees("out", out, want.bfloat16(), Tolerance(ulps=1.0, rms=2.0**-9))


def test_groups_do_not_mix(device):
    kwargs = case("T5-G8-K512-R24", device)
    want = ops.pytorch(OP)(**kwargs)
    kwargs["x"] = kwargs["x"].clone()
    kwargs["x"][:, 3] = float("nan")
    out = ops.pytorch(OP)(**kwargs)
    assert out[:, 3].isnan().all()
    others = [0, 1, 2, 4, 5, 6, 7]
    assert torch.equal(out[:, others], want[:, others])


def test_long_sums_do_not_lose_small_terms(device):
    """4096 ones: a bfloat16 accumulator stops at 256."""
    x = torch.ones(1, 1, 4096, dtype=torch.bfloat16, device=device)
    assert ops.pytorch(OP)(x, torch.ones(1, 2, 4096, dtype=torch.bfloat16, device=device)).tolist() == [[[4096.0] * 2]]


def test_caller_buffer(device):
    kwargs = case("T5-G8-K512-R24", device)
    out = torch.full((5, 8, 24), float("nan"), dtype=torch.bfloat16, device=device)
    with NoHostSync():
        assert ops.pytorch(OP)(**kwargs, out=out) is out
    assert torch.equal(out, ops.pytorch(OP)(**kwargs))


def test_wrong_group_count_is_refused(device):
    kwargs = case("T5-G8-K512-R24", device)
    kwargs["weight"] = kwargs["weight"][:4]
    with pytest.raises(
        TensorContractError, match=r"weight must be contiguous .*\[G=8, R, K=512\], got .*\[4, 24, 512\]"
    ):
        ops.pytorch(OP)(**kwargs)
