"""Sizes that are timed: the model's widths, contexts and batches. Arguments are finite, of magnitude one, and random.

A case builds its arguments for a seed, so that copies do not read the same cache rows; tensors named in ``pools`` are
only read, may be large, and are handed over in ``shared`` where every copy may use the same one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from deepinfer_sm80.ops.formats import e4m3
from deepinfer_sm80.ops.kv_cache.layout import (
    HEAD_DIM,
    INDEX_DIM,
    INDEX_RECORD_BYTES,
    NOPE_DIM,
    RECORD_BYTES,
    record_views,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

HEADS, WINDOW, TOPK, HIDDEN, INDEX_HEADS = 64, 128, 512, 5120, 32
WINDOW_PAGE, PAGE = 32, 128
ENGRAM_ROWS, ENGRAM_HEADS = 1 << 20, 24


class Builder:
    """Random tensors on one device from one seed; ``pool`` returns the shared tensor of that name if there is one."""

    def __init__(self, device: str, seed: int, shared: dict[str, torch.Tensor]) -> None:
        self.device, self.seed, self.shared = device, seed, shared
        self.generator = torch.Generator(device).manual_seed(seed)

    def randn(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator, device=self.device)

    def randint(self, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=self.generator, device=self.device, dtype=dtype)

    def full(self, value: int, *shape: int) -> torch.Tensor:
        return torch.full(shape, value, dtype=torch.int32, device=self.device)

    def pool(self, name: str, build: Callable[[], torch.Tensor]) -> torch.Tensor:
        if name in self.shared:
            return self.shared[name]
        # a generator of its own: what is drawn afterwards must not depend on whether the tensor was shared
        outer, self.generator = self.generator, torch.Generator(self.device).manual_seed(self.seed + len(name) * 7919)
        built, self.generator = build(), outer
        return built

    def records(self, rows: int, block_size: int) -> torch.Tensor:
        """A paged record cache uint8 [blocks, block_size, 584] of at least ``rows`` rows, pages padded to 576 bytes."""
        blocks = -(-rows // block_size)
        stride = -(-block_size * RECORD_BYTES // 576) * 576
        storage = torch.zeros(blocks * stride, dtype=torch.uint8, device=self.device)
        cache = storage.as_strided((blocks, block_size, RECORD_BYTES), (stride, RECORD_BYTES, 1))
        data, scales = record_views(cache)
        for first in range(0, blocks, 256):
            part = slice(first, min(first + 256, blocks))
            count = part.stop - part.start
            data[part, :, :NOPE_DIM] = e4m3.encode(self.randn(count, block_size, NOPE_DIM) * 64)
            rope = self.randn(count, block_size, HEAD_DIM - NOPE_DIM).bfloat16()
            data[part, :, NOPE_DIM:] = rope.view(torch.uint8)
            scales[part, :, :7] = self.randint(120, 123, count, block_size, 7, dtype=torch.uint8)
        return cache

    def rotations(self, positions: int) -> torch.Tensor:
        angle = torch.rand(positions, 32, generator=self.generator, device=self.device) * 6.2831855
        return torch.cat((angle.cos(), angle.sin()), -1)


@dataclass(frozen=True, slots=True)
class BenchCase:
    """One size of one operator. ``build(builder)`` returns the launcher's arguments; ``pools`` may be shared."""

    op: str
    name: str
    build: Callable[[Builder], dict[str, Any]]
    pools: tuple[str, ...] = ()
    quick: bool = False

    def arguments(self, device: str, seed: int, shared: dict[str, torch.Tensor] | None = None) -> dict[str, Any]:
        return self.build(Builder(device, seed, shared or {}))


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


def mhc(tokens: int) -> BenchCase:
    def build(b: Builder) -> dict[str, Any]:
        return {
            "x": b.randn(tokens, HIDDEN).bfloat16(),
            "residual": b.randn(tokens, 4, HIDDEN).bfloat16(),
            "post_mix": b.randn(tokens, 4),
            "comb": b.randn(tokens, 4, 4),
        }

    return BenchCase("mhc_post", f"T{tokens}-H{HIDDEN}", build, quick=tokens == 8)


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
        blocks, page = -(-tokens // PAGE) + 1, -(-PAGE * INDEX_RECORD_BYTES // 576) * 576
        storage = torch.zeros(blocks * page, dtype=torch.uint8, device=b.device)
        order = torch.randperm(blocks * PAGE, generator=b.generator, device=b.device)
        return {
            "k_pre": (b.randint(-32, 33, tokens, INDEX_DIM) / 8).bfloat16(),
            "positions": torch.arange(tokens, device=b.device),
            "cos_sin_cache": b.pool("cos_sin_cache", lambda: b.rotations(131072)),
            "norm_weight": (1 + b.randn(INDEX_DIM) / 4).bfloat16(),
            "eps": 1e-20,
            "kv_cache": storage.as_strided((blocks, PAGE, INDEX_RECORD_BYTES), (page, INDEX_RECORD_BYTES, 1)),
            "slot_mapping": order[:tokens],
            "compress_ratio": ratio,
        }

    name = f"T{tokens}-r{ratio}"
    return BenchCase("indexer_k_norm_rope_store", name, build, ("cos_sin_cache",), (tokens, ratio) == (64, 1))


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
    batches = (1, 8, 64, 2048)
    for tokens, context in ((1, 4096), (1, 131072), (8, 0), (8, 4096), (8, 16384), (8, 131072), (64, 16384)):
        yield decode(tokens, context)
    for tokens, context in ((64, 4096), (2048, 4096), (2048, 16384), (2048, 131072)):
        yield prefill(tokens, context)
    for requests, context in ((1, 4096), (4, 16384), (1, 49152), (1, 131072)):
        yield gather(requests, context)
    for tokens in (1, 8, 12, 64, 2048):
        yield mhc(tokens)
    for tokens in (64, 1536, 2048):
        yield combine(tokens, 16384)
    for tokens in (1, 8, 64):
        yield mapping(tokens)
    for tokens, context in ((1, 4096), (1, 131072), (8, 4096), (8, 131072), (32, 65536), (2048, 16384)):
        yield select(tokens, context)
    for tokens in batches:
        yield index_queries(tokens)
    for tokens, ratio in ((1, 1), (64, 1), (2048, 1), (2048, 2)):
        yield index_keys(tokens, ratio)
    for tokens in batches:
        yield engram(tokens)
