"""Sizes that are timed: the model's widths, contexts and batches. Arguments are finite, of magnitude one, and random.

A case builds its arguments for a seed, so that copies do not read the same cache rows; tensors named in ``pools`` are
only read, may be large, and are handed over in ``shared`` where every copy may use the same one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from deepinfer_sm80.bench.builder import BenchCase, Builder
from deepinfer_sm80.bench.residual_streams import mhc, mhc_fused
from deepinfer_sm80.ops.kv_cache.layout import HEAD_DIM, INDEX_DIM, INDEX_RECORD_BYTES, RECORD_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator

HEADS, WINDOW, TOPK, INDEX_HEADS = 64, 128, 512, 32
WINDOW_PAGE, PAGE, INDEX_PAGE = 32, 128, 64
CANDIDATES, CANDIDATE_BLOCK = 2048, 8
GROUPS, LOW_RANK = 8, 1024
EXPERTS, CHOSEN = 384, 6
ENGRAM_ROWS, ENGRAM_HEADS = 1 << 20, 24


def decode(tokens: int, context: int) -> BenchCase:
    """Every token is a request of its own with ``context`` compressed rows; 0: a layer with its window only."""

    def build(b: Builder) -> dict[str, Any]:
        swa = b.pool("swa_k_cache", lambda: b.records(tokens * WINDOW, WINDOW_PAGE))
        kwargs = {
            "q": b.randn(tokens, HEADS, HEAD_DIM).bfloat16(),
            "swa_k_cache": swa,
            "swa_indices": b.randint(0, swa.shape[0] * swa.shape[1], tokens, WINDOW),
            "swa_lens": b.full(WINDOW, tokens),
            "attn_sink": b.randn(HEADS),
            "softmax_scale": HEAD_DIM**-0.5,
        }
        if context:
            extra = b.pool("extra_k_cache", lambda: b.records(tokens * context, PAGE))
            slots = b.randint(0, extra.shape[0] * extra.shape[1], tokens, TOPK)
            kwargs |= {"extra_k_cache": extra, "extra_indices": slots, "extra_lens": b.full(TOPK, tokens)}
        return kwargs

    name = f"T{tokens}-ctx{context}-H{HEADS}-K{WINDOW + TOPK if context else WINDOW}-uniform"
    return BenchCase("sparse_mla_decode", name, build, ("swa_k_cache", "extra_k_cache"), (tokens, context) == (8, 4096))


def prefill(tokens: int, context: int) -> BenchCase:
    """One chunk behind ``context`` compressed rows."""

    def build(b: Builder) -> dict[str, Any]:
        rows = context + WINDOW + tokens
        return {
            "q": b.randn(tokens, HEADS, HEAD_DIM).bfloat16(),
            "kv": b.pool("kv", lambda: b.randn(rows, HEAD_DIM).bfloat16()),
            "indices": b.randint(0, rows, tokens, TOPK + WINDOW),
            "lens": b.full(TOPK + WINDOW, tokens),
            "attn_sink": b.randn(HEADS),
            "softmax_scale": HEAD_DIM**-0.5,
        }

    name = f"T{tokens}-ctx{context}-H{HEADS}-K{TOPK + WINDOW}-uniform"
    return BenchCase("sparse_mla_prefill", name, build, ("kv",), (tokens, context) == (64, 4096))


def gather(requests: int, context: int) -> BenchCase:
    """Every compressed row of ``requests`` requests of ``context`` rows each, pages in random order."""

    def build(b: Builder) -> dict[str, Any]:
        cache = b.pool("k_cache", lambda: b.records(requests * context, PAGE))
        order = torch.randperm(cache.shape[0], generator=b.generator, device=b.device)
        out = torch.zeros((requests, context, HEAD_DIM), dtype=torch.bfloat16, device=b.device)
        return {
            "out": out,
            "k_cache": cache,
            "seq_lens": b.full(context, requests),
            "gather_lens": None,
            "block_table": order.int().view(requests, -1),
            "block_size": PAGE,
            "offset": 0,
        }

    name = f"ctx{context}-R{requests}"
    return BenchCase("dequantize_and_gather_k_cache", name, build, ("k_cache",), (requests, context) == (1, 4096))


def combine(tokens: int, context: int) -> BenchCase:
    """One request whose chunk ends at ``context`` tokens, ratio 1."""

    def build(b: Builder) -> dict[str, Any]:
        return {
            "topk_indices": b.randint(0, context, tokens, TOPK),
            "query_start_loc": torch.tensor([0, tokens], dtype=torch.int32, device=b.device),
            "seq_lens": b.full(context, 1),
            "gather_lens": b.full(min(context, tokens + WINDOW - 1), 1),
            "window_size": WINDOW,
            "compress_ratio": 1,
            "topk": TOPK,
            "M": context + tokens + WINDOW,
            "N": context,
        }

    return BenchCase("combine_topk_swa_indices", f"T{tokens}-K{TOPK}-W{WINDOW}", build, quick=tokens == 64)


def mapping(tokens: int) -> BenchCase:
    """Slots of the selected rows, every token a request of 131,072 rows."""

    def build(b: Builder) -> dict[str, Any]:
        context = 131072
        return {
            "topk_indices": b.randint(0, context, tokens, TOPK),
            "token_to_req_indices": torch.arange(tokens, dtype=torch.int32, device=b.device),
            "block_table": b.randint(0, 1 << 20, tokens, context // PAGE),
            "block_size": PAGE,
            "is_valid_token": torch.ones(tokens, dtype=torch.bool, device=b.device),
        }

    return BenchCase("global_topk_indices", f"T{tokens}-K{TOPK}-ctx131072", build, quick=tokens == 8)


def select(tokens: int, context: int) -> BenchCase:
    def build(b: Builder) -> dict[str, Any]:
        return {"logits": b.randn(tokens, context), "row_lens": b.full(context, tokens), "topk": TOPK}

    return BenchCase("indexer_topk", f"rows{tokens}-ctx{context}", build, quick=(tokens, context) == (8, 4096))


def index_queries(tokens: int) -> BenchCase:
    def build(b: Builder) -> dict[str, Any]:
        return {
            "positions": b.randint(0, 131072, tokens, dtype=torch.int64),
            "q": b.randn(tokens, INDEX_HEADS, INDEX_DIM).bfloat16(),
            "cos_sin_cache": b.pool("cos_sin_cache", lambda: b.rotations(131072)),
            "weights": b.randn(tokens, INDEX_HEADS).bfloat16(),
            "softmax_scale": INDEX_DIM**-0.5,
            "head_scale": INDEX_HEADS**-0.5,
        }

    return BenchCase("indexer_q_rope_quant", f"T{tokens}-H{INDEX_HEADS}", build, ("cos_sin_cache",), tokens == 8)


def index_keys(tokens: int, ratio: int) -> BenchCase:
    """Keys are multiples of 1/8, so that their sum of squares is exact in every order, as in the contract's cases."""

    def build(b: Builder) -> dict[str, Any]:
        blocks = -(-tokens // PAGE) + 1
        order = torch.randperm(blocks * PAGE, generator=b.generator, device=b.device)
        return {
            "k_pre": (b.randint(-32, 33, tokens, INDEX_DIM) / 8).bfloat16(),
            "positions": torch.arange(tokens, device=b.device),
            "cos_sin_cache": b.pool("cos_sin_cache", lambda: b.rotations(131072)),
            "norm_weight": (1 + b.randn(INDEX_DIM) / 4).bfloat16(),
            "eps": 1e-20,
            "kv_cache": b.pages(blocks, PAGE, INDEX_RECORD_BYTES),
            "slot_mapping": order[:tokens],
            "compress_ratio": ratio,
        }

    name = f"T{tokens}-r{ratio}"
    return BenchCase("indexer_k_norm_rope_store", name, build, ("cos_sin_cache",), (tokens, ratio) == (64, 1))


def insert(tokens: int) -> BenchCase:
    """Window rows, ratio 1: every token is stored."""

    def build(b: Builder) -> dict[str, Any]:
        blocks = -(-tokens // WINDOW_PAGE) + 1
        order = torch.randperm(blocks * WINDOW_PAGE, generator=b.generator, device=b.device)
        return {
            "latent": b.randn(tokens, HEAD_DIM).bfloat16(),
            "positions": torch.arange(tokens, device=b.device),
            "cos_sin_cache": b.pool("cos_sin_cache", lambda: b.rotations(131072)),
            "kv_cache": b.pages(blocks, WINDOW_PAGE, RECORD_BYTES),
            "slot_mapping": order[:tokens],
            "compress_ratio": 1,
        }

    return BenchCase("rope_quant_insert", f"T{tokens}-r1", build, ("cos_sin_cache",), tokens == 64)


def prompt_logits(tokens: int, context: int) -> BenchCase:
    """One chunk that ends at ``context`` index keys: every query sees all but the keys behind it."""

    def build(b: Builder) -> dict[str, Any]:
        return {
            "q_codes": b.codes(tokens, INDEX_HEADS, INDEX_DIM),
            "weights": b.randn(tokens, INDEX_HEADS),
            "k_codes": b.pool("k_codes", lambda: b.codes(context, INDEX_DIM)),
            "k_scale": b.pool("k_scale", lambda: torch.exp2(b.randint(-12, -4, context).float())),
            "row_start": b.full(0, tokens),
            "row_end": torch.arange(context - tokens + 1, context + 1, dtype=torch.int32, device=b.device),
            "max_k": context,
        }

    quick = (tokens, context) == (64, 4096)
    return BenchCase("indexer_logits_prefill", f"T{tokens}-ctx{context}", build, ("k_codes", "k_scale"), quick)


def paged_logits(tokens: int, context: int) -> BenchCase:
    """Every token is a request of its own with ``context`` index keys."""

    def build(b: Builder) -> dict[str, Any]:
        cache = b.pool("kv_cache", lambda: b.index_keys(tokens * context, INDEX_PAGE))
        order = torch.randperm(cache.shape[0], generator=b.generator, device=b.device)
        return {
            "q_codes": b.codes(tokens, INDEX_HEADS, INDEX_DIM),
            "weights": b.randn(tokens, INDEX_HEADS),
            "kv_cache": cache,
            "context_lens": b.full(context, tokens),
            "block_table": order.int().view(tokens, -1),
            "max_context_len": context,
        }

    quick = (tokens, context) == (8, 4096)
    return BenchCase("indexer_logits_paged", f"T{tokens}-ctx{context}", build, ("kv_cache",), quick)


def candidates(tokens: int, context: int) -> BenchCase:
    def build(b: Builder) -> dict[str, Any]:
        options = {"topk_blocks": CANDIDATES, "block_size": CANDIDATE_BLOCK}
        return {"logits": b.randn(tokens, context), "row_lens": b.full(context, tokens), **options}

    name = f"rows{tokens}-ctx{context}-B{CANDIDATES}"
    return BenchCase("select_candidate_blocks", name, build, quick=(tokens, context) == (8, 32768))


def inverse_rope(tokens: int) -> BenchCase:
    def build(b: Builder) -> dict[str, Any]:
        return {
            "o": b.randn(tokens, HEADS, HEAD_DIM).bfloat16(),
            "positions": b.randint(0, 131072, tokens, dtype=torch.int64),
            "cos_sin_cache": b.pool("cos_sin_cache", lambda: b.rotations(131072)),
            "num_groups": GROUPS,
        }

    name = f"T{tokens}-H{HEADS}-G{GROUPS}"
    return BenchCase("inverse_rope_grouped", name, build, ("cos_sin_cache",), tokens == 8)


def projection(tokens: int) -> BenchCase:
    width = HEADS // GROUPS * HEAD_DIM

    def build(b: Builder) -> dict[str, Any]:
        weight = b.pool("weight", lambda: (b.randn(GROUPS, LOW_RANK, width) * width**-0.5).bfloat16())
        return {"x": b.randn(tokens, GROUPS, width).bfloat16(), "weight": weight}

    name = f"T{tokens}-G{GROUPS}-K{width}-R{LOW_RANK}"
    return BenchCase("grouped_output_projection", name, build, ("weight",), tokens == 8)


def expert_order(tokens: int, block_size: int) -> BenchCase:
    def build(b: Builder) -> dict[str, Any]:
        ids, expert_ids, used = b.aligned_routes(tokens, CHOSEN, EXPERTS, block_size)
        return {
            "sorted_token_ids": ids,
            "expert_ids": expert_ids,
            "num_tokens_post_padded": used,
            "block_size": block_size,
            "num_routes": tokens * CHOSEN,
        }

    name = f"T{tokens}-K{CHOSEN}-E{EXPERTS}-block{block_size}"
    return BenchCase("stable_expert_order", name, build, quick=tokens == 64)


def engram(tokens: int) -> BenchCase:
    """A table in GPU memory; tables in pinned host memory are another machine's question: the bus."""

    def build(b: Builder) -> dict[str, Any]:
        codes = b.pool("weight", lambda: b.randint(0, 127, ENGRAM_ROWS, 256, dtype=torch.uint8))
        return {
            "weight": codes,
            "scale": b.pool("scale", lambda: b.randint(120, 130, ENGRAM_ROWS, 8, dtype=torch.uint8)),
            "ids": b.randint(0, ENGRAM_ROWS, tokens, ENGRAM_HEADS, dtype=torch.int64),
            "head_start": 0,
            "local_heads": ENGRAM_HEADS,
            "vocab_start": 0,
            "vocab_end": ENGRAM_ROWS,
        }

    return BenchCase("engram_lookup", f"T{tokens}-heads{ENGRAM_HEADS}", build, ("weight", "scale"), tokens == 8)


def all_cases() -> Iterator[BenchCase]:
    """Every case, operators in no particular order."""
    for tokens, context in ((1, 4096), (1, 131072), (8, 0), (8, 4096), (8, 16384), (8, 131072), (64, 16384)):
        yield decode(tokens, context)
    for tokens, context in ((64, 4096), (2048, 4096), (2048, 16384), (2048, 131072)):
        yield prefill(tokens, context)
    for requests, context in ((1, 4096), (4, 16384), (1, 49152), (1, 131072)):
        yield gather(requests, context)
    for tokens in (1, 8, 12, 64, 2048):
        yield mhc(tokens)
    for tokens in (1, 6, 8, 12, 32, 64, 2048):
        yield mhc_fused(tokens)
    for tokens in (64, 1536, 2048):
        yield combine(tokens, 16384)
    for tokens in (1, 8, 64):
        yield mapping(tokens)
    for tokens, context in ((1, 4096), (1, 131072), (8, 4096), (8, 131072), (32, 65536), (2048, 16384)):
        yield select(tokens, context)
    for tokens, ratio in ((1, 1), (64, 1), (2048, 1), (2048, 2)):
        yield index_keys(tokens, ratio)
    for tokens, context in ((64, 4096), (2048, 4096), (2048, 16384)):
        yield prompt_logits(tokens, context)
    for tokens, context in ((1, 4096), (1, 131072), (8, 4096), (8, 131072), (64, 16384)):
        yield paged_logits(tokens, context)
    for tokens, context in ((1, 131072), (8, 32768), (2048, 32768)):
        yield candidates(tokens, context)
    for tokens in (1, 8, 64, 2048):
        yield from (case(tokens) for case in (index_queries, engram, insert, inverse_rope, projection))
    for tokens, block_size in ((1, 8), (8, 8), (64, 8), (2048, 48)):
        yield expert_order(tokens, block_size)
