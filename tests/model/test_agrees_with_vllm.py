"""The specification explains every token that vLLM generated through the plugin on a GPU.

The committed runs hold greedy tokens from a machine that runs an A100's code. The first two prompts need no text: a
nonce cut to one and to two tokens. Given the prompt and the tokens so far, each generated token must be the
specification's best one, or tie with it: logits are bfloat16, so values between 4 and 8 are 1/32 apart.
"""

import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from deepinfer_sm80.model import readout, weights
from deepinfer_sm80.model.checkpoint import write_checkpoint
from deepinfer_sm80.model.config import preset
from deepinfer_sm80.model.forward import TextModel
from deepinfer_sm80.model.schema import expected_tensors

RESULTS = Path(__file__).parents[2] / "benchmarks/results/nvidia-h200/prove_ampere"
NONCES = (("0 ", 1), ("7919 ", 2))  # model/prose.py, the first two lengths
ULP = 2.0**-5


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint") / "tiny"
    write_checkpoint(folder, preset("tiny"), seed=0)
    return folder


def head_of_the_runs():
    """Their head read another direction, fitted to less text; all other weights are those of today."""
    config, stored = preset("tiny"), json.loads((RESULTS / "readout-of-these-runs.json").read_text())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(readout, "_stored", lambda: stored)
        return dict(weights.random_tensors(config, {"head.weight": expected_tensors(config)["head.weight"]}, seed=0))


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["eager", "graphs", "chunked-eager", "chunked", "dspark-eager", "dspark"])
def test_every_generated_token_is_the_best_or_ties(tiny, stage):
    generated = json.loads((RESULTS / f"{stage}.json").read_text())["tokens"]
    tokenizer = Tokenizer.from_file(str(tiny / "tokenizer.json"))
    model = TextModel.from_checkpoint(tiny)
    model.head = head_of_the_runs()["head.weight"]
    best = 0
    for (nonce, length), tokens in zip(NONCES, generated, strict=False):
        prompt = tokenizer.encode(nonce, add_special_tokens=False).ids[:length]
        with torch.no_grad():
            logits = model.forward(prompt + tokens[:-1]).float()[length - 1 :]
        chosen = logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        gaps = logits.amax(-1) - chosen
        assert gaps.max() <= ULP, (
            f"{stage}, prompt {prompt}: token {int(gaps.argmax())} is {gaps.max():.4f} below the best"
        )
        best += int((gaps == 0).sum())
    assert best >= 120, f"{best} of 128 tokens are the specification's best"
