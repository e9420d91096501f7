"""Launcher of indexer_topk. The definition is in reference.py beside this file."""

from __future__ import annotations

import torch

from deepinfer_sm80.ops.checks import Shapes
from deepinfer_sm80.ops.indexer.ranking import largest

# Logits ranked at once: 2^22 64-bit keys are 32 MB and about five such temporaries are alive.
_LOGITS_AT_ONCE = 1 << 22


def indexer_topk(
    logits: torch.Tensor,
    row_lens: torch.Tensor,
    topk: int,
    candidate_blocks: torch.Tensor | None = None,
    candidate_block_size: int = 0,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """``out`` int32 [T, topk], any strides: where to write; returned. Otherwise as the reference."""
    s = Shapes("indexer_topk")
    s.check_view(logits, "logits", ("T", "S"), torch.float32)
    s.check_view(row_lens, "row_lens", ("T",), torch.int32, torch.int64, dense=0)
    s.require(topk >= 1, "topk", "1 or larger", topk)
    if candidate_blocks is not None:
        s.check_view(candidate_blocks, "candidate_blocks", ("T", "NB"), torch.int32)
        s.require(candidate_block_size >= 1, "candidate_block_size", "1 or larger", candidate_block_size)
    tokens, width = s["T"], s["S"]
    if out is None:
        out = torch.empty((tokens, topk), dtype=torch.int32, device=logits.device)
    s.check_view(out, "out", ("T", topk), torch.int32, dense=0)

    found = min(topk, width)
    out[:, found:] = -1
    if tokens == 0 or width == 0:
        return out
    column = torch.arange(width, device=logits.device)
    rows_at_once = max(1, _LOGITS_AT_ONCE // width)
    for first in range(0, tokens, rows_at_once):
        rows = slice(first, first + rows_at_once)
        eligible = column < row_lens[rows, None]
        if candidate_blocks is not None:
            eligible &= _in_candidates(candidate_blocks[rows], candidate_block_size, width)
        scores = logits[rows].masked_fill(~eligible, float("-inf"))
        out[rows, :found] = largest(scores, found)
    return out


def _in_candidates(candidate_blocks: torch.Tensor, block_size: int, width: int) -> torch.Tensor:
    """bool [R, width]: is the column's block in the row's list? Ids that name no block mark a spare one."""
    blocks = -(-width // block_size)
    known = (candidate_blocks >= 0) & (candidate_blocks < blocks)
    marks = torch.zeros((candidate_blocks.shape[0], blocks + 1), dtype=torch.bool, device=candidate_blocks.device)
    marks.scatter_(1, torch.where(known, candidate_blocks, blocks).to(torch.int64), True)
    return marks[:, :blocks, None].expand(-1, -1, block_size).flatten(1)[:, :width]
