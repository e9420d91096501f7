"""What the shared contract cannot say about indexer_q_rope_quant."""

import sys

import pytest
import torch

from deepinfer_sm80 import ops
from deepinfer_sm80.errors import TensorContractError
from deepinfer_sm80.ops.formats import e4m3
from deepinfer_sm80.ops.indexer.indexer_q_rope_quant import kernel as kernel_room

OP = "indexer_q_rope_quant"
launch = ops.pytorch(OP)
room = sys.modules[launch.__module__]


def example(device, case="T37"):
    return dict(dict(ops.spec(OP).cases(device))[case])


def quarter_turn(device, q):
    """Table of two positions: 0 turns nothing, 1 turns every pair by 90 degrees."""
    table = torch.zeros(2, 64, device=device)
    table[0, :32], table[1, 32:] = 1.0, 1.0
    tokens = q.shape[0]
    return {
        "positions": torch.ones(tokens, dtype=torch.int64, device=device),
        "q": q.bfloat16(),
        "cos_sin_cache": table,
        "weights": torch.ones(tokens, 32, dtype=torch.bfloat16, device=device),
        "softmax_scale": 1.0,
        "head_scale": 1.0,
    }


def test_pairs_of_the_last_64_dims_turn(device):
    q = torch.arange(1, 129, device=device).float().expand(2, 32, 128).clone()
    kwargs = quarter_turn(device, q)
    kwargs["positions"][0] = 0
    codes, scale = launch(**kwargs)
    value = e4m3.decode(codes) * scale[..., None]
    turned = q[1].clone()
    turned[:, 64::2], turned[:, 65::2] = -q[1, :, 65::2], q[1, :, 64::2]
    grid = 2.0**-4  # half a step of three mantissa bits, relative
    assert ((value[0] - q[0]).abs() <= grid * q[0].abs()).all()
    assert ((value[1] - turned).abs() <= grid * turned.abs()).all()


def test_scale_is_the_smallest_power_of_two_that_fits(device):
    q = torch.zeros(1, 32, 128, device=device)
    q[0, 0, 5], q[0, 1, 5], q[0, 2, 127], q[0, 3, 64] = 448.0, 450.0, -224.0, 1e-6
    kwargs = quarter_turn(device, q)
    codes, scale = launch(**kwargs)
    assert scale[0, :4].tolist() == [1.0, 2.0, 0.5, 2.0**-22]
    assert (e4m3.decode(codes[0, 0]).abs().max().item(), e4m3.decode(codes[0, 2]).abs().max().item()) == (448.0, 448.0)
    assert codes[0, 4:].eq(0).all()  # zero heads
    assert scale[0, 4:].eq(2.0**-22).all()


def test_weights_fold_the_query_scale_and_both_factors(device):
    kwargs = example(device) | {"softmax_scale": 0.5, "head_scale": 0.25}
    unscaled = example(device) | {"softmax_scale": 1.0, "head_scale": 1.0}
    folded, plain = launch(**kwargs)[1], launch(**unscaled)[1]
    assert torch.equal(folded, plain * 0.125)
    exponent = (plain / kwargs["weights"].float()).log2()
    assert torch.equal(exponent, exponent.round())


def test_rows_do_not_depend_on_the_tile_they_fall_in(device, monkeypatch):
    whole = launch(**example(device))
    monkeypatch.setattr(room, "_TOKENS_AT_ONCE", 5)
    assert all(torch.equal(a, b) for a, b in zip(launch(**example(device)), whole, strict=True))


def test_views_and_int32_positions(device):
    kwargs = example(device)
    whole = launch(**kwargs)
    wide_q = torch.full((37, 40, 128), 7.0, dtype=torch.bfloat16, device=device)
    wide_q[:, 8:] = kwargs["q"]
    wide_w = torch.full((37, 50), 7.0, dtype=torch.bfloat16, device=device)
    wide_w[:, 3:35] = kwargs["weights"]
    kwargs |= {"q": wide_q[:, 8:], "weights": wide_w[:, 3:35], "positions": kwargs["positions"].clamp(-1, 300).int()}
    assert all(torch.equal(a, b) for a, b in zip(launch(**kwargs), whole, strict=True))


def test_can_be_captured(device, forbid_host_sync):
    kwargs = example(device)
    with forbid_host_sync():
        launch(**kwargs)


def test_wrong_heads_name_the_argument(device):
    kwargs = example(device) | {"weights": torch.zeros(37, 64, dtype=torch.bfloat16, device=device)}
    with pytest.raises(TensorContractError, match=r"weights must be torch.bfloat16 of shape \[T=37, 32\].*\[37, 64\]"):
        launch(**kwargs)


def test_float_query_is_refused(device):
    kwargs = example(device)
    kwargs["q"] = kwargs["q"].float()
    with pytest.raises(TensorContractError, match=r"q must be torch\.bfloat16"):
        launch(**kwargs)


@pytest.mark.parametrize("name", [name for name, _ in ops.spec(OP).cases("cpu")])
def test_kernel_gives_the_same_bits(name, device, kernel_gives_the_same_bits):
    kernel_gives_the_same_bits(OP, example(device, name))


@pytest.mark.parametrize(("head", "column", "unit"), [(8, 0, 8), (8, 8, 8), (1, 3, 1)])
def test_kernel_takes_views_and_int32_positions(head, column, unit, device, kernel_gives_the_same_bits):
    kwargs = {k: v[:3] if k in ("q", "positions", "weights") else v for k, v in example(device).items()}
    wide_q = torch.full((3, 40, 128 + 16), 7.0, dtype=torch.bfloat16, device=device)
    wide_q = wide_q[:, head : head + 32, column : column + 128].copy_(kwargs["q"])
    wide_w = torch.full((3, 50), 7.0, dtype=torch.bfloat16, device=device)
    wide_w = wide_w[:, 3:35].copy_(kwargs["weights"])
    assert kernel_room._unit(wide_q) == unit
    positions = torch.tensor([5, 5, 199, 199, -7, -7, 300], dtype=torch.int32, device=device)[1::2]
    kernel_gives_the_same_bits(OP, kwargs | {"q": wide_q, "weights": wide_w, "positions": positions})


def test_kernel_on_infinities_zeros_and_tiny_heads(device, kernel_gives_the_same_bits):
    kwargs = {k: v[:2] if k in ("q", "positions", "weights") else v for k, v in example(device).items()}
    q = kwargs["q"].clone()
    q[0, 0, 5], q[0, 1, 70], q[0, 2], q[0, 3] = float("inf"), -float("inf"), -0.0, float("nan")
    q[0, 4], q[0, 5], q[0, 6] = 1e-38, 3.3e38, torch.tensor([1.0, -1.0], device=device).repeat(64)
    kernel_gives_the_same_bits(OP, kwargs | {"q": q})


def test_kernel_needs_no_host_sync(device, kernel_without_host_sync):
    kernel_without_host_sync(OP, example(device))


def test_kernel_refuses_what_the_launcher_refuses(device):
    kwargs = example(device) | {"cos_sin_cache": torch.zeros(0, 64, device=device)}
    with pytest.raises(TensorContractError, match="cos_sin_cache must be a table with at least one position"):
        kernel_room.indexer_q_rope_quant(**kwargs)
