"""The ``tiny`` checkpoint tells right from wrong: rounding moves log-probabilities of a text by 0.01, leaving out any
component moves them by 0.1.

The rounding noise is that of another correct implementation, and more: TF32 operands in the streams' mixture,
probabilities that are not rounded, and every product off by 2^-10 of itself before it is rounded to bfloat16.
"""

import contextlib
import pydoc_data.topics

import pytest
import torch

from deepinfer_sm80.model import attention, linear, streams
from deepinfer_sm80.model.config import preset
from deepinfer_sm80.model.engram_hash import compress_vocabulary
from deepinfer_sm80.model.forward import TextModel
from deepinfer_sm80.model.schema import expected_tensors
from deepinfer_sm80.model.switches import COMPONENTS, Switches
from deepinfer_sm80.model.tokenizer_files import tokenizer_files
from deepinfer_sm80.model.weights import random_tensors

LONG_ONLY = {"index_selection", "candidates"}  # act where more rows exist than are chosen
SHORT, LONG = 400, 1500


class Generated:
    """Tensors of ``tiny`` made when asked for, once; dequantised matrices are kept for the next model."""

    def __init__(self, config):
        self.config, self.headers, self.made = config, expected_tensors(config, draft=False), {}

    def load(self, name):
        if name not in self.made:
            stem = name.removesuffix(".scale").removesuffix(".weight")
            pair = {n: self.headers[n] for n in (f"{stem}.weight", f"{stem}.scale", name) if n in self.headers}
            self.made.update(random_tensors(self.config, pair, seed=0))
        return self.made[name]


class Kept(linear.Weights):
    matrices: dict = {}  # noqa: RUF012

    def matrix(self, name):
        if name not in self.matrices:
            self.matrices[name] = super().matrix(name)
        return self.matrices[name]


@pytest.fixture(scope="module")
def tokenizer():
    from tokenizers import Tokenizer

    return Tokenizer.from_str(tokenizer_files(preset("tiny"))["tokenizer.json"])


@pytest.fixture(scope="module")
def model(tokenizer):
    """``model(*components)``: tiny without them."""
    config = preset("tiny")
    source, compressed = Generated(config), compress_vocabulary(tokenizer)[0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(linear, "Weights", Kept)
        patch.setattr(Kept, "matrices", {})
        yield lambda *left_out: TextModel(config, source, compressed, Switches(frozenset(left_out)))


@pytest.fixture(scope="module")
def text(tokenizer):
    topics = pydoc_data.topics.topics
    return tokenizer.encode("\n\n".join(topics[name] for name in sorted(topics))[:20_000]).ids


@contextlib.contextmanager
def rounding_noise(relative=2**-10):
    generator = torch.Generator().manual_seed(1)
    exact, mixed = linear.product, streams.mix_product

    def off(x, weight):
        y = exact(x, weight)
        return y * (1 + relative * torch.randn(y.shape, generator=generator))

    def head_exact(x, weight):
        return x @ weight.T if len(weight) > 100_000 else off(x, weight).bfloat16()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(linear, "product", off)
        patch.setattr(linear, "project", head_exact)
        patch.setattr(streams, "mix_product", lambda x, fn: mixed(tf32(x), tf32(fn)))
        patch.setattr(attention, "round_probabilities", lambda p: p)
        yield


def tf32(x):
    bits = x.view(torch.int32)
    return ((bits + 0xFFF + ((bits >> 13) & 1)) & ~0x1FFF).view(torch.float32)


def line(name, change):
    size = change.abs()
    late = size[512:].mean() if len(size) > 512 else float("nan")
    return (
        f"{name:20} mean |change| {size.mean():.4f}  beyond token 512 {late:.4f}  p99 {size.quantile(0.99):.3f}"
        f"  largest {size.max():.3f}  change of the mean {change.mean():+.4f}"
    )


def changes(model, tokens, components):
    with torch.no_grad():
        base = model().prompt_logprobs(tokens)
        with rounding_noise():
            noise = model().prompt_logprobs(tokens) - base
        print(line("rounding noise", noise))  # noqa: T201
        found = {}
        for name in components:
            found[name] = model(name).prompt_logprobs(tokens) - base
            print(line(name, found[name]))  # noqa: T201
    return noise, found


def test_tf32_drops_13_bits():
    x = torch.tensor([1 + 2**-10, 1 + 2**-12, 1 + 2**-11 + 2**-20])
    assert tf32(x).tolist() == [1 + 2**-10, 1.0, 1 + 2**-10]


def test_a_sentence_tells_large_components_from_rounding(model, text):
    noise, found = changes(model, text[:40], ["attention", "engram", "shared_expert"])
    assert 1e-4 < noise.abs().mean() < NOISE, "the noise must reach the log-probabilities"
    assert {name for name, change in found.items() if change.abs().mean() < SENSITIVITY} == set()


@pytest.mark.slow
def test_a_short_text_tells_a_missing_component_from_rounding(model, text):
    noise, found = changes(model, text[:SHORT], [name for name in COMPONENTS if name not in LONG_ONLY])
    assert noise.abs().mean() < NOISE
    assert noise.abs().mean() > 1e-4, "the noise must reach the log-probabilities"
    assert {name for name, change in found.items() if change.abs().mean() < SENSITIVITY} == set()


@pytest.mark.slow
def test_a_long_text_tells_every_missing_component_from_rounding(model, text):
    noise, found = changes(model, text[:LONG], COMPONENTS)
    assert noise.abs().mean() < NOISE
    sizes = {name: change.abs()[512 if name in LONG_ONLY else 0 :].mean().item() for name, change in found.items()}
    assert {name: size for name, size in sizes.items() if size < SENSITIVITY} == {}


NOISE, SENSITIVITY = 0.015, 0.1
