"""The attention layer over a stand-in of vLLM, its metadata for one mixed batch, and paged caches of real records.

Every query must see what the specification says: its window in its own layer, and the compressed rows that were chosen
for it. Whatever belongs to nobody holds NaN, or an index that would be read.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
from pathlib import Path

import pytest
import torch

from deepinfer_sm80.errors import UnsupportedOptionError
from deepinfer_sm80.model import rope
from deepinfer_sm80.model.attention import attend
from deepinfer_sm80.model.cache import fp8_584
from deepinfer_sm80.model.config import preset
from deepinfer_sm80.ops.kv_cache.rope_quant_insert.launch import rope_quant_insert

_spec = importlib.util.spec_from_file_location("stand_in", Path(__file__).with_name("stand_in.py"))
stand_in = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(stand_in)

Space = types.SimpleNamespace
PLUGIN = "deepinfer_sm80.vllm_plugin"
WINDOW, WINDOW_BLOCK, COMPRESSED_BLOCK = 128, 32, 128
HEADS, TOPK, STALE = 8, 8, 3


class StockAttention:
    """What the plugin's layer inherits."""

    PREFILL_CHUNK_SIZE = 4

    def _compressed_kv_cache(self):
        return self.compressed_pages


class StockBuilder:
    """vLLM's: plans of FlashMLA for the decode tokens, its holders empty where there are none."""

    def build_tile_scheduler(self, num_decode_tokens):
        return {"plan": "made" if num_decode_tokens else None}


STUBS = {
    "vllm.envs": {},
    "vllm._custom_ops": {},
    "vllm.forward_context": {"get_forward_context": None},
    "vllm.model_executor.custom_op": {"CustomOp": object},
    "vllm.model_executor.layers.sparse_attn_indexer": {"SparseAttnIndexer": object},
    "vllm.models.deepseek_v41.attention": {"DeepseekV4Attention": StockAttention, "DeepseekV4Indexer": object},
    "vllm.models.deepseek_v41.sparse_mla": {
        "DeepseekV4FlashMLAMetadataBuilder": object,
        "DeepseekV4SparseMLABackend": object,
        "DeepseekV41SparseSWAMetadataBuilder": StockBuilder,
    },
    "vllm.v1.attention.backend": {"AttentionCGSupport": Space(ALWAYS="always")},
    "vllm.v1.attention.backends.mla.sparse_swa": {"DeepseekSparseSWABackend": object},
    "vllm.v1.worker.workspace": {"current_workspace_manager": None},
}


@pytest.fixture
def plugin(monkeypatch):
    """The module over stand-ins of vLLM; ``asked`` notes the shapes of its workspaces, which come poisoned."""
    stand_in.put(monkeypatch, STUBS)
    for name in ("attention", "indexer"):
        monkeypatch.delitem(sys.modules, f"{PLUGIN}.{name}", raising=False)
    module = importlib.import_module(f"{PLUGIN}.attention")
    module.asked = []

    def get_simultaneous(*wanted):
        module.asked.append([tuple(shape) for shape, _ in wanted])
        return [
            torch.full(shape, torch.nan if dtype.is_floating_point else STALE, dtype=dtype) for shape, dtype in wanted
        ]

    monkeypatch.setattr(module, "current_workspace_manager", lambda: Space(get_simultaneous=get_simultaneous))
    yield module
    for name in ("attention", "indexer"):
        sys.modules.pop(f"{PLUGIN}.{name}", None)


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Paged:
    """Rows of several sequences in scattered pages of 584-byte records, padded at their ends; all else is NaN."""

    def __init__(self, lengths, block, seed):
        columns = max(-(-length // block) for length in lengths) + 1
        ids = torch.randperm(len(lengths) * columns, generator=torch.Generator().manual_seed(seed)).int()
        self.table, self.block = ids.view(len(lengths), columns), block
        padded = torch.full((len(ids), block * 584 + 192), 0xFF, dtype=torch.uint8)
        self.pages = padded[:, : block * 584].view(len(ids), block, 584)
        self.rows = []
        for r, length in enumerate(lengths):
            latent = randn(length, 512, seed=100 * seed + r).bfloat16()
            still = torch.zeros(1, 64)
            still[:, :32] = 1
            rope_quant_insert(latent, torch.zeros(length).long(), still, self.pages, self.slots(r, range(length)), 1)
            self.rows.append(fp8_584(latent))

    def slots(self, r, numbers):
        numbers = torch.tensor(numbers, dtype=torch.int64)
        return self.table[r, numbers // self.block].long() * self.block + numbers % self.block


class Batch:
    """Requests as (length, rows of this step, where a replay began): those that decode first."""

    def __init__(self, ratio, decodes, prefills, chunks):
        self.ratio, self.requests, self.decodes = ratio, decodes + prefills, len(decodes)
        self.window = Paged([length for length, *_ in self.requests], WINDOW_BLOCK, seed=1)
        self.compressed = (
            Paged([n // ratio for n, *_ in self.requests], COMPRESSED_BLOCK // ratio, seed=2) if ratio else None
        )
        self.at = [(r, n - q + i, start) for r, (n, q, start) in enumerate(self.requests) for i in range(q)]
        self.decoding = sum(q for _, q, _ in decodes)
        generator = torch.Generator().manual_seed(3)
        self.topk = torch.full((len(self.at) + 5, TOPK), STALE, dtype=torch.int32)
        for t, (_, position, _) in enumerate(self.at):
            chosen = torch.randperm((position + 1) // ratio, generator=generator)[:TOPK] if ratio else []
            self.topk[t] = torch.tensor([*chosen, *[-1] * (TOPK - len(chosen))])
        self.chunks = chunks

    def swa(self):
        lengths, counts, starts = (
            torch.tensor(column, dtype=torch.int32) for column in zip(*self.requests, strict=True)
        )
        first, begins = self.decodes, torch.cat((torch.zeros(1), counts.cumsum(0))).int()
        seen = [self.window.slots(r, range(max(p - WINDOW + 1, 0), p + 1)) for r, p, _ in self.at[: self.decoding]]
        indices = torch.full((self.decoding, 1, WINDOW), STALE, dtype=torch.int32)
        for t, slots in enumerate(seen):
            indices[t, 0, : len(slots)] = slots
        before = (lengths - counts - starts).clamp(0, WINDOW - 1)
        return Space(
            num_decodes=first, num_decode_tokens=self.decoding, num_prefill_tokens=len(self.at) - self.decoding,
            token_to_req_indices=torch.tensor([r for r, *_ in self.at] + [0] * 5, dtype=torch.int32),
            is_valid_token=torch.tensor([True] * len(self.at) + [False] * 5),
            decode_swa_indices=indices, decode_swa_lens=torch.tensor([len(s) for s in seen], dtype=torch.int32),
            query_start_loc=begins, query_start_loc_cpu=begins, block_table=self.window.table, block_size=WINDOW_BLOCK,
            prefill_seq_lens=lengths[first:], prefill_gather_lens=(counts + before)[first:],
            get_prefill_chunk_plan=self.plan,
        )  # fmt: skip

    def plan(self, *, compress_ratio, prefill_chunk_size, has_compressed):
        """As vLLM's: (first, end, most compressed rows, most rows) of the prefilling requests of each chunk."""
        assert (compress_ratio, prefill_chunk_size, has_compressed) == (self.ratio, 4, self.ratio > 0)
        for begin, end in self.chunks:
            part = self.requests[self.decodes :][begin:end]
            n = max(length // self.ratio if self.ratio else 0 for length, *_ in part)
            yield begin, end, n, n + max(q + min(length - q, WINDOW - 1) for length, q, _ in part)

    def metadata(self):
        found = {"window": self.swa()}
        if self.ratio:
            found["compressed"] = Space(block_table=self.compressed.table, block_size=COMPRESSED_BLOCK)
        return found

    def wanted(self, q, sink):
        """One query at a time, from the rows themselves."""
        out = []
        for t, (r, position, start) in enumerate(self.at):
            rows = self.window.rows[r][max(position - WINDOW + 1, start) : position + 1]
            if self.ratio:
                rows = torch.cat((rows, self.compressed.rows[r][self.topk[t][self.topk[t] >= 0].long()]))
            out.append(attend(q[t : t + 1], rows, torch.ones(1, len(rows), dtype=torch.bool), sink))
        return torch.cat(out)


def layer_of(plugin, batch):
    layer = object.__new__(plugin.AmpereAttention)
    layer.swa_cache_layer = Space(prefix="window", kv_cache=batch.window.pages)
    layer.compressed_cache_prefix = "compressed" if batch.ratio else None
    layer.compressed_pages = batch.compressed.pages if batch.ratio else None
    layer.topk_indices_buffer, layer.compress_ratio = batch.topk, batch.ratio
    layer.attn_sink, layer.scale, layer.head_dim = 4 + randn(HEADS, seed=5), 512**-0.5, 512
    layer.window_size, layer.max_num_batched_tokens, layer.max_model_len = WINDOW, 100, 1001
    return layer


DECODES = [(300, 2, 0), (41, 2, 0), (2, 1, 0)]  # drafts are decode rows too
PREFILLS = [(150, 20, 0), (261, 5, 200), (33, 33, 0)]  # the second begins to see rows at a replay's start


@pytest.mark.parametrize("ratio", [0, 1, 2])
@pytest.mark.parametrize(
    ("decodes", "prefills", "chunks"),
    [(DECODES, PREFILLS, [(0, 2), (2, 3)]), (DECODES, [], []), ([], PREFILLS, [(0, 1), (1, 3)])],
    ids=["mixed", "decode", "prefill"],
)
def test_every_query_sees_its_window_and_its_chosen_rows(plugin, monkeypatch, ratio, decodes, prefills, chunks):
    batch = Batch(ratio, decodes, prefills, chunks)
    layer = layer_of(plugin, batch)
    monkeypatch.setattr(plugin, "get_forward_context", lambda: Space(attn_metadata=batch.metadata()))
    q = 3 * randn(len(batch.at) + 5, HEADS, 512, seed=4).bfloat16()
    output = torch.full(q.shape, torch.nan, dtype=torch.bfloat16)
    layer.forward_mqa(q, None, None, output)
    want = batch.wanted(q, layer.attn_sink).float()
    error = (output[: len(want)].float() - want).square().mean((1, 2)).sqrt() / want.square().mean((1, 2)).sqrt()
    assert error.max() < 2**-7, f"query {int(error.argmax())} of {batch.at}"
    assert output[len(want) :].isnan().all(), "rows behind the step's tokens are left alone"


@pytest.mark.parametrize(("ratio", "rows", "width"), [(0, 0, 128), (1, 1001, 256), (2, 501, 256)])
def test_a_profiling_run_holds_what_the_largest_step_needs(plugin, monkeypatch, ratio, rows, width):
    layer = layer_of(plugin, Batch(ratio, DECODES, [], []))
    monkeypatch.setattr(plugin, "get_forward_context", lambda: Space(attn_metadata=None))
    output = torch.full((3, HEADS, 512), torch.nan, dtype=torch.bfloat16)
    layer.forward_mqa(output, None, None, output)
    assert not output.any()
    assert plugin.asked == [[(4, rows + WINDOW + 100, 512), (100, width), (100,)]]


def test_the_output_is_turned_back_and_projected_by_groups(plugin):
    T, rank, groups = 5, 32, 4
    layer = object.__new__(plugin.AmpereAttention)
    table, positions = rope.table(preset("tiny"), True, 300), torch.tensor([0, 3, 17, 64, 299])
    layer.rotary_emb, layer.n_local_groups, layer.o_lora_rank = Space(cos_sin_cache=table), groups, rank
    layer.wo_a = Space(weight=(randn(groups * rank, HEADS // groups * 512, seed=1) / 32).bfloat16())
    layer._wo_b_proj = lambda z: z
    out = randn(T, HEADS, 512, seed=2).bfloat16()
    turned = rope.rotate(out, table[positions], inverse=True).view(T, groups, -1).double()
    want = torch.einsum("tgd,grd->tgr", turned, layer.wo_a.weight.view(groups, rank, -1).double()).flatten(1)
    got = layer._o_proj(out, positions)
    assert got.shape == (T, groups * rank)
    assert (got.double() - want).abs().max() < 2**-8 * want.abs().max()
    layer.wo_a = Space(weight=torch.zeros(4, dtype=torch.uint8))
    with pytest.raises(UnsupportedOptionError, match="VLLM_MXFP8_EMULATION_DEQUANT_AT_LOAD"):
        layer._o_proj(out, positions)


def test_no_plan_is_made_for_kernels_that_are_not_there(plugin):
    assert plugin.AmpereSWABackend.get_builder_cls() is plugin.AmpereSWAMetadataBuilder
    assert plugin.AmpereSWAMetadataBuilder().build_tile_scheduler(5) == {"plan": None}


@pytest.mark.parametrize(("major", "served"), [(7, False), (8, True), (9, True)])
def test_the_backend_says_what_it_runs_on(plugin, major, served):
    """9: in the proofs, and where the plugin is forced."""
    assert plugin.AmpereSparseMLABackend.supports_compute_capability(Space(major=major, minor=6)) is served
