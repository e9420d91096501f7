"""Measuring a checkpoint: decoded matrices are the model's, noise ends where it should, the table adds up."""

import pytest
import torch

from deepinfer_sm80.errors import UnsupportedOptionError
from deepinfer_sm80.model import linear, sensitivity
from deepinfer_sm80.model.checkpoint import Reader, load_tensor
from deepinfer_sm80.model.forward import TextModel
from deepinfer_sm80.model.sensitivity import ROUNDING_NOISE

TOKENS = list(range(1000, 1020))


@pytest.fixture(scope="module")
def model(micro_checkpoint):
    return sensitivity.Model.from_checkpoint(micro_checkpoint)


def test_decoded_matrices_give_the_checkpoints_log_probabilities(model, micro_checkpoint):
    with torch.no_grad():
        want = TextModel.from_checkpoint(micro_checkpoint).prompt_logprobs(TOKENS)
    assert torch.equal(model.logprobs([TOKENS]), want)
    name = "layers.1.ffn.experts.1.w2.weight"
    assert model.source.load(name) is model.source.load(name)
    assert model.source.load(name).dtype == torch.bfloat16


def test_generated_tensors_are_the_written_ones(micro, micro_checkpoint):
    source = sensitivity.Generated(micro, seed=3)
    for name in (
        "layers.0.attn.wq_b.scale",
        "layers.0.attn.wq_b.weight",
        "layers.1.engram.embed.weight",
        "norm.weight",
    ):
        assert torch.equal(source.load(name), load_tensor(micro_checkpoint, name)), name
    assert source.headers.keys() <= Reader(micro_checkpoint).headers.keys()


def test_the_table_compares_with_the_complete_model(model):
    table = sensitivity.measure(model, [TOKENS, TOKENS[:5]], ["attention"])
    rounding, attention = table.changes
    assert (rounding.what, attention.what, table.tokens) == (ROUNDING_NOISE, "attention", 23)
    change = model.logprobs([TOKENS, TOKENS[:5]], "attention") - model.logprobs([TOKENS, TOKENS[:5]])
    assert attention.mean == pytest.approx(change.mean().item())
    assert attention.size == pytest.approx(change.abs().mean().item())
    assert attention.largest == pytest.approx(change.abs().max().item())
    assert 0 < rounding.size < attention.size


def test_noise_is_repeatable_and_ends(model):
    before, exact = model.logprobs([TOKENS]), linear.product
    noisy = []
    for _ in range(2):
        with sensitivity.rounding_noise():
            noisy.append(model.logprobs([TOKENS]))
    assert torch.equal(*noisy)
    assert not torch.equal(noisy[0], before)
    assert linear.product is exact
    assert torch.equal(model.logprobs([TOKENS]), before)


def test_an_unknown_component_is_named(model):
    with pytest.raises(UnsupportedOptionError, match="memory"):
        model.without("memory")


@pytest.mark.parametrize("name", ["product", "project"])
def test_another_order_of_sums_reaches_both_kinds_of_product(monkeypatch, name):
    """What is summed, not what comes out: whether an order shows in the result depends on the machine."""
    x, weight = torch.arange(64.0).view(1, 64).bfloat16(), torch.arange(128.0).view(2, 64).bfloat16()
    seen, matmul = [], linear.matmul
    monkeypatch.setattr(linear, "matmul", lambda a, b: seen.append((a.float(), b.float())) or matmul(a, b))
    with sensitivity.other_order():
        getattr(linear, name)(x, weight)
    getattr(linear, name)(x, weight)
    (turned_x, turned_weight), (plain_x, plain_weight) = seen
    assert torch.equal(turned_x, x.float().flip(-1))
    assert torch.equal(turned_weight, weight.float().flip(-1))
    assert torch.equal(plain_x, x.float())
    assert torch.equal(plain_weight, weight.float())
