"""Steps over paged caches: however a sequence is cut into steps, the bits are those of one step.

Measured on an x86 CPU (MKL, oneDNN): float32 products of a few rows and bfloat16 products of one row sum in another
order than those of many, and the last elements of a tensor go through another exponential. ``linear.matmul`` and
``linear.sigmoid`` take that away, so equality is exact.
"""

import pytest
import torch

from deepinfer_sm80.errors import SequenceStateError
from deepinfer_sm80.model import linear
from deepinfer_sm80.model.attention import Step
from deepinfer_sm80.model.state import State
from deepinfer_sm80.ops.attention.sparse_mla_prefill.reference import sparse_mla_prefill

pytestmark = pytest.mark.usefixtures("one_thread")

WRONG = [5, 77, 900, 4242, 31, 8]


def run(model, tokens, sizes, state=None):
    """Outputs of steps of ``sizes`` tokens, joined, and the state behind them."""
    state = state or model.new_state()
    parts, start = [], 0
    for size in sizes:
        parts.append(model.step(tokens[start : start + size], state))
        start += size
    return [torch.cat(fields) for fields in zip(*parts, strict=True)], state


def cached_rows(state, layer):
    """Everything that the caches hold of ``layer``: window rows, compressed rows, index keys with their scales."""
    config, held = state.caches.config, [state.read_window(layer, torch.arange(state.length))]
    if layer in config.kv_source_layer_ids:
        count = state.length // config.compress_ratios[layer]
        held += [state.read_compressed(layer, torch.arange(count)), *state.index_keys(layer, count)]
    return held


# Borders inside a pair of the r = 2 compressor (odd), at the window's and the blocks' (32, 128) and beside them.
@pytest.mark.parametrize(
    "sizes",
    [[1] * 5 + [295], [127, 1, 1, 171], [128, 0, 128, 44], [33, 95, 129, 43]],
    ids=str,
)
def test_any_chunking_gives_the_bits_of_one_step(micro_model, prompt, whole, sizes):
    (hidden, kept, features), state = run(micro_model(), prompt, sizes)
    want, other = whole
    assert torch.equal(hidden, want.hidden)
    assert torch.equal(features, want.features)
    assert kept.all()
    assert len(kept) == 300
    for layer in range(4):
        for got, expected in zip(cached_rows(state, layer), cached_rows(other, layer), strict=True):
            assert torch.equal(got, expected)
            assert not got.isnan().any()


def test_what_a_step_gives(micro_model, prompt, whole):
    model, (out, state) = micro_model(), whole
    assert out.hidden.shape == (300, 64)
    assert out.features.shape == (300, 3, 64)
    assert out.hidden.dtype == out.features.dtype == torch.bfloat16
    assert state.length == len(state.history) == 300
    assert torch.equal(model.forward(prompt[:40]), model.logits(out.hidden[:40]))
    logits = model.logits(out.hidden[:39]).float().log_softmax(-1)
    want = logits.gather(1, torch.tensor(prompt[1:40])[:, None])[:, 0]
    assert torch.allclose(model.prompt_logprobs(prompt[:40]), want, atol=1e-5)


def test_blocks_are_scattered_and_sequences_share_the_memory_undisturbed(micro_model, prompt, whole):
    model, (want, state) = micro_model(), whole
    ids = state.window_table.ids
    assert len(ids) == 10
    assert ids != sorted(ids)
    assert len(state.compressed_table.ids) == 3
    first = model.new_state()
    second = State(first.caches)
    for start in range(0, 120, 40):
        model.step(prompt[start + 100 : start + 140], second)
        out = model.step(prompt[start : start + 40], first)
        assert torch.equal(out.hidden, want.hidden[start : start + 40])
    assert not set(first.window_table.ids) & set(second.window_table.ids)


@pytest.mark.parametrize("start", [1, 30, 127, 128])
def test_rejected_drafts_leave_no_trace(micro_model, prompt, whole, start):
    model, (want, _) = micro_model(), whole
    state = model.new_state()
    model.step(prompt[:start], state)
    for accepted in (0, 1, 2, 6):
        out = model.step(prompt[start : start + accepted] + WRONG[accepted:], state)
        assert torch.equal(out.hidden[:accepted], want.hidden[start : start + accepted])
        state.truncate(start + accepted)
        assert state.length == len(state.history) == start + accepted
        for size in (1, 1, 6):
            end = state.length + size
            out = model.step(prompt[state.length : end], state)
            assert torch.equal(out.hidden, want.hidden[end - size : end])
            assert torch.equal(out.features, want.features[end - size : end])
        state.truncate(start)


def test_truncating_far_and_to_nothing(micro_model, prompt, whole):
    model, (want, _) = micro_model(), whole
    state = model.new_state()
    model.step(prompt[200:300], state)
    blocks = set(state.window_table.ids)
    state.truncate(0)
    assert state.window_table.ids == state.compressed_table.ids == []
    model.step(prompt[:90], state)
    assert set(state.window_table.ids) <= blocks, "given back, taken again"
    state.truncate(40)
    assert torch.equal(model.step(prompt[40:75], state).hidden, want.hidden[40:75])
    state.truncate(60)  # a pair begins here: the ring is not asked
    assert torch.equal(model.step(prompt[60:75], state).hidden, want.hidden[60:75])


def test_what_cannot_be_truncated_is_refused(micro_model, prompt):
    state = micro_model().new_state()
    micro_model().step(prompt[:60], state)
    with pytest.raises(SequenceStateError, match=r"n of truncate must be between 0 and the length 60, found 61"):
        state.truncate(61)
    with pytest.raises(SequenceStateError, match=r"between 44 and .*found 43"):
        state.truncate(43)  # the ring holds tokens 44 .. 59, the open pair needs token 42
    state.truncate(45)
    state.truncate(45)
    with pytest.raises(SequenceStateError, match="found -2"):
        state.truncate(-2)


def test_a_sequence_longer_than_the_model_is_refused(micro_model):
    state = micro_model().new_state()
    with pytest.raises(SequenceStateError, match="at most max_position_embeddings = 16384, found 16385"):
        micro_model().step([0] * 16385, state)


@pytest.mark.parametrize("multiply", [linear.product, linear.project])
def test_a_row_of_a_product_does_not_depend_on_the_rows_beside_it(multiply):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(70, 8, 4096, generator=generator).bfloat16()[:, 3]  # rows apart, as a group of heads is
    weight = torch.randn(1024, 4096, generator=generator).bfloat16()
    want = multiply(x, weight)
    assert (want.float() - x.float() @ weight.float().T).abs().max() < 1
    for size in (1, 2, 5, 32, 69):
        assert torch.equal(torch.cat([multiply(part, weight) for part in x.split(size)]), want)
    assert multiply(x[:0], weight).shape == (0, 1024)


def test_an_element_of_a_sigmoid_does_not_depend_on_how_many_follow():
    x = torch.randn(400, generator=torch.Generator().manual_seed(0)) * 4
    want = linear.sigmoid(x)
    assert torch.allclose(want, torch.sigmoid(x), rtol=2**-22)
    assert all(torch.equal(linear.sigmoid(x[:count]), want[:count]) for count in range(400))


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_attention_over_pages_is_the_operator_over_rows(micro_model, layer):
    attention, T = micro_model().layers[layer].attention, 150
    generator = torch.Generator().manual_seed(layer)
    x = torch.randn(T, 64, generator=generator).bfloat16()
    q = torch.randn(T, 64, 512, generator=generator).bfloat16()
    state = micro_model().new_state()
    state.begin(torch.zeros(T, dtype=torch.int64))
    step = Step(state, torch.arange(T), floor=3)
    attention.write(x, step)
    count = T // attention.ratio if attention.ratio else 0
    closed = torch.arange(count) < ((torch.arange(T) + 1) // max(attention.ratio, 1))[:, None]
    step.chosen = closed & (torch.rand(T, count, generator=generator) < 0.2)

    rows = [state.read_compressed(layer, torch.arange(count))] if count else []
    rows = torch.cat((*rows, state.read_window(layer, torch.arange(T))))
    indices = torch.full((T, 256), -1, dtype=torch.int32)
    for p in range(T):
        seen = step.chosen[p].nonzero()[:, 0].tolist() + [count + s for s in range(max(p - 127, 3), p + 1)]
        indices[p, : len(seen)] = torch.tensor(seen, dtype=torch.int32)
    want = sparse_mla_prefill(q, rows, indices, torch.full((T,), 256), attention.sink, 512**-0.5)
    got = attention._attend(q, step)
    assert not got[: 3 if layer == 0 else 0].any(), "no row below the floor is seen"
    assert (got.float() - want.float()).square().mean().sqrt() < 2**-9 * want.float().square().mean().sqrt()
    assert (got.float() - want.float()).abs().max() < 2**-6 * want.float().abs().max()
