"""Greedy generation: the same tokens however the prompt is cut, and those that whole prompts give one by one."""

import pytest
import torch

from deepinfer_sm80.errors import SequenceStateError
from deepinfer_sm80.model.generate import generate, greedy

pytestmark = pytest.mark.usefixtures("one_thread")


def test_of_equal_logits_the_lowest_id_wins():
    token, logprob = greedy(torch.tensor([1.0, 3.0, 3.0, -1.0], dtype=torch.bfloat16))
    assert token == 1
    assert logprob == pytest.approx(3 - torch.tensor([1.0, 3, 3, -1]).logsumexp(0).item(), abs=1e-6)


def test_tokens_are_those_of_whole_prompts(micro_model, prompt):
    model = micro_model()
    found = generate(model, prompt[:33], 5)
    tokens = list(prompt[:33])
    for token, logprob in zip(found.tokens, found.logprobs, strict=True):
        logits = model.forward(tokens)[-1].float()
        assert logits[token] == logits.max()
        assert logprob == pytest.approx(logits.log_softmax(-1)[token].item(), abs=1e-5)
        tokens.append(token)
    assert found.logprobs.dtype == torch.float32


def test_chunks_and_a_prefix_hit_change_nothing(micro_model, prompt):
    model = micro_model()
    state = model.new_state()
    want = generate(model, prompt[:150], 4, state=state)
    assert state.length == 153, "the last token is not computed"
    for options in ({"chunk": 64}, {"chunk": 149}, {"state": state.hit(128)}):
        found = generate(model, prompt[:150], 4, **options)
        assert found.tokens == want.tokens
        assert torch.equal(found.logprobs, want.logprobs)


def test_no_token_to_compute_is_refused(micro_model, prompt):
    model = micro_model()
    state = model.new_state()
    model.step(prompt[:5], state)
    with pytest.raises(SequenceStateError, match="length of the state must be below that of the prompt, 5, found 5"):
        generate(model, prompt[:5], 1, state=state)
    with pytest.raises(SequenceStateError, match="prompt, 0, found 0"):
        generate(model, [], 1)
