"""What the shared contract cannot say about inverse_rope_grouped."""

import pytest
import torch

from deepinfer_sm80 import ops
from deepinfer_sm80.errors import TensorContractError
from deepinfer_sm80.ops.kv_cache.rope_quant_insert.reference import rotate
from deepinfer_sm80.ops.projection.inverse_rope_grouped.kernel import inverse_rope_grouped as kernel
from deepinfer_sm80.testing.graphs import NoHostSync

OP = "inverse_rope_grouped"
IMPLEMENTATIONS = (lambda **k: ops.spec(OP).reference(**k), lambda **k: ops.pytorch(OP)(**k), kernel)


def case(name, device):
    return dict(dict(ops.spec(OP).cases(device))[name])


@pytest.mark.parametrize("run", IMPLEMENTATIONS)
def test_heads_are_grouped_in_order_and_nope_dims_copied(run, device):
    kwargs = case("T5-H16of16-G2", device)
    kwargs["o"] = kwargs["o"].clone()
    kwargs["o"][1, 9, 3] = float("nan")  # copied, not computed
    out = run(**kwargs).view(5, 16, 512)
    assert torch.equal(
        out[..., :448].contiguous().view(torch.int16), kwargs["o"][..., :448].contiguous().view(torch.int16)
    )
    assert run(**kwargs).shape == (5, 2, 8 * 512)


@pytest.mark.parametrize("run", IMPLEMENTATIONS)
def test_undoes_the_rotation_of_the_cache_writer(run, device):
    kwargs = case("T3-H8of64-G1", device)
    kwargs["positions"] = torch.tensor([0, 77, 149], device=device)
    plain = kwargs["o"].clone()
    for t, p in enumerate(kwargs["positions"].tolist()):
        for h in range(8):
            kwargs["o"][t, h, 448:] = rotate(plain[t, h, 448:], kwargs["cos_sin_cache"][p])
    out = run(**kwargs).view(3, 8, 512)[..., 448:]
    error = (out.float() - plain[..., 448:].float()).view(3, 8, 32, 2).norm(dim=-1)
    assert (error <= 2**-7 * plain[..., 448:].float().view(3, 8, 32, 2).norm(dim=-1)).all()  # two bfloat16 roundings


def test_bit_exact_where_nothing_fuses(device):
    for name, kwargs in ops.spec(OP).cases(device):
        reference, launched = (run(**kwargs) for run in IMPLEMENTATIONS[:2])
        assert torch.equal(reference.view(torch.int16), launched.view(torch.int16)), name


@pytest.mark.parametrize("run", IMPLEMENTATIONS)
def test_positions_outside_the_table_are_clamped(run, device):
    kwargs = case("T3-H8of64-G1", device)
    kwargs["positions"] = torch.tensor([-5, 150, 1 << 60], device=device)
    wild = run(**kwargs)
    kwargs["positions"] = torch.tensor([0, 149, 149], device=device)
    assert torch.equal(wild, run(**kwargs))


def test_out_and_many_steps(device):
    T = 70
    kwargs = {
        "o": torch.randn(1, 4096, 512, device=device).bfloat16().expand(T, -1, -1).clone()[:, :2048],
        "positions": torch.arange(T, device=device, dtype=torch.int32) % 7,
        "cos_sin_cache": torch.randn(7, 64, device=device),
        "num_groups": 2048,
    }
    out = torch.full((T, 2048, 512), float("nan"), dtype=torch.bfloat16, device=device)
    with NoHostSync():
        got = ops.pytorch(OP)(**kwargs, out=out)
    assert got is out
    assert torch.equal(out[:63], out[7:])  # token 64 and later are in the second step
    kwargs |= {"o": kwargs["o"][:7], "positions": kwargs["positions"][:7]}
    assert torch.equal(out[:7], ops.spec(OP).reference(**kwargs))


def test_groups_must_divide_the_heads(device):
    with pytest.raises(TensorContractError, match=r"num_groups must be a divisor of the 16 heads, got 3"):
        ops.pytorch(OP)(**{**case("T5-H16of16-G2", device), "num_groups": 3})


@pytest.mark.parametrize("name", [name for name, _ in ops.spec(OP).cases("cpu")])
def test_kernel_gives_the_same_bits(name, device, kernel_gives_the_same_bits):
    kernel_gives_the_same_bits(OP, dict(ops.spec(OP).cases(device))[name])


def test_kernel_takes_slices_and_int32_positions(device, kernel_gives_the_same_bits):
    kwargs = case("T5-H16of16-G2", device)
    kwargs["positions"] = torch.tensor([7, 149, -1, 3, 150, 2], device=device, dtype=torch.int32)[1:]
    kwargs["cos_sin_cache"] = torch.randn(151, 71, device=device)[1:, 3:67]
    kernel_gives_the_same_bits(OP, kwargs)


def test_kernel_with_tokens_an_odd_number_of_elements_apart(device, kernel_gives_the_same_bits):
    kwargs = case("T5-H16of16-G2", device)
    kwargs["o"] = torch.randn(5, 16 * 512 + 1, device=device).bfloat16()[:, :-1].unflatten(-1, (16, 512))
    kernel_gives_the_same_bits(OP, kwargs)


def test_kernel_fills_out(device):
    kwargs = case("T3-H8of64-G1", device)
    out = torch.full((3, 1, 8 * 512), float("nan"), dtype=torch.bfloat16, device=device)
    assert kernel(**kwargs, out=out) is out
    assert torch.equal(out, ops.spec(OP).reference(**kwargs))
