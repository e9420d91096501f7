"""How well an expert's column count fits Marlin's thread tiles."""

from __future__ import annotations

import dataclasses

from deepinfer_sm80.topology.footprint import OUR_MULTIPLE, STOCK_MULTIPLE

# (K, N) of the thread tiles Marlin's MoE kernel takes for small batches, the preferred one first.
THREAD_TILES = ((128, 128), (64, 256), (64, 128))


@dataclasses.dataclass(frozen=True, slots=True)
class Tile:
    """``columns`` per rank and what they are padded to; ``down``: the thread tile of the down projection, whose K they
    are; ``useful``, ``useful_stock``: share of multiplied columns that the model has."""

    columns: int
    padded: int
    padded_stock: int
    down: tuple[int, int]

    @property
    def useful(self) -> float:
        return self.columns / self.padded

    @property
    def useful_stock(self) -> float:
        return self.columns / self.padded_stock


def tile(columns: int, hidden: int) -> Tile:
    """The tile of an expert ``columns`` wide on a rank."""
    ours, stock = (-(-columns // multiple) * multiple for multiple in (OUR_MULTIPLE, STOCK_MULTIPLE))
    down = next(t for t in THREAD_TILES if ours % t[0] == 0 and hidden % t[1] == 0)
    return Tile(columns, ours, stock, down)
