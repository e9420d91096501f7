"""Selecting the largest of a row that no single program can hold: chunks, rounds and their scratch.

Each program finds the topk largest of a chunk of keys; the survivors of all chunks are the next round's keys, until one
chunk holds them all. Shared by indexer_topk and select_candidate_blocks. Everything follows from the shapes, so the
launches can be captured. Imports nothing heavy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    Results = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

SMALL, LARGE = 2048, 8192
"""Keys of a chunk: the small one where it holds the whole row."""
WARPS = {SMALL: 4, LARGE: 16}
"""Sixteen keys a thread. Not measured on a GPU."""
LARGEST_TOPK = LARGE // 2
"""Of rows that take several rounds: each must at least halve the keys."""

# Scratch of one group of rows: 2^23 keys and as many columns are 64 MB; a further round's are half of that or less.
_SCRATCH_AT_ONCE = 1 << 23
# What a last round is given and leaves alone.
_UNUSED = 4


class FirstRound(Protocol):
    """Launches the first round for ``grid`` = (rows, chunks) from ``first_row`` on, into (out, keys, columns)."""

    def __call__(self, first_row: int, grid: tuple[int, int], last: bool, results: Results) -> None: ...


class NextRound(Protocol):
    """Launches a round over ``width`` survivors a row, (keys, columns), in chunks of ``chunk``."""

    def __call__(
        self,
        first_row: int,
        grid: tuple[int, int],
        chunk: int,
        last: bool,
        survivors: tuple[torch.Tensor, torch.Tensor],
        width: int,
        results: Results,
    ) -> None: ...


def chunk_of(positions: int) -> int:
    """Keys for one program of a round over ``positions`` keys a row."""
    return SMALL if positions <= SMALL else LARGE


def fits(positions: int, topk: int) -> bool:
    """Whether the rounds come to an end."""
    return positions <= LARGE or topk <= LARGEST_TOPK


def play(
    out: torch.Tensor,
    positions: int,
    topk: int,
    first_round: FirstRound,
    next_round: NextRound,
    scratch_per_row: int = 1,
) -> None:
    """All rounds for every row of ``out`` int32 [T, topk], from ``positions`` keys a row.

    Rows go in groups that bound the survivors' scratch; ``scratch_per_row``: numbers the first round itself holds.
    """
    chunks = -(-positions // chunk_of(positions))
    survivors = chunks * topk if chunks > 1 else 0
    rows_at_once = max(1, _SCRATCH_AT_ONCE // max(survivors, scratch_per_row))
    for first_row in range(0, out.shape[0], rows_at_once):
        rows = min(rows_at_once, out.shape[0] - first_row)
        kept = _room(out, rows * survivors)
        first_round(first_row, (rows, chunks), chunks == 1, (out, *kept))
        left = survivors
        while left:
            chunk = chunk_of(left)
            grid, last = (rows, -(-left // chunk)), left <= chunk
            further = _room(out, 0 if last else rows * grid[1] * topk)
            next_round(first_row, grid, chunk, last, kept, left, (out, *further))
            kept, left = further, 0 if last else grid[1] * topk


def _room(like: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Uninitialised int32 for ``count`` keys and as many columns."""
    return like.new_empty(max(count, _UNUSED)), like.new_empty(max(count, _UNUSED))
