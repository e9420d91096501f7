"""The indexer over a stand-in of vLLM, its metadata for one mixed batch, and a paged cache of real index keys.

Every query must choose the rows that the specification chooses; keys of nobody are NaN.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
from pathlib import Path

import pytest
import torch

from deepinfer_sm80.model import indexer as specification
from deepinfer_sm80.model import linear, rope
from deepinfer_sm80.model.config import preset
from deepinfer_sm80.ops.formats import e4m3
from deepinfer_sm80.ops.indexer import vectors
from deepinfer_sm80.ops.kv_cache.layout import index_key_views

_spec = importlib.util.spec_from_file_location("stand_in", Path(__file__).with_name("stand_in.py"))
stand_in = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(stand_in)

Space = types.SimpleNamespace
PLUGIN = "deepinfer_sm80.vllm_plugin.indexer"
BLOCK, TOPK, BLOCKS, BLOCK_SIZE, STALE = 128, 8, 2, 8, 3


class CustomOp:
    pass


class StockIndexer(CustomOp):
    def __init__(self):
        raise AssertionError("it demands DeepGEMM")


STUBS = {
    "vllm.envs": {"VLLM_SPARSE_INDEXER_MAX_LOGITS_MB": 1},
    "vllm._custom_ops": {},
    "vllm.forward_context": {"get_forward_context": None},
    "vllm.model_executor.custom_op": {"CustomOp": CustomOp},
    "vllm.model_executor.layers.sparse_attn_indexer": {"SparseAttnIndexer": StockIndexer},
    "vllm.models.deepseek_v41.attention": {"DeepseekV4Indexer": object},
    "vllm.v1.worker.workspace": {"current_workspace_manager": None},
}


def gather_keys(cache, keys, scales, block_table, cumulative):
    """What vLLM's own kernel does: the rows of every request, one request behind the other."""
    codes, tails = index_key_views(cache)
    for table, first, end in zip(block_table, cumulative[:-1].tolist(), cumulative[1:].tolist(), strict=True):
        rows = torch.arange(end - first)
        pages, places = table[rows // cache.shape[1]].long(), rows % cache.shape[1]
        keys[first:end], scales[first:end] = codes[pages, places], tails[pages, places]


@pytest.fixture
def plugin(monkeypatch):
    """The module over stand-ins of vLLM; its workspace is one memory, as vLLM's, and poisoned at first."""
    stand_in.put(monkeypatch, STUBS)
    monkeypatch.delitem(sys.modules, PLUGIN, raising=False)
    module, held = importlib.import_module(PLUGIN), {}

    def get_simultaneous(*wanted):
        return [
            held.setdefault((i, shape), torch.full(shape, 0x7F, dtype=dtype)) for i, (shape, dtype) in enumerate(wanted)
        ]

    module.held = held
    monkeypatch.setattr(module, "current_workspace_manager", lambda: Space(get_simultaneous=get_simultaneous))
    monkeypatch.setattr(module._custom_ops, "cp_gather_indexer_k_quant_cache", gather_keys, raising=False)
    yield module
    sys.modules.pop(PLUGIN, None)


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Batch:
    """Requests as (tokens, rows of this step): those that decode first. A prompt's rows may be judged in two parts."""

    def __init__(self, ratio, decodes, prefills, parts):
        self.ratio, self.requests, self.decodes, self.parts = ratio, decodes + prefills, len(decodes), parts
        self.at = [(r, n - q + i) for r, (n, q) in enumerate(self.requests) for i in range(q)]
        self.decoding = sum(q for _, q in decodes)
        rows = BLOCK // ratio
        columns = max(-(-(n // ratio) // rows) for n, _ in self.requests) + 1
        ids = torch.randperm(len(self.requests) * columns, generator=torch.Generator().manual_seed(1)).int()
        self.table = ids.view(-1, columns)
        padded = torch.full((len(ids), rows * 132 + 64), 0xFF, dtype=torch.uint8)
        self.pages, self.keys = padded[:, : rows * 132].view(len(ids), rows, 132), []
        codes, tails = index_key_views(self.pages)
        for r, (n, _) in enumerate(self.requests):
            made, scale = vectors.quantise(randn(n // ratio, 128, seed=10 + r) * (1 + r))
            for c in range(n // ratio):
                codes[self.table[r, c // rows], c % rows] = made[c]
                tails[self.table[r, c // rows], c % rows] = scale[c : c + 1].view(torch.uint8)
            self.keys.append(e4m3.decode(made) * scale[:, None])
        self.q = vectors.quantise(randn(len(self.at) + 5, 32, 128, seed=2))[0]
        self.weights = randn(len(self.at) + 5, 32, seed=3)

    def lengths(self):
        return [(position + 1) // self.ratio for _, position in self.at]

    def metadata(self):
        lengths = torch.tensor([*self.lengths(), *[STALE] * 5], dtype=torch.int32)
        chunks = []
        for (begin, end), first, last, again in self.parts:
            sizes = torch.tensor([n // self.ratio for n, _ in self.requests[begin:end]])
            cumulative = torch.cat((torch.zeros(1), sizes.cumsum(0))).int()
            owner = torch.tensor([r for r, _ in self.at[first:last]]) - begin
            chunks.append(
                Space(
                    token_start=first, token_end=last, skip_kv_gather=again,
                    block_table=None if again else self.table[begin:end],
                    local_cu_seq_lens=cumulative, local_total_seq_lens=int(cumulative[-1]),
                    max_local_total_seq_lens=int(cumulative[-1]), cu_seqlen_ks=cumulative[owner],
                    cu_seqlen_ke=cumulative[owner] + lengths[first:last], max_seqlen_k=int(sizes.max()),
                )
            )  # fmt: skip
        owner = [r for r, _ in self.at[: self.decoding]]
        return Space(
            num_prefills=len(self.requests) - self.decodes, num_decodes=self.decodes, num_decode_tokens=self.decoding,
            prefill=Space(chunks=chunks), max_seq_len=max(n for n, _ in self.requests),
            decode=Space(seq_lens=lengths[: self.decoding, None], block_table=self.table[owner]),
        )  # fmt: skip

    def wanted(self, blocks=None):
        """(rows chosen, candidate blocks) of every query, as the specification's sets; ``blocks`` limit the choice."""
        chooser = object.__new__(specification.Indexer)
        chooser.topk, chooser.blocks, chooser.block_size = TOPK, BLOCKS, BLOCK_SIZE
        found = []
        for t, ((r, _), length) in enumerate(zip(self.at, self.lengths(), strict=True)):
            dots = torch.einsum("hd,cd->hc", e4m3.decode(self.q[t]), self.keys[r]).relu()
            scores, length = (self.weights[t] @ dots)[None], torch.tensor([length])
            listed = torch.arange(scores.shape[1])[None] // BLOCK_SIZE
            allowed = None if blocks is None else torch.isin(listed, torch.tensor(sorted(blocks[t])))
            rows = chooser.choose(scores, length, allowed)[0].nonzero()[:, 0].tolist()
            kept = chooser.candidates(scores, length)[0].nonzero()[:, 0] // BLOCK_SIZE
            found.append((set(rows), set(kept.tolist()) if length else {0}))
        return found


DECODES = [(300, 2), (41, 2), (2, 1)]
PREFILLS = [(150, 8), (261, 5), (20, 20)]
MIXED = [((3, 5), 5, 11, False), ((3, 5), 11, 18, True), ((5, 6), 18, 38, False)]  # the second finds the keys there
PROMPTS = [((0, 1), 0, 8, False), ((1, 3), 8, 33, False)]
BATCHES = {"mixed": (DECODES, PREFILLS, MIXED), "decode": (DECODES, [], []), "prefill": ([], PREFILLS, PROMPTS)}


def made(plugin, monkeypatch, batch, capturing=False, **options):
    buffer = torch.full((len(batch.at) + 9, TOPK + 4), STALE, dtype=torch.int32)
    indexer = plugin.AmpereSparseAttnIndexer(
        Space(prefix="keys", kv_cache=batch.pages), 128, "ue8m0", TOPK, 128, 1000 // batch.ratio, 600, buffer,
        compress_ratio=batch.ratio, **options,
    )  # fmt: skip
    metadata = batch.metadata()
    if capturing:
        metadata.max_seq_len = 1  # of the dummy batch that is captured: the graph is for every length
    monkeypatch.setattr(plugin, "get_forward_context", lambda: Space(attn_metadata={"keys": metadata}))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    return indexer, buffer


def chosen(rows):
    return [{c for c in row.tolist() if c >= 0} for row in rows]


@pytest.mark.parametrize("ratio", [1, 2])
@pytest.mark.parametrize(
    ("kind", "capturing"), [("mixed", False), ("decode", False), ("decode", True), ("prefill", False)]
)
def test_every_query_chooses_the_specifications_rows(plugin, monkeypatch, ratio, kind, capturing):
    batch = Batch(ratio, *BATCHES[kind])
    indexer, buffer = made(plugin, monkeypatch, batch, capturing)
    T = len(batch.at)
    assert indexer.forward_cuda(torch.zeros(T + 5, 1), batch.q, None, batch.weights) is buffer
    assert chosen(buffer[:T, :TOPK]) == [rows for rows, _ in batch.wanted()]
    assert (buffer[:T, TOPK:] == -1).all()
    assert (buffer[T : T + 5] == -1).all(), "rows that pad the step choose nothing"
    assert (buffer[T + 5 :] == STALE).all()


@pytest.mark.parametrize("kind", BATCHES)
def test_the_source_writes_candidates_and_is_not_limited_by_them_the_others_are(plugin, monkeypatch, kind):
    batch = Batch(1, *BATCHES[kind])
    T = len(batch.at)
    written = torch.full((T + 5, BLOCKS), STALE, dtype=torch.int32)
    options = {"candidate_blocks": written, "candidate_block_size": BLOCK_SIZE}
    source, buffer = made(plugin, monkeypatch, batch, candidate_write=True, **options)
    source.forward_cuda(torch.zeros(T + 5, 1), batch.q, None, batch.weights)
    want = batch.wanted()
    assert chosen(buffer[:T, :TOPK]) == [rows for rows, _ in want]
    assert chosen(written[:T]) == [blocks for _, blocks in want]
    kept = written.clone()
    batch.q = batch.q.roll(7, 0)  # another layer's queries
    reader, buffer = made(plugin, monkeypatch, batch, **options)
    reader.forward_cuda(torch.zeros(T + 5, 1), batch.q, None, batch.weights)
    limited = [rows for rows, _ in batch.wanted(chosen(kept[:T]))]
    assert chosen(buffer[:T, :TOPK]) == limited != [rows for rows, _ in batch.wanted()]
    assert torch.equal(written, kept)


def test_a_profiling_run_holds_keys_of_the_longest_batch(plugin, monkeypatch):
    indexer, buffer = made(plugin, monkeypatch, Batch(1, *BATCHES["decode"]))
    monkeypatch.setattr(plugin, "get_forward_context", lambda: Space(attn_metadata=None))
    indexer.forward_cuda(torch.zeros(3, 1), None, None, None)
    assert (buffer == STALE).all()
    assert {shape for _, shape in plugin.held} == {(600, 128), (600, 4)}


def test_queries_and_keys_are_those_of_the_specification(plugin, monkeypatch):
    """Keys stand at the slots of the tokens that close their rows, turned where the row's first token stands."""
    T, table = 21, rope.table(preset("tiny"), True, 200)
    layer, positions = object.__new__(plugin.AmpereIndexer), torch.arange(70, 70 + T)
    layer.n_head, layer.head_dim, layer.softmax_scale, layer.compress_ratio = 32, 128, 128**-0.5, 2
    qr, wq_b, weights = randn(T, 64), randn(32 * 128, 64, seed=1) / 8, randn(T, 32, seed=2).bfloat16()
    layer._wq_b_proj = lambda x, scale: linear.project(x.bfloat16(), wq_b.bfloat16())
    rotary = Space(cos_sin_cache=table)
    codes, none, folded = layer.forward_q(qr, None, weights, positions, rotary)
    q = layer._wq_b_proj(qr, None).view(T, 32, 128).float()
    want, scale = vectors.quantise(vectors.rotate(q, positions, table))
    assert none is None
    assert torch.equal(codes, want)
    assert torch.allclose(folded, weights.float() * scale * 128**-0.5 * 32**-0.5, rtol=1e-6)

    latent, wk, norm = randn(T, 512, seed=3).bfloat16(), randn(128, 512, seed=4) / 22, 1 + randn(128, seed=5) / 8
    layer.wk = lambda x: (linear.project(x, wk.bfloat16()), None)
    layer.k_norm = Space(weight=norm.bfloat16(), variance_epsilon=0.5)
    pages = torch.full((2, 64, 132), 0xFF, dtype=torch.uint8)
    closing = positions % 2 == 1
    slots = torch.where(closing, 5 + 3 * torch.arange(T), -1)
    layer.k_cache = Space(prefix="keys", kv_cache=pages)
    context = Space(attn_metadata={"keys": Space(slot_mapping=slots)})
    monkeypatch.setattr(plugin, "get_forward_context", lambda: context)
    layer._produce_k(latent, positions, rotary)
    normed = linear.rms_norm(layer.wk(latent)[0], norm.bfloat16().float(), 0.5)
    want, scale = vectors.quantise(vectors.rotate(normed.float()[:, None], positions // 2 * 2, table)[:, 0])
    codes, tails = index_key_views(pages)
    at = slots[closing]
    assert torch.equal(codes[at // 64, at % 64], want[closing])
    assert torch.equal(tails[at // 64, at % 64].contiguous().view(torch.float32)[:, 0], scale[closing])
    untouched = torch.ones(2, 64, dtype=torch.bool)
    untouched[at // 64, at % 64] = False
    assert (codes[untouched] == 0xFF).all()
    context.attn_metadata = None
    layer._produce_k(latent, positions, rotary)
    assert (codes[untouched] == 0xFF).all(), "a profiling run has no cache"
