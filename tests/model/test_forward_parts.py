"""The parts of the text model against the operators' references: the same formula, vectorised."""

import math

import pytest
import torch

from deepinfer_sm80.errors import UnsupportedOptionError
from deepinfer_sm80.model import attention, cache, engram_hash, experts, indexer, linear, rope, streams
from deepinfer_sm80.model.config import preset
from deepinfer_sm80.model.engram import Engram
from deepinfer_sm80.model.schema import expected_tensors
from deepinfer_sm80.model.switches import Switches
from deepinfer_sm80.model.weights import random_tensors
from deepinfer_sm80.ops.attention.sparse_mla_prefill.reference import sparse_mla_prefill
from deepinfer_sm80.ops.engram.engram_lookup.reference import engram_lookup
from deepinfer_sm80.ops.indexer.indexer_k_norm_rope_store.reference import indexer_k_norm_rope_store
from deepinfer_sm80.ops.indexer.indexer_logits_prefill.reference import indexer_logits_prefill
from deepinfer_sm80.ops.indexer.indexer_q_rope_quant.reference import indexer_q_rope_quant
from deepinfer_sm80.ops.indexer.indexer_topk.reference import indexer_topk
from deepinfer_sm80.ops.indexer.select_candidate_blocks.reference import select_candidate_blocks
from deepinfer_sm80.ops.kv_cache.dequantize_and_gather_k_cache.reference import read_record
from deepinfer_sm80.ops.kv_cache.rope_quant_insert.reference import rope_quant_insert
from deepinfer_sm80.ops.mhc.mhc_post.reference import mhc_post
from deepinfer_sm80.ops.projection.inverse_rope_grouped.reference import inverse_rope_grouped


class Tensors:
    """A source with the tensors of one name prefix."""

    def __init__(self, config, prefix):
        self.headers = {n: e for n, e in expected_tensors(config).items() if n.startswith(prefix)}
        self.tensors = dict(random_tensors(config, self.headers, seed=5))

    def load(self, name):
        return self.tensors[name]


def weights_of(config, prefix):
    return linear.Weights(Tensors(config, prefix), torch.device("cpu"))


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def yarn():
    return rope.table(preset("tiny"), True, 2000)


def test_yarn_slows_down_the_pairs_from_15_to_25():
    config = preset("released")
    assert rope.yarn_range(config) == (15, 25)
    plain, slowed = (160000.0 ** (-torch.arange(0, 64, 2) / 64)), rope.inverse_frequencies(config, True)
    assert torch.allclose(slowed[:16], plain[:16])
    assert torch.allclose(slowed[25:], plain[25:] / 16)
    assert (slowed[16:25] < plain[16:25]).all()
    assert torch.allclose(rope.inverse_frequencies(config, False), 10000.0 ** (-torch.arange(0, 64, 2) / 64))


def test_records_are_those_of_rope_quant_insert(yarn):
    latent = (randn(9, 512) * torch.exp2(torch.arange(9.0) - 8)[:, None]).bfloat16()
    latent[3, :64] = 0
    latent[5, :32] *= 2.0**-14  # half of a group of 64: a scale of its own would keep more of it
    pages = torch.zeros(1, 32, 584, dtype=torch.uint8)
    positions = torch.arange(90, 99)
    rope_quant_insert(latent, positions, yarn, pages, torch.arange(9), 1)
    want = torch.stack([read_record(pages, slot) for slot in range(9)])
    assert torch.equal(cache.as_recorded(latent, yarn[positions]), want)


def test_rotation_back_is_inverse_rope_grouped(yarn):
    out, positions = randn(5, 16, 512).bfloat16(), torch.tensor([0, 1, 77, 500, 1999])
    want = inverse_rope_grouped(out, positions, yarn, 8)
    assert torch.equal(rope.rotate(out, yarn[positions], inverse=True).view(5, 8, -1), want)


def test_attend_is_sparse_mla_prefill():
    q, rows, sink = randn(4, 64, 512).bfloat16(), randn(40, 512, seed=1).bfloat16(), randn(64, seed=2)
    sink[5] = -torch.inf
    seen = torch.rand(4, 40, generator=torch.Generator().manual_seed(3)) < 0.6
    seen[2] = False
    indices = torch.full((4, 40), -1, dtype=torch.int32)
    for t in range(4):
        chosen = seen[t].nonzero()[:, 0].int()
        indices[t, : len(chosen)] = chosen
    want = sparse_mla_prefill(q, rows, indices, torch.full((4,), 40), sink, 512**-0.5)
    got = attention.attend(q, rows, seen, sink)
    assert torch.equal(got[2], torch.zeros_like(got[2]))
    assert (got.float() - want.float()).square().mean().sqrt() < 2**-9 * want.float().square().mean().sqrt()


def test_write_back_is_mhc_post_and_mixtures_are_doubly_stochastic(micro):
    X, y = randn(7, 4, micro.hidden_size).bfloat16(), randn(7, micro.hidden_size, seed=1).bfloat16()
    mix = streams.Mixer(micro, weights_of(micro, "layers.0.hc_ffn"), "layers.0.hc_ffn", Switches())(X)
    want = mhc_post(y, X, mix.post, mix.comb)
    assert (streams.write_back(X, y, mix).float() - want.float()).abs().max() <= 2**-7 * want.float().abs().max()
    assert torch.allclose(mix.comb.sum(1), torch.ones(7, 4), atol=1e-4)
    assert torch.allclose(mix.comb.sum(2), torch.ones(7, 4), atol=2e-2)
    assert (mix.comb - mix.comb.transpose(1, 2)).abs().max() > 0.05, "symmetric mixtures would hide a transposition"


def test_collapse_of_the_first_sublayer_selects_stream_0():
    X = randn(3, 4, 64).bfloat16()
    assert torch.equal(streams.collapse(X, streams.first_pre(3, 4, X.device)), X[:, 0])


@pytest.mark.parametrize("layer", [1, 2])
def test_index_scores_and_choice_are_the_operators(micro, yarn, layer):
    ratio, prefix, eps = micro.compress_ratios[layer], f"layers.{layer}.attn.indexer", micro.rms_norm_eps
    weights = weights_of(micro, prefix)
    n, T = 70 // ratio, 70
    latent, at, positions = randn(n, 512).bfloat16(), torch.arange(n) * ratio, torch.arange(T)
    qr, x = randn(T, micro.q_lora_rank, seed=1).bfloat16(), randn(T, micro.hidden_size, seed=2).bfloat16()
    keys = indexer.KeyMaker(micro, weights, layer, Switches())(latent, at, yarn)
    chooser = indexer.Indexer(micro, weights, layer, Switches())
    chooser.topk, chooser.blocks = 11, 3
    lengths = (positions + 1) // ratio
    scores = chooser.scores(qr, x, positions, yarn, keys)

    pages = torch.zeros(1, 128, 132, dtype=torch.uint8)
    k_pre, norm = latent @ weights.matrix(f"{prefix}.wk").T, weights.tensor(f"{prefix}.k_norm.weight")
    closing = at + ratio - 1
    indexer_k_norm_rope_store(k_pre, closing, yarn, norm, eps, pages, torch.arange(n), ratio)
    codes = pages.flatten()[: n * 128].view(n, 128)
    scale = pages.flatten()[128 * 128 :][: n * 4].clone().view(torch.float32)
    q = (qr @ weights.matrix(f"{prefix}.wq_b").T).view(T, 32, 128)
    head_weights = x @ weights.matrix(f"{prefix}.weights_proj").T
    q_codes, folded = indexer_q_rope_quant(positions, q, yarn, head_weights, 128**-0.5, 32**-0.5)
    want = indexer_logits_prefill(q_codes, folded, codes, scale, torch.zeros(T).int(), lengths.int(), n)
    valid = want > -math.inf
    assert (scores - want)[valid].abs().max() < 1e-5 * want[valid].abs().max()

    blocks = select_candidate_blocks(scores, lengths, 3, 8)
    candidates = chooser.candidates(scores, lengths)
    for t in range(T):
        assert set((candidates[t].nonzero()[:, 0] // 8).tolist()) == {b for b in blocks[t].tolist() if b >= 0}
        for listed, limited in ((None, None), (blocks, candidates)):
            columns = indexer_topk(scores, lengths, 11, listed, 8)[t].tolist()
            chosen = chooser.choose(scores, lengths, limited)[t].nonzero()[:, 0].tolist()
            assert chosen == [c for c in columns if c >= 0]


def test_engram_rows_are_the_hash_and_the_lookup(micro):
    engram = Engram(micro, weights_of(micro, "layers.1.engram"), 1, 7, Switches())
    history = torch.tensor([5, 99, -1, 3, 3, 88, 1000, 12])
    primes = engram_hash.bucket_primes(1, 100, 4, 8)[0]
    want = [
        engram_hash.ngram_rows(history[: p + 1].flip(0)[:4].tolist(), engram.multipliers, primes, 7) for p in range(8)
    ]
    ids = engram.row_ids(history)
    assert ids.tolist() == want
    rows = engram_lookup(engram.codes, engram.scales, ids, 0, 24, 0, len(engram.codes))
    assert torch.equal(engram.rows(history), rows.flatten(1))


def test_experts_one_token_at_a_time():
    config = preset("tiny")
    layer = experts.Experts(config, weights_of(config, "layers.3.ffn"), "layers.3.ffn", 8, 2, Switches())
    x = randn(23, config.hidden_size).bfloat16()
    got = layer(x)
    score = torch.nn.functional.softplus(x.float() @ layer.gate.float().T).sqrt()
    for t in range(23):
        first, second = sorted(range(8), key=lambda e: (-(score[t, e] + layer.bias[e]).item(), e))[:2]
        total = score[t, first] + score[t, second]
        routed = torch.zeros(config.hidden_size)
        for e in (first, second):
            a = layer.experts[e].activation(x[t : t + 1])
            routed += (score[t, e] * 1.5 / total * (a.float() @ layer.experts[e].w2.float().T)[0]).bfloat16().float()
        shared = layer.shared.activation(x[t : t + 1]) @ layer.shared.w2.T
        want = (routed.bfloat16() + shared[0]).float()
        assert (got[t].float() - want).abs().max() <= 2**-7 * want.abs().max()


def test_a_misspelt_component_is_refused():
    with pytest.raises(UnsupportedOptionError, match=r"sink_s.*allowed is any of attention"):
        Switches(frozenset({"sink_s"}))
