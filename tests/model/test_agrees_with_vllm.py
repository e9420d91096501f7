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


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["eager", "graphs", "chunked-eager", "chunked", "dspark-eager", "dspark"])
def test_every_generated_token_is_the_best_or_ties(tiny, stage):
    generated = json.loads((RESULTS / f"{stage}.json").read_text())["tokens"]
    tokenizer = Tokenizer.from_file(str(tiny / "tokenizer.json"))
    model = TextModel.from_checkpoint(tiny)
    best = 0
    for (nonce, length), tokens in zip(NONCES, generated, strict=False):
        prompt = tokenizer.encode(nonce, add_special_tokens=False).ids[:length]
        with torch.no_grad():
            logits = model.forward(prompt + tokens[:-1]).float()[length - 1 :]
        chosen = logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        gaps = logits.amax(-1) - chosen
        assert gaps.max() <= TIE, (
            f"{stage}, prompt {prompt}: token {int(gaps.argmax())} is {gaps.max():.4f} below the best"
        )
        best += int((gaps == 0).sum())
    assert best >= 120, f"{best} of 128 tokens are the specification's best"
