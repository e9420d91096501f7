"""The preset ``tiny`` on English text: steps, trimmed steps and generation at 8 layers and 1024 wide. Slow: about two
minutes on a quiet core, a third of it for the checkpoint."""

import pydoc_data.topics

import pytest
import torch
from tokenizers import Tokenizer

from deepinfer_sm80.model.checkpoint import write_checkpoint
from deepinfer_sm80.model.config import preset
from deepinfer_sm80.model.forward import TextModel
from deepinfer_sm80.model.generate import generate
from deepinfer_sm80.model.switches import Switches

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint") / "tiny"
    write_checkpoint(folder, preset("tiny"), seed=0)
    return folder


@pytest.fixture(scope="module")
def text(tiny):
    topics = pydoc_data.topics.topics
    words = "\n\n".join(topics[name] for name in sorted(topics))[:5000]
    return Tokenizer.from_file(str(tiny / "tokenizer.json")).encode(words).ids


def test_chunks_and_decode_give_the_bits_of_one_step(tiny, text):
    model = TextModel.from_checkpoint(tiny)
    want = model.step(text[:330], model.new_state())
    state, start = model.new_state(), 0
    for size in (127, 2, 66, 129, 1, 1, 4):
        out = model.step(text[start : start + size], state)
        assert torch.equal(out.hidden, want.hidden[start : start + size])
        assert torch.equal(out.features, want.features[start : start + size])
        start += size
    found = generate(model, text[:200], 6, chunk=77)
    logits = model.forward(text[:200] + found.tokens[:-1])[199:].float()
    assert torch.equal(logits.amax(-1), logits.gather(1, torch.tensor(found.tokens)[:, None])[:, 0])


def test_bounded_replay_leaves_caches_exact_and_moves_what_lies_behind(tiny, text):
    model = TextModel.from_checkpoint(tiny, Switches(bounded_replay=True))
    exact, state = model.new_state(), model.new_state()
    want, out = model.step(text[:300], exact, keep_all=True), model.step(text[:300], state)
    assert state.valid_from == [0] * 5 + [172] * 3
    for source, count in ((2, 150), (4, 300)):
        at = torch.arange(count)
        assert torch.equal(state.read_compressed(source, at), exact.read_compressed(source, at))
        assert torch.equal(state.index_keys(source, count).values, exact.index_keys(source, count).values)
    for layer in range(5):
        at = torch.arange(300)
        assert torch.equal(state.read_window(layer, at), exact.read_window(layer, at))
    assert torch.equal(out.features[172:, 0], want.features[172:, 0]), "layer 5's input is exact"
    a, b = model.logits(out.hidden[172:]).float(), model.logits(want.hidden[172:]).float()
    change = (a.log_softmax(-1) - b.log_softmax(-1)).abs().mean(-1)
    assert change[0] > 0.01
    assert change[-32:].mean() < change[:32].mean(), "the longer its window, the nearer a row is"
    hit = exact.hit(256)
    again = model.step(text[hit.length : 310], hit)
    assert not again.hidden.isnan().any()
    assert not model.step(text[310:311], hit).hidden.isnan().any()
