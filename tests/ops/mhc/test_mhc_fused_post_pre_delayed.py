"""What the shared contract cannot say about mhc_fused_post_pre_delayed."""

import pytest
import torch

from deepinfer_sm80 import ops
from deepinfer_sm80.errors import TensorContractError
from deepinfer_sm80.model.streams import Coefficients, collapse, write_back
from deepinfer_sm80.ops.mhc.mhc_fused_post_pre_delayed import tuning
from deepinfer_sm80.testing.compare import assert_agrees
from deepinfer_sm80.testing.poison import poisoned_empty

OP = "mhc_fused_post_pre_delayed"
FORMS = [pytest.param(ops.pytorch(OP), id="pytorch"), pytest.param(ops.kernel(OP), id="kernel")]


def kwargs_of(name, device):
    return dict(dict(ops.spec(OP).cases(device))[name])


def agrees(got, kwargs, device):
    spec = ops.spec(OP)
    for name, actual, expected in zip(spec.outputs, got, spec.reference(**kwargs), strict=True):
        bound = spec.tolerance_of(name)
        assert_agrees(name, actual, expected, bound if device == "cuda" else bound.interpreted())


@pytest.mark.parametrize("name", dict(ops.spec(OP).cases("cpu")))
def test_streams_are_the_reference_s_bit_for_bit(name, device):
    """The order of the write-back is stated, so nothing is left to a fused multiply-add."""
    kwargs = kwargs_of(name, device)
    with poisoned_empty():
        got = ops.kernel(OP)(**kwargs)
    want = ops.spec(OP).reference(**kwargs)
    assert torch.equal(got[0].view(torch.int16), want[0].view(torch.int16))


@pytest.mark.parametrize("tokens", [15, 16, 17])
def test_both_kernels_agree_where_one_takes_over_from_the_other(tokens, device):
    """Below 16 tokens the projection is multiply-adds, from there on tensor cores; the last tile is not full."""
    kwargs = kwargs_of("T19-H1024", device)
    rows = ("x", "residual", "post_mix", "comb", "pre_mix")
    kwargs |= {name: kwargs[name][:tokens].contiguous() for name in rows}
    variant, width, parts = tuning.plan(tokens, 1024)
    assert variant is (tuning.FMA if tokens < 16 else tuning.DOT)
    assert width * (parts - 1) < 1024 <= width * parts
    with poisoned_empty():
        agrees(ops.kernel(OP)(**kwargs), kwargs, device)


@pytest.mark.parametrize("tokens", [1, 12, 16, 128, 129, 2048])
@pytest.mark.parametrize("hidden", [128, 200, 1024, 5120, 8192])
def test_every_column_belongs_to_one_program(tokens, hidden):
    variant, width, parts = tuning.plan(tokens, hidden)
    assert width % variant.constants["BLOCK_H"] == 0
    assert width * (parts - 1) < hidden <= width * parts
    assert tuning.epilogue(hidden).constants["BLOCK_H"] >= hidden


@pytest.mark.parametrize("form", FORMS)
def test_it_is_the_specification_s_write_back_and_collapse(form, device):
    """On values whose sums are exact, the model's functions give the same bits; the next coefficients are a mix."""
    kwargs = kwargs_of("T5-H1280", device)
    g = torch.Generator(device).manual_seed(3)
    for name in ("x", "residual"):
        kwargs[name] = (torch.randint(-8, 9, kwargs[name].shape, generator=g, device=device) / 8).bfloat16()
    for name in ("post_mix", "comb", "pre_mix"):
        kwargs[name] = torch.randint(0, 5, kwargs[name].shape, generator=g, device=device) / 4
    kwargs["norm_weight"] = torch.ones_like(kwargs["norm_weight"])
    streams, post, comb, layer_input, pre = form(**kwargs)
    mix = Coefficients(kwargs["pre_mix"], kwargs["post_mix"], kwargs["comb"])
    assert torch.equal(streams, write_back(kwargs["residual"], kwargs["x"], mix))
    u = collapse(streams, kwargs["pre_mix"]).double()
    want = u / (u.square().mean(-1, keepdim=True) + kwargs["norm_eps"]).sqrt()
    torch.testing.assert_close(layer_input.double(), want, rtol=2.0**-7, atol=2.0**-8)
    ones = torch.ones(5, 4, device=device)
    torch.testing.assert_close(comb.sum(-2), ones, rtol=0, atol=1e-4)  # the last division is by column sums
    assert ((post > 0) & (post < 2)).all()
    assert ((pre > 0) & (pre < 1.0001)).all()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("name", "shape"),
    [("residual", (3, 2, 200)), ("comb", (3, 4)), ("fn", (24, 200)), ("base", (8,)), ("norm_weight", (100,))],
)
def test_a_wrong_shape_names_the_argument(form, name, shape, device):
    kwargs = kwargs_of("T3-H200", device)
    kwargs[name] = torch.zeros(shape, dtype=kwargs[name].dtype, device=device)
    with pytest.raises(TensorContractError, match=rf"{name} must be .*got .*"):
        form(**kwargs)


@pytest.mark.parametrize("form", FORMS)
def test_sinkhorn_needs_an_iteration(form, device):
    with pytest.raises(TensorContractError, match="sinkhorn_iters must be 1 or larger, got 0"):
        form(**kwargs_of("T1-H128", device) | {"sinkhorn_iters": 0})


def test_a_row_that_no_kernel_holds_is_refused(device):
    kwargs = kwargs_of("T1-H128", device)
    hidden = tuning.LARGEST + 1
    wide = {"x": (1, hidden), "residual": (1, 4, hidden), "fn": (24, 4 * hidden), "norm_weight": (hidden,)}
    kwargs |= {name: torch.zeros(shape, dtype=kwargs[name].dtype, device=device) for name, shape in wide.items()}
    with pytest.raises(TensorContractError, match=r"of at most 8192 columns, got 8193"):
        ops.kernel(OP)(**kwargs)


@pytest.mark.parametrize("iterations", [1, 2, 20])
def test_iterations_are_counted(iterations, device):
    """One more or one less is another result, beyond the bound, on scores that have not converged."""
    kwargs = kwargs_of("T3-H200", device) | {"sinkhorn_iters": iterations}
    kwargs["base"] = 6 * kwargs["base"]
    agrees(ops.kernel(OP)(**kwargs), kwargs, device)
