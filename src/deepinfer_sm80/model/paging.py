"""Paged caches: block ids, the table of a sequence, and the rows that lie in blocks.

Row i of a sequence is row i % n of its block table[i // n], n rows a block. Ids are handed out in scrambled order, so
that neighbours in a sequence are not neighbours in memory. Rows never written are NaN.
"""

from __future__ import annotations

import random

import torch

_GROWTH = 16


class Blocks:
    """The block ids of caches that share block tables; ``tokens``: how many a block covers."""

    def __init__(self, tokens: int) -> None:
        self.tokens, self._made, self._free, self._order = tokens, 0, list[int](), random.Random(0)

    def take(self) -> int:
        """An id that nobody holds."""
        if not self._free:
            self._free = list(range(self._made, self._made + _GROWTH))
            self._made += _GROWTH
            self._order.shuffle(self._free)
        return self._free.pop()

    def give_back(self, ids: list[int]) -> None:
        """``ids`` may be taken again."""
        self._free.extend(ids)


class Table:
    """The blocks of one sequence, in its order; ``ids``: blocks shared with another sequence, which stay its own."""

    def __init__(self, blocks: Blocks, ids: list[int] | None = None) -> None:
        self.blocks, self.ids = blocks, list(ids or ())

    def cover(self, tokens: int) -> None:
        """Takes blocks until ``tokens`` tokens have a place."""
        while len(self.ids) * self.blocks.tokens < tokens:
            self.ids.append(self.blocks.take())

    def cut(self, tokens: int) -> None:
        """Gives back the blocks that the first ``tokens`` tokens do not need."""
        needed = -(-tokens // self.blocks.tokens)
        self.blocks.give_back(self.ids[needed:])
        del self.ids[needed:]

    def slots(self, rows: torch.Tensor, ratio: int = 1) -> torch.Tensor:
        """Row numbers int64 of any shape, each row standing for ``ratio`` tokens -> where they lie, int64."""
        per_block = self.blocks.tokens // ratio
        ids = torch.tensor(self.ids, dtype=torch.int64, device=rows.device)
        return ids[rows // per_block] * per_block + rows % per_block


class Pages:
    """The rows of one cache, ``width`` values of ``dtype`` each; it grows as slots are used."""

    def __init__(self, width: int, dtype: torch.dtype, device: torch.device) -> None:
        self.rows = torch.empty(0, width, dtype=dtype, device=device)

    def write(self, slots: torch.Tensor, rows: torch.Tensor) -> None:
        """slots int64 [n], all different; rows [n, width]."""
        self._reach(slots)
        self.rows[slots] = rows.to(self.rows.dtype)

    def read(self, slots: torch.Tensor) -> torch.Tensor:
        """slots int64 of any shape -> rows [..., width]."""
        self._reach(slots)
        return self.rows[slots]

    def _reach(self, slots: torch.Tensor) -> None:
        wanted, held = int(slots.max()) + 1 if slots.numel() else 0, len(self.rows)
        if wanted > held:
            more = max(wanted, 2 * held) - held
            self.rows = torch.cat((self.rows, self.rows.new_full((more, self.rows.shape[1]), torch.nan)))
