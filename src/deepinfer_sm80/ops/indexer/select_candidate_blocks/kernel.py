"""Triton launcher of select_candidate_blocks. The definition is in reference.py beside this file."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from deepinfer_sm80.ops.checks import Shapes
from deepinfer_sm80.ops.indexer import tournament
from deepinfer_sm80.ops.indexer.indexer_topk.tuning import next_round
from deepinfer_sm80.ops.indexer.row_numbers import as_int32
from deepinfer_sm80.ops.indexer.select_candidate_blocks.tuning import BLOCKS, KEYS, first_round
from deepinfer_sm80.ops.variants import run

if TYPE_CHECKING:
    from deepinfer_sm80.ops.indexer.tournament import Results


def select_candidate_blocks(
    logits: torch.Tensor,
    row_lens: torch.Tensor,
    topk_blocks: int,
    block_size: int,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """``out`` int32 [T, topk_blocks], any strides: where to write; returned. Otherwise as the reference.

    Raises TensorContractError for more than 4096 of a row with more than 8192 blocks.
    """
    s = Shapes("select_candidate_blocks")
    s.check_view(logits, "logits", ("T", "S"), torch.float32)
    s.check_view(row_lens, "row_lens", ("T",), torch.int32, torch.int64, dense=0)
    s.require(topk_blocks >= 1, "topk_blocks", "1 or larger", topk_blocks)
    s.require(block_size >= 1, "block_size", "1 or larger", block_size)
    tokens, width = s["T"], s["S"]
    if out is None:
        out = torch.empty((tokens, topk_blocks), dtype=torch.int32, device=logits.device)
    s.check_view(out, "out", ("T", topk_blocks), torch.int32, dense=0)
    if tokens == 0 or width == 0:
        return out.fill_(-1)

    row_lens, size = as_int32(row_lens), min(block_size, width)  # a block as wide as the row is the only one
    blocks = -(-width // size)
    s.require(
        tournament.fits(blocks, topk_blocks),
        "topk_blocks",
        f"at most {tournament.LARGEST_TOPK} of long rows",
        topk_blocks,
    )
    sizes = (logits.stride(0), row_lens.stride(0), width, blocks, size)

    def first(first_row: int, grid: tuple[int, int], last: bool, results: Results) -> None:
        keys = torch.empty(grid[0] * blocks, dtype=torch.int32, device=logits.device)
        run(KEYS, (grid[0], -(-blocks // BLOCKS)), logits, row_lens, keys, first_row, *sizes)
        selection = first_round(tournament.chunk_of(blocks), last)
        run(selection, grid, keys, *results, first_row, blocks, topk_blocks, *out.stride())

    def further(
        first_row: int,
        grid: tuple[int, int],
        chunk: int,
        last: bool,
        survivors: tuple[torch.Tensor, torch.Tensor],
        width: int,
        results: Results,
    ) -> None:
        run(next_round(chunk, last), grid, *survivors, *results, first_row, width, topk_blocks, *out.stride())

    tournament.play(out, blocks, topk_blocks, first, further, scratch_per_row=blocks)
    return out
