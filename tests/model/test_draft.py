"""The draft block against a text-book one made of the operators' references, one query at a time."""

import copy
import dataclasses

import pytest
import torch

from deepinfer_sm80.errors import UnsupportedOptionError
from deepinfer_sm80.model import experts, linear, rope, streams
from deepinfer_sm80.model.draft import Draft
from deepinfer_sm80.model.switches import Switches
from deepinfer_sm80.ops.attention.sparse_mla_prefill.reference import sparse_mla_prefill
from deepinfer_sm80.ops.kv_cache.dequantize_and_gather_k_cache.reference import read_record
from deepinfer_sm80.ops.kv_cache.rope_quant_insert.reference import rope_quant_insert
from deepinfer_sm80.ops.mhc.mhc_post.reference import mhc_post
from deepinfer_sm80.ops.projection.inverse_rope_grouped.reference import inverse_rope_grouped

WINDOW, ANCHOR, NOISE = 128, 4242, 128799


@pytest.fixture
def draft(speculative):
    return copy.copy(speculative.draft)


def features(count, draft, seed=0):
    shape = (count, 3, draft.config.hidden_size)
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def context_of(draft, given):
    context = draft.new_context()
    draft.extend(context, given)
    return context


def close(got, want):
    """Two bfloat16 computations with other orders of summation: their RMS difference is below two roundings."""
    return (got.float() - want.float()).square().mean().sqrt() < 2**-8 * want.float().square().mean().sqrt()


class Textbook:
    """Key rows and blocks from the tensors by their released names."""

    def __init__(self, speculative):
        self.config, self.embed = speculative.config, speculative.target.embed
        self.weights = linear.Weights(speculative.source, torch.device("cpu"))
        self.table = rope.table(self.config, False, self.config.max_position_embeddings)

    def norm(self, x, name):
        return linear.rms_norm(x, self.weights.norm(name), self.config.rms_norm_eps)

    def product(self, x, name):
        return (x.double() @ self.weights.matrix(name).double().T).bfloat16()

    def key_rows(self, j, x, positions):
        latent = self.norm(self.product(x, f"mtp.{j}.attn.wkv"), f"mtp.{j}.attn.kv_norm")
        pages, slots = torch.zeros(1, 32 * (len(x) // 32 + 1), 584, dtype=torch.uint8), torch.arange(len(x))
        rope_quant_insert(latent, positions, self.table, pages, slots, 1)
        return torch.stack([read_record(pages, int(slot)) for slot in slots])

    def context(self, j, given, first=0, rounded=linear.unchanged):
        concatenated = rounded(torch.cat((given[:, 0], given[:, 1], given[:, 2]), -1))
        main_x = self.norm(self.product(concatenated, "mtp.0.main_proj"), "mtp.0.main_norm")
        return self.key_rows(j, rounded(main_x), first + torch.arange(len(given)))

    def block(self, contexts, P, anchor, K):
        positions = (P + torch.arange(K)).clamp(max=self.config.max_position_embeddings - 1)
        X = torch.stack([self.embed[[anchor] + [NOISE] * (K - 1)]] * 4, dim=1)
        pre = torch.tensor([1.0, 0, 0, 0]).expand(K, 4)
        for j, context in enumerate(contexts):
            for side, sublayer in (("attn", self.attention), ("ffn", self.experts)):
                mix = streams.Mixer(self.config, self.weights, f"mtp.{j}.hc_{side}", Switches())(X)
                x = sum(pre[:, s, None] * X[:, s].float() for s in range(4)).bfloat16()
                y = sublayer(j, self.norm(x, f"mtp.{j}.{side}_norm"), positions, context)
                X, pre = mhc_post(y, X, mix.post, mix.comb), mix.pre
        return sum(pre[:, s, None] * X[:, s].float() for s in range(4)).bfloat16()

    def attention(self, j, x, positions, context):
        name, K = f"mtp.{j}.attn", len(x)
        rows = torch.cat((context[-WINDOW:], self.key_rows(j, x, positions)))
        q = self.product(self.norm(self.product(x, f"{name}.wq_a"), f"{name}.q_norm"), f"{name}.wq_b").view(K, -1, 512)
        everything = torch.arange(len(rows), dtype=torch.int32).expand(K, -1).contiguous()
        lengths, sink = torch.full((K,), len(rows)), self.weights.tensor(f"{name}.attn_sink")
        q = rope.rotate(q, self.table[positions])
        out = sparse_mla_prefill(q, rows, everything, lengths, sink, 512**-0.5)
        grouped = inverse_rope_grouped(out, positions, self.table, self.config.o_groups)
        wo_a = self.weights.matrix(f"{name}.wo_a").view(self.config.o_groups, -1, grouped.shape[-1])
        z = torch.einsum("tgd,grd->tgr", grouped.double(), wo_a.double()).bfloat16()
        return self.product(z.flatten(1), f"{name}.wo_b")

    def experts(self, j, x, positions, context):
        return experts.Experts(self.config, self.weights, f"mtp.{j}.ffn", 4, 2, Switches())(x)


@pytest.fixture(scope="module")
def textbook(speculative):
    return Textbook(speculative)


def test_the_embedding_and_the_head_are_the_targets(speculative):
    assert speculative.draft.embed is speculative.target.embed
    assert speculative.draft.head is speculative.target.head


def test_context_rows_are_records_of_the_projected_features(draft, textbook):
    given = features(40, draft)
    context = context_of(draft, given)
    for j in range(3):
        want = textbook.context(j, given)
        assert context.rows[j].shape == want.shape == (40, 512)
        assert close(context.rows[j], want)
    assert not close(context.rows[0], context.rows[1])


def test_the_targets_switches_reach_the_draft(speculative, draft, textbook):
    given, target = features(20, draft), copy.copy(speculative.target)
    target.switches = Switches(activation_quant=True)
    rounding = Draft(target, speculative.source)
    context = context_of(rounding, given)
    assert close(context.rows[1], textbook.context(1, given, rounded=linear.as_mxfp8))
    assert not close(context.rows[1], textbook.context(1, given))
    target.switches = Switches(kv_profile="official")
    official = Draft(target, speculative.source)
    for made_by, in_three_bits in ((official, True), (draft, False)):
        rotated = context_of(made_by, given).rows[1][:, 448:].float()
        assert bool((rotated.frexp().mantissa * 16).frac().eq(0).all()) == in_three_bits


@pytest.mark.parametrize(("P", "K", "first"), [(1, 5, 0), (40, 1, 0), (40, 5, 0), (200, 7, 0), (60, 5, 936)])
def test_the_block_is_the_textbooks(draft, textbook, P, K, first):
    """``first`` = 936: the last of five block rows would stand behind the last of 1000 positions, and is put on it."""
    given, context = features(P, draft, seed=P), draft.new_context(first)
    draft.extend(context, given)
    got = draft.block(context, ANCHOR, K)
    want = textbook.block([textbook.context(j, given, first) for j in range(3)], first + P, ANCHOR, K)
    assert got.dtype == torch.bfloat16
    assert close(got, want)


def test_the_context_is_the_last_128_rows(draft):
    given, P = features(300, draft), 300
    context = context_of(draft, given)
    assert context.length == P
    assert [len(rows) for rows in context.rows] == [WINDOW] * 3
    base = draft.block(context, ANCHOR, 3)
    for position, reached in ((P - WINDOW - 1, False), (P - WINDOW, True), (P - 1, True)):
        changed = given.clone()
        changed[position] = -changed[position]
        h = draft.block(context_of(draft, changed), ANCHOR, 3)
        assert (h != base).any(-1).tolist() == [reached] * 3, f"row {position} of {P}"


@pytest.mark.parametrize("chunk", [1, 50, 127, 129])
def test_a_context_does_not_depend_on_the_chunks(draft, chunk):
    given, parts = features(200, draft), draft.new_context()
    for part in given.split(chunk):
        draft.extend(parts, part)
    whole = context_of(draft, given)
    assert parts.length == whole.length
    for mine, other in zip(parts.rows, whole.rows, strict=True):
        assert close(mine, other)


def test_in_the_middle_of_a_prompt_the_anchor_is_the_next_prompt_token(draft):
    """A proposal needs nothing from behind the chunk but that token, and leaves nothing in the context."""
    given, context = features(150, draft), draft.new_context()
    draft.extend(context, given[:100])
    before = [rows.clone() for rows in context.rows]
    assert draft.propose(context, ANCHOR, 5).tokens.shape == (5,)
    assert context.length == 100
    assert all(torch.equal(mine, other) for mine, other in zip(context.rows, before, strict=True))


def test_every_block_row_sees_every_other(speculative, draft):
    """With two rows the second is the only noise: another noise token must move the first row, and the reverse."""
    context = context_of(draft, features(30, draft))
    base = draft.block(context, ANCHOR, 2)
    assert (draft.block(context, ANCHOR + 1, 2) != base).any(-1).all()
    draft.config = dataclasses.replace(speculative.config, dspark_noise_token_id=77)
    assert (draft.block(context, ANCHOR, 2) != base).any(-1).all()


def test_a_longer_block_moves_its_first_row(draft):
    context = context_of(draft, features(30, draft))
    assert not torch.equal(draft.block(context, ANCHOR, 5)[0], draft.block(context, ANCHOR, 6)[0])


@pytest.mark.parametrize("K", [1, 2, 5, 7])
def test_tokens_and_confidences_follow_the_markov_chain(speculative, draft, K):
    config, weights = speculative.config, linear.Weights(speculative.source, torch.device("cpu"))
    context = context_of(draft, features(30, draft))
    proposal = draft.propose(context, ANCHOR, K)
    assert proposal.tokens.shape == proposal.confidences.shape == (K,)
    assert proposal.logits.shape == (K, config.vocab_size)
    assert (proposal.logits.dtype, proposal.confidences.dtype) == (torch.bfloat16, torch.float32)
    h, previous = draft.block(context, ANCHOR, K), ANCHOR
    U = linear.rms_norm(h, weights.norm("mtp.2.norm"), config.rms_norm_eps) @ speculative.target.head.T
    w = weights.tensor("mtp.2.confidence_head.proj.weight")[0].double()
    for k in range(K):
        m = weights.tensor("mtp.2.markov_head.embed.weight")[previous]
        bias = weights.tensor("mtp.2.markov_head.head.weight") @ m
        want = (U[k].float() + bias.float()).bfloat16()
        assert torch.equal(proposal.logits[k], want)
        assert not torch.equal(want, U[k])
        logit = (w * torch.cat((h[k], m)).double()).sum()
        assert abs(proposal.confidences[k] - logit.sigmoid()) < 1e-6, "float32, of the row that is not normed"
        previous = int(proposal.tokens[k])
        assert proposal.logits[k, previous] == proposal.logits[k].max()


def test_the_chain_follows_a_drawn_token(draft):
    """The second logits depend on the first token whether it was the best one or drawn."""
    context = context_of(draft, features(30, draft))
    best = draft.propose(context, ANCHOR, 2)
    drawn = draft.propose(context, ANCHOR, 2, choose=lambda logits: logits.float().argmin())
    assert torch.equal(best.logits[0], drawn.logits[0])
    assert drawn.tokens[0] == best.logits[0].float().argmin()
    assert not torch.equal(best.logits[1], drawn.logits[1])


def test_nothing_can_be_drafted_in_no_rows(draft):
    with pytest.raises(UnsupportedOptionError, match=r"num_speculative_tokens=0.*1 or more"):
        draft.propose(draft.new_context(), ANCHOR, 0)


def test_a_checkpoint_holds_its_draft(micro, micro_checkpoint):
    from deepinfer_sm80.model.forward import TextModel

    target = TextModel.from_checkpoint(micro_checkpoint)
    draft = Draft.from_checkpoint(micro_checkpoint, target)
    assert len(draft.layers) == micro.num_nextn_predict_layers == 1
    assert draft.propose(context_of(draft, features(3, draft)), ANCHOR, 5).tokens.shape == (5,)
