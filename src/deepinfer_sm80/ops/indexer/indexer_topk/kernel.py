"""Triton launcher of indexer_topk. The definition is in reference.py beside this file."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from deepinfer_sm80.ops.checks import Shapes
from deepinfer_sm80.ops.indexer import tournament
from deepinfer_sm80.ops.indexer.indexer_topk import tuning
from deepinfer_sm80.ops.indexer.row_numbers import as_int32
from deepinfer_sm80.ops.variants import run

if TYPE_CHECKING:
    from deepinfer_sm80.ops.indexer.tournament import Results


def indexer_topk(
    logits: torch.Tensor,
    row_lens: torch.Tensor,
    topk: int,
    candidate_blocks: torch.Tensor | None = None,
    candidate_block_size: int = 0,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """``out`` int32 [T, topk], any strides: where to write; returned. Otherwise as the reference.

    Raises TensorContractError for more than 4096 of a row with more than 8192 columns to choose from.
    """
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
    if tokens == 0 or width == 0 or (candidate_blocks is not None and s["NB"] == 0):
        return out.fill_(-1)

    row_lens = as_int32(row_lens)
    if candidate_blocks is None:
        _among_all(s, logits, row_lens, topk, out)
    else:
        _among_candidates(s, logits, row_lens, topk, candidate_blocks, min(candidate_block_size, width), out)
    return out


def _among_all(s: Shapes, logits: torch.Tensor, row_lens: torch.Tensor, topk: int, out: torch.Tensor) -> None:
    chunk = tournament.chunk_of(s["S"])
    sizes = (logits.stride(0), row_lens.stride(0), s["S"], topk, *out.stride())

    def first_round(first_row: int, grid: tuple[int, int], last: bool, results: Results) -> None:
        run(tuning.first_round(chunk, last), grid, logits, row_lens, *results, first_row, *sizes)

    _play(s, s["S"], topk, out, first_round)


def _among_candidates(
    s: Shapes,
    logits: torch.Tensor,
    row_lens: torch.Tensor,
    topk: int,
    candidate_blocks: torch.Tensor,
    block_size: int,
    out: torch.Tensor,
) -> None:
    tokens, width, entries = s["T"], s["S"], s["NB"]
    ordered = torch.empty((tokens, entries), dtype=torch.int32, device=logits.device)
    grid = (tokens, -(-entries // tuning.ORDER_BLOCK))
    blocks = -(-width // block_size)
    run(tuning.ORDER_CANDIDATES, grid, candidate_blocks, ordered, candidate_blocks.stride(0), entries, blocks)
    chunk = tournament.chunk_of(entries * block_size)
    sizes = (logits.stride(0), row_lens.stride(0), width, topk, *out.stride(), entries, block_size)

    def first_round(first_row: int, grid: tuple[int, int], last: bool, results: Results) -> None:
        run(tuning.candidates_round(chunk, last), grid, logits, row_lens, ordered, *results, first_row, *sizes)

    _play(s, entries * block_size, topk, out, first_round)


def _play(s: Shapes, positions: int, topk: int, out: torch.Tensor, first_round: tournament.FirstRound) -> None:
    s.require(tournament.fits(positions, topk), "topk", f"at most {tournament.LARGEST_TOPK} of long rows", topk)

    def next_round(
        first_row: int,
        grid: tuple[int, int],
        chunk: int,
        last: bool,
        survivors: tuple[torch.Tensor, torch.Tensor],
        width: int,
        results: Results,
    ) -> None:
        run(tuning.next_round(chunk, last), grid, *survivors, *results, first_row, width, topk, *out.stride())

    tournament.play(out, positions, topk, first_round, next_round)
