"""Launcher of select_candidate_blocks. The definition is in reference.py beside this file."""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from deepinfer_sm80.ops.checks import Shapes
from deepinfer_sm80.ops.indexer.ranking import largest

# Logits read at once: a float32 temporary of 2^23 is 32 MB and about three are alive.
_LOGITS_AT_ONCE = 1 << 23


def select_candidate_blocks(
    logits: torch.Tensor,
    row_lens: torch.Tensor,
    topk_blocks: int,
    block_size: int,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """``out`` int32 [T, topk_blocks], any strides: where to write; returned. Otherwise as the reference."""
    s = Shapes("select_candidate_blocks")
    s.check_view(logits, "logits", ("T", "S"), torch.float32)
    s.check_view(row_lens, "row_lens", ("T",), torch.int32, torch.int64, dense=0)
    s.require(topk_blocks >= 1, "topk_blocks", "1 or larger", topk_blocks)
    s.require(block_size >= 1, "block_size", "1 or larger", block_size)
    tokens, width = s["T"], s["S"]
    if out is None:
        out = torch.empty((tokens, topk_blocks), dtype=torch.int32, device=logits.device)
    s.check_view(out, "out", ("T", topk_blocks), torch.int32, dense=0)

    blocks = -(-width // block_size)
    found = min(topk_blocks, blocks)
    out[:, found:] = -1
    if tokens == 0 or width == 0:
        return out
    column = torch.arange(blocks * block_size, device=logits.device)
    rows_at_once = max(1, _LOGITS_AT_ONCE // width)
    for first in range(0, tokens, rows_at_once):
        rows = slice(first, first + rows_at_once)
        length = row_lens[rows, None].clamp(0, width)
        padded = pad(logits[rows], (0, blocks * block_size - width))
        padded = padded.masked_fill((column >= length) | padded.isnan(), float("-inf"))
        scores = padded.view(-1, blocks, block_size).amax(-1)
        newest = torch.div(length - 1, block_size, rounding_mode="floor")  # -1 for an empty row: pins nothing
        out[rows, :found] = largest(scores, found, pinned=column[:blocks] == newest)
    return out
