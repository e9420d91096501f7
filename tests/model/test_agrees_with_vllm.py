"""The specification explains every token that vLLM generated through the plugin on a GPU.

The committed runs hold greedy tokens from a machine that runs an A100's code. The first two prompts need no text: a
nonce cut to one and to two tokens. Given the prompt and the tokens so far, each generated token must be the
specification's best one, or be as good within what rounding moves a log-probability by.
"""

import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from deepinfer_sm80.model.checkpoint import write_checkpoint
from deepinfer_sm80.model.config import preset
from deepinfer_sm80.model.forward import TextModel

RESULTS = Path(__file__).parents[2] / "benchmarks/results/nvidia-h200/prove_ampere"
NONCES = (("0 ", 1), ("7919 ", 2))  # model/prose.py, the first two lengths
TIE = 2.0**-5  # as benchmarks/serving/limits.py


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint") / "tiny"
    write_checkpoint(folder, preset("tiny"), seed=0)
    return folder


def gaps_to_the_best(model, prompt, tokens):
    """float32 [tokens]: how far below the specification's best each generated token is, given those before."""
    with torch.no_grad():
        logits = model.forward(prompt + tokens[:-1]).float()[len(prompt) - 1 :]
    return logits.amax(-1) - logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]


def generated(stage, tiny):
    """Prompt and tokens of the prompts that need no text."""
    tokens = json.loads((RESULTS / f"{stage}.json").read_text())["tokens"]
    tokenizer = Tokenizer.from_file(str(tiny / "tokenizer.json"))
    for (nonce, length), found in zip(NONCES, tokens, strict=False):
        yield tokenizer.encode(nonce, add_special_tokens=False).ids[:length], found


def test_the_first_answer_is_the_specifications(tiny):
    """In every run of the gate: 64 tokens from one; rows of pairs, Engram rows and mixtures are what they need."""
    prompt, tokens = next(generated("eager", tiny))
    gaps = gaps_to_the_best(TextModel.from_checkpoint(tiny), prompt, tokens)
    assert gaps.max() <= TIE
    assert (gaps == 0).sum() >= 60


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["eager", "graphs", "chunked-eager", "chunked", "dspark-eager", "dspark"])
def test_every_generated_token_is_the_best_or_ties(tiny, stage):
    model, best = TextModel.from_checkpoint(tiny), 0
    for prompt, tokens in generated(stage, tiny):
        gaps = gaps_to_the_best(model, prompt, tokens)
        assert gaps.max() <= TIE, f"{stage}, {prompt}: token {int(gaps.argmax())} is {gaps.max():.4f} below the best"
        best += int((gaps == 0).sum())
    assert best >= 120, f"{best} of 128 tokens are the specification's best"
