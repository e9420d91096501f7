"""The ``tiny`` checkpoint tells right from wrong: leaving out any component lowers the mean log-probability of a text
by 0.1, rounding moves log-probabilities by less than 0.01. The text is the prompt of 1,500 tokens: docs/sensitivity.md.
"""

import pytest
import torch

from deepinfer_sm80.model import prose, sensitivity
from deepinfer_sm80.model.config import preset
from deepinfer_sm80.model.engram_hash import compress_vocabulary
from deepinfer_sm80.model.sensitivity import ROUNDING, SENSITIVITY
from deepinfer_sm80.model.tokenizer_files import tokenizer_files


@pytest.fixture(scope="module")
def tokenizer():
    from tokenizers import Tokenizer

    return Tokenizer.from_str(tokenizer_files(preset("tiny"))["tokenizer.json"])


@pytest.fixture(scope="module")
def model(tokenizer):
    config = preset("tiny")
    return sensitivity.Model(config, sensitivity.Generated(config), compress_vocabulary(tokenizer)[0])


@pytest.fixture(scope="module")
def prompts(tokenizer):
    return {len(p): p for p in prose.prompts(lambda text: tokenizer.encode(text, add_special_tokens=False).ids)}


def check(table, rounding_limit):
    rounding, *components = table.changes
    print(*table.changes, sep="\n")  # noqa: T201
    assert 1e-4 < rounding.size < rounding_limit, "the noise must reach the log-probabilities, and stay small"
    assert abs(rounding.mean) < rounding_limit / 4
    assert {c.what: c.mean for c in components if c.mean > -SENSITIVITY} == {}


def test_tf32_drops_13_bits():
    x = torch.tensor([1 + 2**-10, 1 + 2**-12, 1 + 2**-11 + 2**-20])
    assert sensitivity.tf32(x).tolist() == [1 + 2**-10, 1.0, 1 + 2**-10]


def test_a_sentence_tells_large_components_from_rounding(model, prompts):
    table = sensitivity.measure(model, [prompts[64]], ["attention", "mhc_mixing"])
    assert table.complete > -10, "the text must be likelier than under a model that knows nothing: -11.8"
    check(table, 1.5 * ROUNDING)  # 0.0096 was seen


@pytest.mark.slow
def test_a_long_text_notices_every_component(model, prompts):
    check(sensitivity.measure(model, [prompts[1500]]), ROUNDING)
