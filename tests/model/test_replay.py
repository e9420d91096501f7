"""Bounded replay on ``micro``: layer 2 is the last KV source, layer 3 lies behind it.

With one layer behind the cut its inputs are exact, so that what differs is only what the shorter windows hide: every
assertion here is bit for bit, equal or different.
"""

import dataclasses

import pytest
import torch

from deepinfer_sm80.errors import SequenceStateError, UnsupportedOptionError
from deepinfer_sm80.model.attention import Attention
from deepinfer_sm80.model.checkpoint import Reader, write_checkpoint
from deepinfer_sm80.model.config import preset
from deepinfer_sm80.model.forward import TextModel
from deepinfer_sm80.model.replay import StepMode, last_full_layer
from deepinfer_sm80.model.switches import Switches

pytestmark = pytest.mark.usefixtures("one_thread")

CUT, BEHIND = 2, 3


@pytest.fixture
def model(micro_model):
    return micro_model(bounded_replay=True)


@pytest.fixture(scope="module")
def trimmed(micro_model, prompt, one_thread):
    """The prompt in one eager step: its output and the state behind it, which nobody moves on."""
    model = micro_model(bounded_replay=True)
    state = model.new_state()
    return model.step(prompt, state), state


def window(state, layer, start, end):
    return state.read_window(layer, torch.arange(start, end))


def compressed(state, layer, count):
    """Rows, index keys and their scales of a KV source."""
    return torch.cat((state.read_compressed(layer, torch.arange(count)).float(), *keys(state, layer, count)), dim=1)


def keys(state, layer, count):
    found = state.index_keys(layer, count)
    return found.values, found.scale[:, None]


def differing(a, b):
    return (a != b).flatten(1).any(1).nonzero()[:, 0].tolist()


@pytest.mark.parametrize(
    ("mode", "rows", "trims"),
    [
        (StepMode(), 128, False),
        (StepMode(), 129, True),
        (StepMode("full"), 512, False),
        (StepMode("piecewise", 767), 700, False),
        (StepMode("piecewise", 768), 700, True),
        (StepMode("piecewise", 768), 128, False),
        (StepMode("piecewise", 1024, replay_graphs=False), 1000, False),
    ],
)
def test_which_steps_are_trimmed(mode, rows, trims):
    assert mode.trims(rows, 128) is trims


def test_an_unknown_mode_is_refused():
    with pytest.raises(UnsupportedOptionError, match="graph='cuda': allowed is one of eager, piecewise, full"):
        StepMode("cuda")


def test_the_last_kv_source_is_where_rows_are_trimmed():
    assert last_full_layer(preset("released")) == 20
    assert last_full_layer(preset("tiny")) == 4
    engram_behind = dataclasses.replace(preset("tiny"), engram_layer_ids=(1, 4))
    assert last_full_layer(engram_behind) is None


def test_a_trimmed_step_computes_the_last_128_rows(whole, trimmed):
    exact, out = whole[0], trimmed[0]
    assert out.kept.nonzero()[:, 0].tolist() == list(range(172, 300))
    assert not out.hidden[:172].any()
    assert not out.features[:172].any()
    assert torch.equal(out.features[172:], exact.features[172:]), "layers 0 to 2 are exact on the rows kept"
    # layer 3 sees [172, p] instead of [p - 127, p]: the last row alone sees all it should
    assert differing(out.hidden[172:], exact.hidden[172:]) == list(range(127))


def test_a_trimmed_step_leaves_every_cached_row_exact(whole, trimmed):
    state, other = trimmed[1], whole[1]
    for layer in range(CUT + 1):
        assert torch.equal(window(state, layer, 0, 300), window(other, layer, 0, 300))
    for layer, count in ((1, 150), (2, 300)):
        assert torch.equal(compressed(state, layer, count), compressed(other, layer, count))
    assert state.valid_from == [0, 0, 0, 172]
    assert torch.equal(window(state, BEHIND, 172, 300), window(other, BEHIND, 172, 300))
    assert window(state, BEHIND, 0, 172).isnan().all(), "never written"


def test_steps_behind_a_trimmed_one_read_its_rows(model, prompt, whole):
    exact, state = whole[0], model.new_state()
    model.step(prompt[:200], state)
    for start, end in ((200, 201), (201, 207), (207, 300)):
        out = model.step(prompt[start:end], state)
        assert out.kept.all()
        assert torch.equal(out.hidden, exact.hidden[start:end])
    assert state.valid_from == [0, 0, 0, 72]


def test_a_chunk_of_129_rows_forgets_the_one_before_it(model, prompt, whole):
    exact, state = whole[0], model.new_state()
    model.step(prompt[:128], state)
    out = model.step(prompt[128:257], state)
    assert out.kept.tolist() == [False] + [True] * 128
    assert differing(out.hidden[1:], exact.hidden[129:257]) == list(range(127))
    assert state.valid_from == [0, 0, 0, 129]


def test_three_layers_behind_the_cut_see_no_row_that_was_trimmed(micro, micro_model, tmp_path, prompt, monkeypatch):
    """Against the untrimmed model whose windows of layers 3 to 5 begin at row 72 of 200 for every row: the rows kept
    then depend on rows kept alone, in every layer."""
    config = dataclasses.replace(
        micro, num_hidden_layers=6, compress_ratios=(0, 2, 1, 1, 1, 1, 0), index_topk=48, candidate_topk_blocks=6
    )
    write_checkpoint(tmp_path / "six", config, seed=5)
    ids = micro_model().compressed_ids.tolist()
    trimming = TextModel(config, Reader(tmp_path / "six"), ids, Switches(bounded_replay=True))
    state, other = trimming.new_state(), trimming.new_state()
    out = trimming.step(prompt[:200], state)
    attend = Attention._attend

    def shortened(self, q, step):
        return attend(self, q, dataclasses.replace(step, floor=72 if self.layer > CUT else 0))

    with monkeypatch.context() as patch:
        patch.setattr(Attention, "_attend", shortened)
        want = trimming.step(prompt[:200], other, keep_all=True)
    assert torch.equal(out.hidden[72:], want.hidden[72:])
    assert torch.equal(out.features[72:], want.features[72:])
    for layer in range(6):
        assert torch.equal(window(state, layer, 72, 200), window(other, layer, 72, 200))
    exact = trimming.step(prompt[:200], trimming.new_state(), keep_all=True)
    assert differing(out.hidden[72:], exact.hidden[72:]) == list(range(128)), "the last row too: its keys differ"
    decoded = trimming.step(prompt[200:203], state).hidden
    assert torch.equal(decoded, trimming.step(prompt[200:203], other).hidden), "decode rows see [p - 127, p]"


@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ([128, 128, 44], {}),
        ([150], {"keep_all": True}),
        ([150], {"mode": StepMode("full")}),
        ([150], {"mode": StepMode("piecewise", 512)}),
    ],
    ids=["short chunks", "prompt log-probabilities", "full graph", "small graph"],
)
def test_steps_that_are_not_trimmed_are_exact(model, prompt, whole, sizes, options):
    state, start = model.new_state(), 0
    for size in sizes:
        out = model.step(prompt[start : start + size], state, **options)
        assert out.kept.all()
        assert torch.equal(out.hidden, whole[0].hidden[start : start + size])
        start += size
    assert state.valid_from == [0] * 4


def test_a_large_piecewise_step_is_an_eager_one(model, prompt, trimmed):
    state = model.new_state()
    out = model.step(prompt, state, StepMode("piecewise", 768))
    assert torch.equal(out.hidden, trimmed[0].hidden)
    assert state.valid_from == [0, 0, 0, 172]


def test_a_prefix_hit_computes_128_rows_again_and_writes_no_cached_row(model, prompt, whole):
    exact, other = whole
    first = model.new_state()
    model.step(prompt, first, keep_all=True)
    before = [compressed(first, layer, count) for layer, count in ((1, 150), (2, 300))]
    state = first.hit(256)
    assert (state.length, state.replay_start, state.cached) == (128, 128, 256)
    assert state.compressed_table.ids == first.compressed_table.ids[:2]
    assert torch.equal(state.history, first.history[:128])
    parts = [model.step(prompt[128:255], state), model.step(prompt[255:300], state)]
    hidden = torch.cat([part.hidden for part in parts])

    after = [compressed(first, layer, count) for layer, count in ((1, 150), (2, 300))]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert torch.equal(compressed(state, 1, 128), compressed(other, 1, 128))
    assert torch.equal(compressed(state, 2, 256), compressed(other, 2, 256))
    assert differing(compressed(state, 2, 300)[256:], compressed(other, 2, 300)[256:]), "written by this sequence"
    assert not set(state.compressed_table.ids[2:]) & set(first.compressed_table.ids)
    # layer 0's rows depend on the token alone; layer 1's on layer 0's window, whole again from p - 127 = 128 on
    assert torch.equal(window(state, 0, 128, 300), window(other, 0, 128, 300))
    assert differing(window(state, 1, 128, 300), window(other, 1, 128, 300)) == list(range(127))
    assert state.valid_from == [128] * 4
    assert not hidden.isnan().any()
    assert differing(hidden, exact.hidden[128:])[:127] == list(range(127))
    assert window(state, 0, 0, 128).isnan().all(), "no window row below the replay exists"


def test_a_hit_is_trimmed_like_any_step(model, prompt, trimmed):
    state = trimmed[1].hit(256)
    out = model.step(prompt[128:], state)
    assert out.kept.sum() == 128
    assert state.valid_from == [128, 128, 128, 172]
    assert not out.hidden.isnan().any()
    later = model.step(prompt[:1], state)
    assert not later.hidden.isnan().any()


def test_a_hit_of_128_tokens_or_fewer_is_dropped(model, prompt, whole):
    first = model.new_state()
    model.step(prompt[:140], first)
    for n in (0, 128):
        state = first.hit(n)
        assert (state.length, state.cached, state.replay_start) == (0, 0, 0)
        assert state.compressed_table.ids == []
    out = model.step(prompt[:60], state)
    assert torch.equal(out.hidden, whole[0].hidden[:60])


def test_a_hit_without_bounded_replay_computes_nothing_again(micro_model, prompt, whole):
    exact, model = whole[0], micro_model()
    first = model.new_state()
    model.step(prompt[:290], first)
    state = first.hit(128)
    assert state.length == 128
    out = model.step(prompt[128:300], state)
    assert torch.equal(out.hidden, exact.hidden[128:])
    out = model.step(prompt[290:], first)
    assert torch.equal(out.hidden, exact.hidden[290:]), "the other sequence is as it was"


def test_what_cannot_be_shared_or_forgotten_is_refused(micro_model, prompt, trimmed):
    state = trimmed[1]
    with pytest.raises(SequenceStateError, match="n of hit must be a multiple of 128 up to the length 300, found 200"):
        state.hit(200)
    with pytest.raises(SequenceStateError, match="found 384"):
        state.hit(384)
    with pytest.raises(SequenceStateError, match=r"between 299 and the length 300, found 298"):
        state.truncate(298)  # layer 3 has rows 172 .. 299: token 298 would need row 171
    hit = state.hit(256)
    with pytest.raises(SequenceStateError, match="n of truncate must be the length 128, found 127"):
        hit.truncate(127)

    lender = micro_model().new_state()
    micro_model().step(prompt[:130], lender)
    lender.hit(128)
    with pytest.raises(SequenceStateError, match="between 128 and the length 130, found 126"):
        lender.truncate(126)
