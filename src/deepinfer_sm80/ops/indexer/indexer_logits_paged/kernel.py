"""Triton launcher of indexer_logits_paged. The maths is in reference.py beside this file."""

from __future__ import annotations

import torch

from deepinfer_sm80.ops.checks import Shapes
from deepinfer_sm80.ops.indexer.indexer_logits_paged.tuning import DIM, HEADS, LOGITS, programs_per_row
from deepinfer_sm80.ops.indexer.row_numbers import as_int32
from deepinfer_sm80.ops.kv_cache.layout import INDEX_RECORD_BYTES
from deepinfer_sm80.ops.variants import ALIGNMENT, run


def indexer_logits_paged(
    q_codes: torch.Tensor,
    weights: torch.Tensor,
    kv_cache: torch.Tensor,
    context_lens: torch.Tensor,
    block_table: torch.Tensor,
    max_context_len: int,
) -> torch.Tensor:
    """As the reference. The page stride must be a multiple of 16 bytes, as vLLM's are."""
    s = Shapes("indexer_logits_paged")
    s.check(q_codes, "q_codes", ("T", HEADS, DIM), torch.uint8)
    s.check(weights, "weights", ("T", HEADS), torch.float32)
    s.check_pages(kv_cache, "kv_cache", ("blocks", "block_size"), INDEX_RECORD_BYTES)
    s.check_view(context_lens, "context_lens", ("T",), torch.int32, torch.int64, dense=0)
    s.check_view(block_table, "block_table", ("T", "C"), torch.int32, torch.int64)
    s.require(max_context_len >= 0, "max_context_len", "0 or larger", max_context_len)
    tokens, block_size, page = s["T"], s["block_size"], kv_cache.stride(0)
    s.require(page % ALIGNMENT == 0 or s["blocks"] < 2, "kv_cache", "pages a multiple of 16 bytes apart", page)

    shape, device = (tokens, max_context_len), q_codes.device
    if tokens * max_context_len * s["blocks"] * block_size * s["C"] == 0:
        return torch.full(shape, float("-inf"), dtype=torch.float32, device=device)
    out = torch.empty(shape, dtype=torch.float32, device=device)
    context_lens, block_table = as_int32(context_lens), as_int32(block_table)
    run(
        LOGITS,
        (tokens, programs_per_row(tokens, max_context_len)),
        q_codes,
        weights,
        kv_cache,
        context_lens,
        block_table,
        out,
        page // ALIGNMENT,
        context_lens.stride(0),
        block_table.stride(0),
        s["blocks"],
        block_size,
        s["C"],
        max_context_len,
    )
    return out
