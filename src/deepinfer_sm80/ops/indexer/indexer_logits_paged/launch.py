"""Launcher of indexer_logits_paged. The maths is in reference.py beside this file."""

from __future__ import annotations

import torch

from deepinfer_sm80.ops.checks import Shapes
from deepinfer_sm80.ops.indexer.vectors import decode_table, look_up
from deepinfer_sm80.ops.kv_cache.layout import INDEX_RECORD_BYTES, index_key_views

_HEADS, _DIM = 32, 128

# Row-times-key budget of one tile. A key costs 128 bytes of codes, 512 of table indices, 512 of values, 128 of scores.
_KEYS_AT_ONCE = 1 << 17
# Columns of one tile: long contexts are cut, short ones take more rows.
_COLUMNS_AT_ONCE = 1 << 13


def indexer_logits_paged(
    q_codes: torch.Tensor,
    weights: torch.Tensor,
    kv_cache: torch.Tensor,
    context_lens: torch.Tensor,
    block_table: torch.Tensor,
    max_context_len: int,
) -> torch.Tensor:
    s = Shapes("indexer_logits_paged")
    s.check(q_codes, "q_codes", ("T", _HEADS, _DIM), torch.uint8)
    s.check(weights, "weights", ("T", _HEADS), torch.float32)
    s.check_pages(kv_cache, "kv_cache", ("blocks", "block_size"), INDEX_RECORD_BYTES)
    s.check_view(context_lens, "context_lens", ("T",), torch.int32, torch.int64, dense=0)
    s.check_view(block_table, "block_table", ("T", "C"), torch.int32, torch.int64)
    s.require(max_context_len >= 0, "max_context_len", "0 or larger", max_context_len)
    tokens, block_size = s["T"], s["block_size"]

    out = torch.full((tokens, max_context_len), float("-inf"), dtype=torch.float32, device=q_codes.device)
    if out.numel() == 0 or s["blocks"] * block_size == 0:
        return out
    columns = min(s["C"], -(-max_context_len // block_size))
    columns_at_once = max(1, min(columns, _COLUMNS_AT_ONCE // block_size))
    rows_at_once = max(1, _KEYS_AT_ONCE // (columns_at_once * block_size))
    table = decode_table(q_codes.device)
    for first in range(0, tokens, rows_at_once):
        rows = slice(first, first + rows_at_once)
        q = look_up(table, q_codes[rows])
        for left in range(0, columns, columns_at_once):
            pages = block_table[rows, left : min(left + columns_at_once, columns)]
            logits = _tile(q, weights[rows], kv_cache, pages, table)
            start, stop = left * block_size, min(left * block_size + logits.shape[1], max_context_len)
            column = torch.arange(start, stop, device=q_codes.device)
            beyond = column >= context_lens[rows, None]
            out[rows, start:stop] = logits[:, : stop - start].masked_fill(beyond, float("-inf"))
    return out


def _tile(
    q: torch.Tensor, weights: torch.Tensor, kv_cache: torch.Tensor, pages: torch.Tensor, table: torch.Tensor
) -> torch.Tensor:
    """float32 [R, n * block_size]: logits of queries [R, 32, 128] for all keys of their pages [R, n].

    The E4M3 values also fit TF32, so the products are exact whatever matmul precision the process has chosen.
    """
    exists = (pages >= 0) & (pages < kv_cache.shape[0])
    safe = torch.where(exists, pages, 0).to(torch.int64)
    codes, scales = (view[safe].flatten(1, 2) for view in index_key_views(kv_cache))
    scale = scales.contiguous().view(torch.float32)[..., 0]
    score = torch.bmm(q, look_up(table, codes).transpose(1, 2))
    logits = score.relu_().mul_(weights[:, :, None]).sum(1) * scale
    present = exists[:, :, None].expand(-1, -1, kv_cache.shape[1]).flatten(1)
    return logits.masked_fill(~present, float("-inf"))
