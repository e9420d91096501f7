"""What the shared contract cannot say about sparse_mla_prefill."""

import math

import pytest
import torch

from deepinfer_sm80 import ops
from deepinfer_sm80.errors import TensorContractError
from deepinfer_sm80.ops.attention.sparse_mla_prefill import kernel
from deepinfer_sm80.ops.contract import Tolerance
from deepinfer_sm80.testing.cloning import clone_arguments, storage_bytes
from deepinfer_sm80.testing.compare import assert_agrees
from deepinfer_sm80.testing.graphs import NoHostSync
from deepinfer_sm80.testing.poison import poisoned_empty

OP = "sparse_mla_prefill"


def case(name, device):
    return dict(dict(ops.spec(OP).cases(device))[name])


def both(kwargs):
    return [ops.spec(OP).reference(**kwargs), ops.pytorch(OP)(**kwargs)]


def every(kwargs):
    return [*both(kwargs), kernel.sparse_mla_prefill(**kwargs)]


def test_hand_worked_softmax(device):
    # Keys 0 and 1 have logits ln 3 and 0 beside a sink of ln 4: weights 3/8 and 1/8, the sink takes 4/8.
    q = torch.zeros(1, 1, 512, device=device)
    q[0, 0, 0] = 1.0
    kv = torch.zeros(3, 512, device=device)
    kv[0, 0], kv[0, 500], kv[1, 511], kv[2] = 1.0, 8.0, 16.0, float("nan")
    kwargs = {
        "q": q.bfloat16(),
        "kv": kv.bfloat16(),
        "indices": torch.tensor([[-1, 0, 3, -5, 1, 2]], dtype=torch.int32, device=device),
        "lens": torch.tensor([5], dtype=torch.int32, device=device),
        "attn_sink": torch.tensor([math.log(4.0)], device=device),
        "softmax_scale": math.log(3.0),
    }
    for out in every(kwargs):
        got = out[0, 0].float().cpu()
        assert got[0] == pytest.approx(0.375, rel=2**-8)
        assert got[500] == pytest.approx(3.0, rel=2**-8)
        assert got[511] == pytest.approx(2.0, rel=2**-8)
        assert got.count_nonzero() == 3


def test_against_float64(device):
    """The reference itself, against softmax in double: only the roundings of p and of the result are between them."""
    kwargs = case("T5-H16-K640", device)
    got = ops.spec(OP).reference(**kwargs)
    for t in range(5):
        listed = [i for i in kwargs["indices"][t].tolist()[: max(kwargs["lens"][t].item(), 0)] if 0 <= i < 300]
        if not listed:
            assert (got[t] == 0).all()
            continue
        rows = kwargs["kv"][listed].double()
        scores = kwargs["q"][t].double() @ rows.T * kwargs["softmax_scale"]
        weights = torch.cat((scores, kwargs["attn_sink"].double()[:, None]), dim=-1).softmax(-1)[:, :-1]
        assert_agrees("out", got[t], (weights @ rows).bfloat16(), ops.spec(OP).tolerance)


def test_this_launcher_is_much_closer_than_the_contract_asks(device):
    # It rounds p against the same maximum: float32 noise flips a p across a rounding boundary now and then
    for name, kwargs in ops.spec(OP).cases(device):
        reference, launched = both(kwargs)
        assert_agrees(name, launched, reference, Tolerance(ulps=4.0, rms=2.0**-9))


def test_tolerance_sees_one_lost_row(device):
    kwargs = case("T1-H64-K640", device)
    kwargs["lens"].fill_(640)
    want = ops.spec(OP).reference(**kwargs)
    kwargs["indices"] = kwargs["indices"].clone()
    kwargs["indices"][0, 0] = -1 if kwargs["indices"][0, 0] >= 0 else 1
    with pytest.raises(AssertionError):
        assert_agrees("out", ops.pytorch(OP)(**kwargs), want, ops.spec(OP).tolerance)


@pytest.mark.parametrize("sink", [0.5, -math.inf])
@pytest.mark.parametrize("length", [0, -3, 6])
def test_no_valid_row_is_zero(length, sink, device):
    kwargs = case("T1-H64-K640", device)
    kwargs["indices"] = torch.full((1, 6), -1, dtype=torch.int32, device=device)
    kwargs["lens"] = torch.tensor([length], dtype=torch.int32, device=device)
    kwargs["attn_sink"] = torch.full((64,), sink, device=device)
    kwargs["kv"] = torch.full_like(kwargs["kv"], float("nan"))
    for out in every(kwargs):
        assert torch.equal(out, torch.zeros_like(out))


def test_huge_logits_do_not_overflow(device):
    kwargs = case("T1-H64-K640", device)
    kwargs["q"] = kwargs["q"] * 2000
    reference, *others = every(kwargs)
    for out in others:
        assert out.isfinite().all()
        assert_agrees("out", out, reference, ops.spec(OP).tolerance)


def test_listed_nan_reaches_only_its_token(device):
    kwargs = case("T5-H16-K640", device)
    kwargs["kv"] = kwargs["kv"].clone()
    kwargs["indices"] = kwargs["indices"].clamp(max=200)
    kwargs["kv"][250] = float("nan")
    kwargs["indices"][0, 0] = 250
    for out in every(kwargs):
        assert out[0].isnan().all()
        assert out[1:].isfinite().all()


def test_strided_out_and_many_steps(device):
    kwargs = case("T5-H16-K640", device)
    tokens = torch.arange(60, device=device) % 5  # 60 * 640 rows: more than one step
    for name in ("q", "indices", "lens"):
        kwargs[name] = kwargs[name][tokens]
    wide = torch.full((60, 20, 512), 7.0, dtype=torch.bfloat16, device=device)
    with NoHostSync():
        ops.pytorch(OP)(**kwargs, out=wide[:, :16])
    assert torch.equal(wide[:5, :16], wide[55:, :16])
    assert_agrees("out", wide[:, :16], ops.spec(OP).reference(**kwargs), ops.spec(OP).tolerance)
    assert (wide[:, 16:] == 7.0).all()


def test_empty_workspace(device):
    kwargs = case("T1-H64-K640", device)
    kwargs["kv"] = kwargs["kv"][:0]
    for out in every(kwargs):
        assert torch.equal(out, torch.zeros_like(out))


def test_padded_sink_is_refused(device):
    kwargs = case("T5-H16-K640", device)
    kwargs["attn_sink"] = torch.zeros(64, device=device)
    with pytest.raises(TensorContractError, match=r"attn_sink must be contiguous torch.float32 of shape \[H=16\]"):
        ops.pytorch(OP)(**kwargs)


# The Triton kernel. In the interpreter, too, it rounds to bfloat16 as a GPU does: the contract's own tolerance holds.


def test_kernel_agrees_with_the_reference(device):
    for name, kwargs in ops.spec(OP).cases(device):
        for_kernel = clone_arguments(kwargs)
        with poisoned_empty():
            got = kernel.sparse_mla_prefill(**for_kernel)
        assert_agrees(name, got, ops.spec(OP).reference(**kwargs), ops.spec(OP).tolerance)
        for argument in ("q", "kv", "indices", "lens", "attn_sink"):
            assert torch.equal(storage_bytes(kwargs, argument), storage_bytes(for_kernel, argument)), argument


def test_kernel_takes_lists_and_lengths_that_begin_anywhere(device):
    """A chunk's rows are slices of the batch's: their int32 lists and lengths start at any element."""
    kwargs = case("T4-H5-K200", device)
    kwargs |= {"q": kwargs["q"][1:], "indices": kwargs["indices"][1:, 1:], "lens": (kwargs["lens"] - 1)[1:]}
    assert kwargs["indices"].data_ptr() % 16
    assert kwargs["lens"].data_ptr() % 16
    got = kernel.sparse_mla_prefill(**kwargs)
    assert_agrees("out", got, ops.spec(OP).reference(**kwargs), ops.spec(OP).tolerance)


@pytest.mark.parametrize("heads", [17, 48])
def test_kernel_masks_the_last_block_of_heads(heads, device):
    kwargs = case("T1-H64-K640", device)
    kwargs |= {"q": kwargs["q"][:, :heads].contiguous(), "attn_sink": kwargs["attn_sink"][:heads].contiguous()}
    kwargs |= {"indices": kwargs["indices"][:, :70], "lens": torch.full_like(kwargs["lens"], 70)}
    wide = torch.full((1, 64, 512), 7.0, dtype=torch.bfloat16, device=device)
    kernel.sparse_mla_prefill(**kwargs, out=wide[:, :heads])
    assert_agrees("out", wide[:, :heads], ops.spec(OP).reference(**kwargs), ops.spec(OP).tolerance)
    assert (wide[:, heads:] == 7.0).all()


def test_kernel_launches_depend_on_shapes_alone(monkeypatch, device):
    kwargs, calls = case("T5-H16-K640", device), []
    monkeypatch.setattr(kernel, "MAX_TOKENS", 4)
    monkeypatch.setattr(kernel, "run", lambda variant, grid, *rest: calls.append((variant, grid, rest)))
    with NoHostSync():
        kernel.sparse_mla_prefill(**kwargs)
    assert [grid for _, grid, _ in calls] == [(1, 4), (1, 1)]
    assert not any(isinstance(x, torch.Tensor) and x.data_ptr() % 16 for _, _, rest in calls for x in rest[2:])
    monkeypatch.undo()
    monkeypatch.setattr(kernel, "MAX_TOKENS", 4)
    assert_agrees("out", kernel.sparse_mla_prefill(**kwargs), both(kwargs)[0], ops.spec(OP).tolerance)


def test_kernel_refuses_rows_it_cannot_read_in_16_bytes(device):
    kwargs = case("T5-H16-K640", device)
    kwargs["q"] = torch.zeros(5, 16 * 512 + 4, dtype=torch.bfloat16, device=device)[:, : 16 * 512].unflatten(
        1, (16, 512)
    )
    with pytest.raises(TensorContractError, match=r"q must be strided along tokens by a multiple of 8 elements"):
        kernel.sparse_mla_prefill(**kwargs)
