"""Random weights: the gains that were asked for, after quantisation, and nothing that is not a number."""

import math

import pytest
import torch

from deepinfer_sm80.errors import CheckpointError
from deepinfer_sm80.model import weight_structure, weights
from deepinfer_sm80.model.config import preset
from deepinfer_sm80.model.schema import expected_tensors
from deepinfer_sm80.ops.formats import e4m3, fp8_block, mxfp4, ue8m0


@pytest.fixture(scope="module")
def tensors(micro):
    return dict(weights.random_tensors(micro, expected_tensors(micro), seed=0))


def test_shapes_and_dtypes_are_the_schema(micro, tensors):
    expected = expected_tensors(micro)
    assert list(tensors) == list(expected)
    for name, (dtype, shape) in expected.items():
        kind = {"BF16": torch.bfloat16, "F32": torch.float32}.get(dtype, torch.uint8)
        assert (tensors[name].dtype, tuple(tensors[name].shape)) == (kind, shape), name


def test_every_tensor_of_the_released_model_has_a_recipe():
    patterns = {pattern for pattern, _ in weights.RECIPES}
    names = [n for n in expected_tensors(preset("released")) if not n.endswith((".scale", "engram.embed.weight"))]
    used = {next(p for p, r in weights.RECIPES if r is weights.recipe(name)) for name in names}
    assert used == patterns, "a recipe that no tensor uses is a misspelt pattern"
    with pytest.raises(CheckpointError, match=r"rotary\.table"):
        weights.recipe("rotary.table")


def decoded(tensors, name):
    weight = tensors[f"{name}.weight"]
    if weight.dtype != torch.uint8:
        return weight.float()
    decode = mxfp4.decode if ".experts." in name else fp8_block.decode
    return decode(weight, tensors[f"{name}.scale"])


@pytest.mark.parametrize(
    ("name", "gain"),
    [
        ("layers.0.attn.wq_a", 1.0),
        ("layers.1.attn.compressor.wgate", weights.WGATE),
        ("layers.2.ffn.experts.1.w1", weights.EXPERT),
        ("layers.2.ffn.experts.1.w2", weights.SUBLAYER / weights.ACTIVATION_RMS),
        ("layers.2.ffn.shared_experts.w3", weights.EXPERT),
        ("head", weights.LOGITS),
        ("mtp.0.main_proj", 1.0),
    ],
)
def test_a_unit_input_comes_out_with_the_gain(tensors, name, gain):
    weight = decoded(tensors, name)
    assert weight.isfinite().all()
    out = (weight.square().sum(1)).mean().sqrt().item()  # RMS of W x over gaussian x of unit RMS
    assert out == pytest.approx(gain, rel=0.04)


def randn(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(9))


def test_key_rows_are_a_code_and_queries_score_it(micro, tensors):
    """Key rows of unit variance; scores of the two halves with their deviations; the output reads what was written."""
    x, u = randn(4000, micro.hidden_size), randn(500, micro.q_lora_rank)
    kv, q = x @ decoded(tensors, "layers.1.attn.wkv").T, u @ decoded(tensors, "layers.1.attn.wq_b").T
    assert kv.std().item() == pytest.approx(1.0, rel=0.1)
    singular = torch.linalg.svdvals(kv[:, :448])
    assert singular[weight_structure.CODE - 1] > 10 * singular[weight_structure.CODE], "more than a code of CODE values"
    scores = torch.einsum("thd,nd->thn", q.view(500, 64, 512), kv / 512**0.5)
    rotated = torch.einsum("thd,nd->thn", q.view(500, 64, 512)[..., 448:], kv[:, 448:] / 512**0.5)
    assert (scores - rotated).std().item() == pytest.approx(weight_structure.QUERY, rel=0.25)
    assert rotated.std().item() == pytest.approx(weight_structure.ROPE_QUERY * (64 / 512) ** 0.5, rel=0.15)
    z = kv.repeat(1, 8) @ decoded(tensors, "layers.1.attn.wo_a").T
    assert z.std().item() == pytest.approx(weight_structure.ATTENTION, rel=0.2)


def test_a_topic_decides_its_experts_by_a_margin():
    config, chosen = preset("tiny"), preset("tiny").num_experts_per_tok
    names = [f"layers.{layer}.ffn.gate.{kind}" for layer in range(8) for kind in ("weight", "bias")]
    found = dict(weights.random_tensors(config, {n: expected_tensors(config)[n] for n in names}, seed=0))
    topics, without_bias = weight_structure.topics(config, 0), 0
    for layer in range(8):
        gate, bias = (found[f"layers.{layer}.ffn.gate.{kind}"].float() for kind in ("weight", "bias"))
        logits = weight_structure.TOPIC * topics @ gate.T  # of a hidden state that is nothing but its topic
        assert torch.allclose(logits.sort(-1).values, torch.linspace(-8, 8, 8).expand_as(logits), atol=0.1)
        score = torch.nn.functional.softplus(logits).sqrt()
        ranked = (score + bias).sort(-1, descending=True)
        margin = ranked.values[:, chosen - 1] - ranked.values[:, chosen]
        assert margin.min() > 0.1
        plain = score.topk(chosen).indices
        without_bias += (plain.sort(-1).values != ranked.indices[:, :chosen].sort(-1).values).any(-1).sum().item()
    assert without_bias > 0.15 * 8 * len(topics), "the bias must change the choice of many topics"


@pytest.mark.parametrize(("name", "limit"), [("tiny", 0.05), ("layer", 0.35)])
def test_no_topic_comes_near_a_tie_as_its_strength_falls(name, limit):
    """The strengths that a topic has in normed hidden states, from the first layer to the last, and between."""
    config, expected = preset(name), expected_tensors(preset(name))
    topics = weight_structure.topics(config, 0)
    strengths = torch.linspace(1.05, 0.35, 29)[:, None, None] * weight_structure.TOPIC
    gates = [n.removesuffix(".weight") for n in expected if n.endswith(".gate.weight")]
    assert len(gates) == config.num_hidden_layers + config.num_nextn_predict_layers
    names = [f"{gate}.{kind}" for gate in gates for kind in ("weight", "bias")]
    found = dict(weights.random_tensors(config, {n: expected[n] for n in names}, seed=0))
    nearest = {}
    for gate in gates:
        draft = gate.startswith("mtp.")
        chosen = config.dspark_num_experts_per_tok if draft else config.num_experts_per_tok
        logits = strengths * (topics @ found[f"{gate}.weight"].float().T)
        ranked = (torch.nn.functional.softplus(logits).sqrt() + found[f"{gate}.bias"]).sort(-1, descending=True).values
        nearest[gate] = (ranked[..., chosen - 1] - ranked[..., chosen]).min().item()
    assert {gate: margin for gate, margin in nearest.items() if margin < limit} == {}


def test_index_keys_and_queries_share_what_attention_asks_for(micro, tensors):
    """On the layer that chooses rows, index scores and attention scores of the same rows go together."""
    latent = randn(300, weight_structure.CODE) @ weight_structure.code(0).T
    u = randn(40, micro.q_lora_rank)
    k = (latent @ decoded(tensors, "layers.2.attn.indexer.wk").T)[:, :64]
    q = (u @ decoded(tensors, "layers.2.attn.indexer.wq_b").T).view(40, 32, 128)[..., :64]
    index = torch.einsum("thd,nd->thn", q, k).relu().mean(1)
    asked = (u @ decoded(tensors, "layers.2.attn.wq_b").T).view(40, 64, 512)
    main = torch.einsum("thd,nd->thn", asked, latent).mean(1)
    together = [torch.corrcoef(torch.stack(pair))[0, 1].item() for pair in zip(index, main, strict=True)]
    assert sum(together) / len(together) > 0.6


def test_activation_rms_and_the_share_that_is_clamped():
    generator = torch.Generator().manual_seed(0)
    gate, up = weights.EXPERT * torch.randn(2, 1_000_000, generator=generator)
    clamped = torch.nn.functional.silu(gate.clamp(max=10)) * up.clamp(-10, 10)
    assert clamped.square().mean().sqrt().item() == pytest.approx(weights.ACTIVATION_RMS, rel=0.05)
    assert 0.05 < (up.abs() > 10).float().mean().item() < 0.15


def test_sinks_are_near_the_logsumexp_of_a_row():
    rows = [math.log(n) + weight_structure.QUERY**2 / 2 for n in (128, 640)]  # of n gaussian scores of deviation QUERY
    assert min(rows) - 3 < weights.SINK_MEAN < max(rows)


def test_engram_tables_hold_numbers_of_order_one(tensors):
    codes, scale = tensors["layers.1.engram.embed.weight"], tensors["layers.1.engram.embed.scale"]
    values = e4m3.decode(codes).unflatten(1, (-1, 32)) * ue8m0.decode(scale)[..., None]
    assert values.isfinite().all()
    assert 0.5 < values.square().mean().sqrt().item() < 2.0
    assert len(codes.unique()) == 128
    assert len(scale.unique()) == 4


def test_a_tensor_depends_on_seed_and_name_alone(micro, tensors):
    name = "layers.2.ffn.experts.1.w3"
    entries = expected_tensors(micro)
    alone = {key: entries[key] for key in (f"{name}.weight", f"{name}.scale")}
    for key, tensor in weights.random_tensors(micro, alone, seed=0):
        assert torch.equal(tensor, tensors[key])
    other = dict(weights.random_tensors(micro, alone, seed=1))
    assert not torch.equal(other[f"{name}.weight"], tensors[f"{name}.weight"])
    assert not torch.equal(tensors["layers.1.ffn.experts.1.w3.weight"], tensors[f"{name}.weight"])


def test_stripes_do_not_change_a_tensor(monkeypatch, micro, tensors):
    """Cut between heads and within them: gaussians in their order, structures row by row."""
    entries = expected_tensors(micro)
    stems = ("layers.0.attn.wq_b", "layers.0.attn.wo_a", "layers.0.ffn.experts.0.w1", "layers.2.attn.indexer.wq_b")
    names = ["embed.weight", *(f"{stem}.{part}" for stem in stems for part in ("weight", "scale"))]
    monkeypatch.setattr(weights, "_STRIPE", 32 * 256 * 5)
    for name, tensor in weights.random_tensors(micro, {n: entries[n] for n in names}, seed=0):
        assert torch.equal(tensor, tensors[name]), name


def test_threads_change_neither_order_nor_bits(micro, tensors):
    before = torch.get_num_threads()
    made = list(weights.random_tensors_ahead(micro, expected_tensors(micro), 0, threads=3))
    assert torch.get_num_threads() == before
    assert [name for name, _ in made] == list(tensors)
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in made)


def test_tensors_are_made_a_few_ahead_and_no_more_after_the_end(monkeypatch, micro):
    """What is ahead is in memory: a checkpoint of any size must not be."""
    asked, make, before = [], weights._made, torch.get_num_threads()
    monkeypatch.setattr(weights, "_made", lambda config, group, seed: asked.append(1) or make(config, group, seed))
    coming = weights.random_tensors_ahead(micro, expected_tensors(micro), 0, threads=2)
    next(coming), next(coming)
    coming.close()
    assert len(asked) <= 2 + 2
    assert torch.get_num_threads() == before
