"""What the parts of the model are given: positions and tables, a layer's own constants, the carried pre-mix; and the
equations that no operator computes, in float64. Each holds a fault that moves log-probabilities too little to be seen.
"""

import dataclasses
import math

import pytest
import torch

from deepinfer_sm80.model import engram_hash, experts, linear, rope, streams
from deepinfer_sm80.model.attention import Step
from deepinfer_sm80.model.cache import as_recorded
from deepinfer_sm80.model.checkpoint import Reader
from deepinfer_sm80.model.compressor import Compressor
from deepinfer_sm80.model.config import preset
from deepinfer_sm80.model.engram import Engram
from deepinfer_sm80.model.forward import TextModel
from deepinfer_sm80.model.schema import expected_tensors
from deepinfer_sm80.model.state import Ring
from deepinfer_sm80.model.switches import COMPONENTS, Switches
from deepinfer_sm80.model.weights import random_tensors

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Given:
    """A source of what a test needs, under the released names."""

    def __init__(self, tensors):
        self.tensors = tensors
        self.headers = {name: ("BF16", tuple(tensor.shape)) for name, tensor in tensors.items()}

    def load(self, name):
        return self.tensors[name]


@pytest.mark.parametrize("layer", range(4))
def test_rows_are_rotated_at_their_first_tokens_position_by_their_layers_table(micro_model, layer):
    """A pair's row at 2c, not at 2c + 1 where it is closed; in layers with compressed rows the window's rows turn by
    the slow table too."""
    model, T = micro_model(), 151
    attention, config, at = model.layers[layer].attention, model.config, torch.arange(T)
    x, ratio = randn(T, config.hidden_size, seed=layer).bfloat16(), config.compress_ratios[layer]
    state = model.new_state()
    state.begin(torch.zeros(T, dtype=torch.int64))
    for part in at.split(75):
        attention.write(x[part], Step(state, part, 0))
    table = rope.table(config, ratio > 0, T)
    kv = linear.rms_norm(linear.project(x, attention.wkv), attention.kv_norm, config.rms_norm_eps)
    assert torch.equal(state.read_window(layer, at), as_recorded(kv, table))
    assert (attention.compressor is None) == (layer not in config.kv_source_layer_ids)
    if attention.compressor is None:
        return
    latent, numbers = attention.compressor(x, 0, Ring(512, CPU)), torch.arange(T // ratio)
    assert torch.equal(state.read_compressed(layer, numbers), as_recorded(latent, table[ratio * numbers]))
    keys = attention.key_maker(latent, ratio * numbers, table)
    assert all(map(torch.equal, state.index_keys(layer, len(numbers)), keys))


@pytest.mark.parametrize("compressed", [False, True])
def test_a_table_holds_cosines_then_sines_of_every_position(compressed):
    i, position = torch.arange(32).double(), torch.arange(500).double()
    inverse = (160000.0 if compressed else 10000.0) ** (-2 * i / 64)
    if compressed:
        kept = 1 - ((i - 15) / (25 - 15)).clamp(0, 1)
        inverse = inverse * kept + inverse / 16 * (1 - kept)
    angle = position[:, None] * inverse
    table = rope.table(preset("released"), compressed, 500)
    assert (table - torch.cat((angle.cos(), angle.sin()), -1)).abs().max() < 1e-4


RELEASED_ENGRAMS = {  # layer: multipliers, first and last prime, rows of the table
    1: ((76632096046245, 4839876093313, 35959672319349, 73987337458391), (16000057, 16000463), 384006168),
    14: ((67716810739261, 51510806800915, 30921347202721, 82619226485591), (16000477, 16000889), 384016682),
}


@pytest.mark.parametrize("layer", RELEASED_ENGRAMS)
def test_an_engram_layer_hashes_with_the_constants_of_its_own_number(layer):
    multipliers, ends, rows = RELEASED_ENGRAMS[layer]
    names = ("embed.weight", "embed.scale", "wkv.weight", "q_weight", "k_weight")
    given = Given({f"layers.{layer}.engram.{name}": torch.ones(1) for name in names})
    engram = Engram(preset("released"), linear.Weights(given, CPU), layer, 7, Switches())
    assert engram.multipliers == multipliers
    assert (int(engram.primes[0]), int(engram.primes[-1])) == ends
    assert int(engram.offsets[-1] + engram.primes[-1]) == rows
    primes = engram_hash.bucket_primes(2, 16_000_000, 4, 8)[0 if layer == 1 else 1]
    history = torch.tensor([5, 99_091, -1, 3, 40_000, 88, 1000])
    want = [engram_hash.ngram_rows(history[: p + 1].flip(0)[:4].tolist(), multipliers, primes, 7) for p in range(7)]
    assert engram.row_ids(history).tolist() == want


def test_look_backs_before_the_text_are_the_pad_tokens_compressed_id(micro, micro_checkpoint):
    compressed = [(7 * i + 3) % micro.engram_compressed_vocab_size for i in range(micro.vocab_size)]
    engram = TextModel(micro, Reader(micro_checkpoint), compressed).layers[1].engram
    primes = engram_hash.bucket_primes(1, 100, 4, 8)[0]
    want = engram_hash.ngram_rows([55], engram.multipliers, primes, 7 * micro.engram_pad_token_id + 3)
    assert engram.row_ids(torch.tensor([55])).tolist() == [want]


def test_engram_gates_are_the_equation():
    """At the hidden size 64, where a missing root of it moves a score eightfold; a score of 0 counts as positive."""
    H, T, eps = 64, 12, 1e-20
    config, given = preset("tiny"), {}
    given["embed.weight"] = torch.randint(0, 0x40, (config.engram_num_embeddings[1], 256), dtype=torch.uint8)
    given["embed.scale"] = torch.full((config.engram_num_embeddings[1], 8), 127, dtype=torch.uint8)
    given["wkv.weight"] = randn(5 * H, 24 * 256, seed=1).div(24 * 16).bfloat16()
    given |= {f"{side}_weight": (1 + randn(4, H, seed=2 + i) / 4).bfloat16() for i, side in enumerate("qk")}
    source = Given({f"layers.2.engram.{name}": tensor for name, tensor in given.items()})
    engram = Engram(config, linear.Weights(source, CPU), 2, 7, Switches())
    X, history = randn(T, 4, H, seed=4).bfloat16(), torch.arange(T) * 77
    X[3, 1], X[5] = 0, X[5] * 2.0**-32  # small enough for eps to count
    out = (engram.rows(history).double() @ given["wkv.weight"].double().T).bfloat16().double()
    K, V, x = out[:, : 4 * H].view(T, 4, H), out[:, 4 * H :], X.double()
    d = (x * given["q_weight"].double() * given["k_weight"].double() * K).sum(-1) / math.sqrt(H)
    d = d / (x.square().mean(-1) + eps).sqrt() / (K.square().mean(-1) + eps).sqrt()
    gate = torch.where(d < 0, -1, 1) * d.abs().clamp_min(1e-6).sqrt()
    assert d[3, 1] == 0
    assert (d < -0.5).any()
    assert (d > 0.5).any()
    want = x + gate.sigmoid()[..., None] * V[:, None]
    assert ((engram(X, history).double() - want).abs() <= 2**-8 * want.abs() + 2**-10).all()


@pytest.mark.parametrize("layer", [1, 2])
def test_latents_are_rounded_once(micro, layer):
    """Behind the norm: rows and pooled rows enter it in float32. A rounding more moves every third element."""
    H, T, name = micro.hidden_size, 40, f"layers.{layer}.attn.compressor"
    given = {"wkv": randn(512, H, seed=1) / 8, "wgate": randn(512, H, seed=2) / 2, "norm": 1 + randn(512, seed=3) / 8}
    given = {part: tensor.bfloat16() for part, tensor in given.items()}
    source = Given({f"{name}.{part}.weight": tensor for part, tensor in given.items()})
    compressor = Compressor(micro, linear.Weights(source, CPU), layer, Switches())
    x = randn(T, H, seed=4).bfloat16()
    rows, gate = (x.double() @ given[part].double().T for part in ("wkv", "wgate"))
    if micro.compress_ratios[layer] == 2:
        rows = (gate.view(-1, 2, 512).softmax(1) * rows.view(-1, 2, 512)).sum(1)
    want = rows / rows.square().mean(-1, keepdim=True).sqrt() * given["norm"].double()
    got = compressor(x, 0, Ring(512, CPU) if micro.compress_ratios[layer] == 2 else None)
    assert got.shape == want.shape
    assert (got == want.bfloat16()).float().mean() > 0.99


def expert_of(gates, ups):
    """An expert whose gate and up values are given, of an input of ones; its activation is read as it is."""
    names = {"w1": gates[:, None], "w3": ups[:, None], "w2": torch.eye(len(gates))}
    given = Given({f"e.{name}.weight": tensor.bfloat16() for name, tensor in names.items()})
    return experts.Expert(linear.Weights(given, CPU), "e", 10.0, Switches())


def test_an_expert_clamps_its_gate_above_and_its_up_value_on_both_sides():
    gates = torch.tensor([-30.0, -10.0, -12.0, 5.0, 11.0, 30.0]).repeat(3)
    ups = torch.tensor([-30.0, 3.0, 30.0]).repeat_interleave(6)
    got = expert_of(gates, ups).activation(torch.ones(1, 1).bfloat16())[0]
    g, u = gates.double().clamp(max=10), ups.double().clamp(-10, 10)
    assert torch.equal(got, (g / (1 + (-g).exp()) * u).bfloat16())
    assert 0 < got[0] < 1e-10, "silu of -30 times -10, not of -10"


def test_routed_experts_are_rounded_before_the_shared_one_is_added(micro):
    config = dataclasses.replace(micro, n_routed_experts=4, num_experts_per_tok=2)
    headers = {n: e for n, e in expected_tensors(config, draft=False).items() if n.startswith("layers.0.ffn.")}
    source = Given(dict(random_tensors(config, headers, seed=7)))
    source.headers = headers
    layer = experts.Experts(config, linear.Weights(source, CPU), "layers.0.ffn", 4, 2, Switches())
    x = randn(200, config.hidden_size).bfloat16()
    ids, share = layer.route(x)
    routed = torch.zeros(200, config.hidden_size)
    for t in range(200):
        for e, weight in zip(ids[t], share[t], strict=True):
            one = layer.experts[int(e)]
            routed[t] += (weight * linear.product(one.activation(x[t : t + 1]), one.w2)[0]).bfloat16().float()
    shared = linear.product(layer.shared.activation(x), layer.shared.w2).bfloat16()
    want = (routed.bfloat16().float() + shared.float()).bfloat16()
    assert (layer(x) == want).float().mean() > 0.999
    assert ((routed + shared.float()).bfloat16() == want).float().mean() < 0.95


def sinkhorn(scores, iterations=20, eps=1e-6):
    comb = scores.double().softmax(-1) + eps
    comb = comb / (comb.sum(-2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        comb = comb / (comb.sum(-1, keepdim=True) + eps)
        comb = comb / (comb.sum(-2, keepdim=True) + eps)
    return comb


def test_mixtures_are_twenty_iterations_of_sinkhorn(micro):
    """Of scores so far apart that an iteration more or less is seen, and what is added to every share."""
    given = Given({f"h_{n}": torch.zeros(1) for n in ("fn", "scale")} | {"h_base": torch.zeros(24)})
    mixer, scores = streams.Mixer(micro, linear.Weights(given, CPU), "h", Switches()), 6 * randn(50, 4, 4)
    got, want = mixer._sinkhorn(scores), sinkhorn(scores)
    assert (got - want).abs().max() < 2e-5
    for other in (sinkhorn(scores, 19), sinkhorn(scores, 21), sinkhorn(scores, eps=0.0), sinkhorn(scores.mT).mT):
        assert (other - want).abs().max() > 1e-3


def test_coefficients_are_the_equation(micro):
    T, H = 9, micro.hidden_size
    given = {"fn": randn(24, 4 * H, seed=1) / 16, "base": 2 * randn(24, seed=2), "scale": torch.tensor([0.7, 1.3, 1.1])}
    source = Given({f"h_{name}": tensor for name, tensor in given.items()})
    X = randn(T, 4, H, seed=3).mul(torch.tensor([0.1, 1, 2, 5])[:, None]).bfloat16()
    X[5] *= 2.0**-32  # small enough for eps to count
    mix = streams.Mixer(micro, linear.Weights(source, CPU), "h", Switches())(X)
    x, fn, base = X.flatten(1).double(), given["fn"].double(), given["base"].double()
    m = x @ fn.T / (x.square().mean(-1, keepdim=True) + 1e-20).sqrt()
    scores = (m[:, 8:] * 1.1 + base[8:]).view(T, 4, 4)
    assert torch.allclose(mix.pre.double(), (m[:, :4] * 0.7 + base[:4]).sigmoid() + 1e-6, rtol=0, atol=3e-7)
    assert torch.allclose(mix.post.double(), 2 * (m[:, 4:8] * 1.3 + base[4:8]).sigmoid(), rtol=0, atol=1e-6)
    assert torch.allclose(mix.comb.double(), sinkhorn(scores), rtol=0, atol=2e-5)
    y, (pre, post, comb) = randn(T, H, seed=4).bfloat16(), (part.double() for part in mix)
    collapsed = sum(pre[:, s, None] * X[:, s].double() for s in range(4))
    assert ((streams.collapse(X, mix.pre).double() - collapsed).abs() <= 2**-8 * collapsed.abs() + 1e-6).all()
    for j in range(4):
        after = post[:, j, None] * y.double() + sum(comb[:, i, j, None] * X[:, i].double() for i in range(4))
        assert ((streams.write_back(X, y, mix)[:, j].double() - after).abs() <= 2**-8 * after.abs() + 1e-5).all()


def textbook(model, ids):
    """Hidden rows and the draft's features of a whole text: every sublayer collapses the streams with the pre-mix of
    the one before, and so does the head."""
    config, disabled, T = model.config, model.switches.disable, len(ids)
    state, features = model.new_state(), []
    state.begin(model.compressed_ids[ids])
    step = Step(state, torch.arange(T), 0)
    X, pre = model.embed[ids][:, None].repeat(1, 4, 1), torch.tensor([1.0, 0, 0, 0]).expand(T, 4)
    for number, layer in enumerate(model.layers):
        if number in config.dspark_target_layer_ids:
            features.append(X.float().mean(1).bfloat16())
        if number in config.engram_layer_ids and "engram" not in disabled:
            X = layer.engram(X, state.history)
        else:
            assert layer.engram is None

        def attend(x, attention=layer.attention):
            attention.write(x, step)
            return torch.zeros_like(x) if "attention" in disabled else attention(x, step)

        for mixer, norm, sublayer in zip(layer.mixers, layer.norms, (attend, layer.experts), strict=True):
            mix = mixer(X)
            if "mhc_mixing" in disabled:
                assert torch.equal(mix.comb, torch.eye(4).expand(T, 4, 4))
            x = streams.collapse(X, mix.pre if "delayed_premix" in disabled else pre)
            X, pre = streams.write_back(X, sublayer(linear.rms_norm(x, norm, config.rms_norm_eps)), mix), mix.pre
    return linear.rms_norm(streams.collapse(X, pre), model.norm, config.rms_norm_eps), torch.stack(features, dim=1)


IDS = torch.arange(150) * 37 % 1000 + 5


@pytest.mark.parametrize("component", ["", "attention", "engram", "mhc_mixing", "delayed_premix"])
def test_streams_go_through_the_layers_as_the_textbook_says(choosy, component):
    model = choosy(disable=frozenset({component} - {""}))
    out = model.step(IDS, model.new_state())
    hidden, features = textbook(model, IDS)
    assert torch.equal(out.hidden, hidden)
    assert torch.equal(out.features[:, 1:], features[:, 1:]), "layer 1 has an Engram, which no released target has"


@pytest.fixture(scope="module")
def complete(choosy):
    return choosy().hidden(IDS)


@pytest.mark.parametrize("component", COMPONENTS)
def test_leaving_a_component_out_changes_the_result(choosy, complete, component):
    assert (complete[-1] != choosy(disable=frozenset({component})).hidden(IDS)[-1]).any()


def test_every_norm_takes_the_released_eps(choosy, monkeypatch):
    seen, norm = [], linear.rms_norm
    monkeypatch.setattr(linear, "rms_norm", lambda x, weight, eps: seen.append(eps) or norm(x, weight, eps))
    model = choosy()
    model.hidden(IDS[:20])
    own = 2 * 4 + 2 * 4 + 1  # two of every layer, those of queries and key rows, the last
    assert seen == [1e-20] * (own + 2 * len(model.config.kv_source_layer_ids))
