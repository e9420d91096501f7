"""Where a pipeline may be cut, and which cut leaves the most KV-cache blocks."""

from __future__ import annotations

import functools
import itertools
import math
from typing import TYPE_CHECKING

from deepinfer_sm80.topology.footprint import GIB
from deepinfer_sm80.topology.layout import Layout, Setting, Stage, before_kv, legal_stock, stages_of

if TYPE_CHECKING:
    from deepinfer_sm80.model.config import ModelConfig
    from deepinfer_sm80.topology.footprint import Cut, Weights

Split = tuple[int, ...]
PUBLISHED_SPLITS: tuple[Split, ...] = ((14, 14, 12),)


def splits(
    found: Weights, ways: tuple[int, ...], dp: int, ep: int, setting: Setting, usable: float, replicas: bool = True
) -> list[Split]:
    """Cuts worth judging for stages of ``ways`` tensor-parallel ranks: the best legal ones, the best ones with source
    replicas, vLLM's own even ones and the published ones. Without ``replicas``: the best legal ones, if any."""
    layers, pp = found.config.num_hidden_layers, len(ways)
    if pp == 1:
        return [(layers,)]
    found_splits = []
    legal = [at_starts(cuts, layers) for cuts in itertools.combinations(legal_starts(found.config), pp - 1)]
    if legal:
        found_splits.append(max(legal, key=lambda s: (_tightest(found, Layout(s, ways, dp, ep), setting, usable), s)))
    if not replicas:
        return found_splits
    found_splits.append(best_split(found, ways, dp, ep, setting, usable))
    if len(set(ways)) == 1:
        found_splits.append(even_split(layers, pp))
        found_splits += [s for s in PUBLISHED_SPLITS if len(s) == pp and sum(s) == layers]
    return list(dict.fromkeys(found_splits))


@functools.lru_cache(maxsize=16)
def legal_starts(config: ModelConfig) -> tuple[int, ...]:
    """Layers at which stock vLLM lets a stage begin: no layer from there on reads a KV source before it."""
    n = config.num_hidden_layers
    return tuple(i for i in range(1, n) if legal_stock(config, Layout((i, n - i), (1, 1))))


def halves(config: ModelConfig) -> Split:
    """The split in two stages that stock vLLM allows, cut as near to the middle as that gets."""
    layers = config.num_hidden_layers
    start = min(legal_starts(config), key=lambda i: abs(2 * i - layers))
    return start, layers - start


def at_starts(starts: tuple[int, ...], layers: int) -> Split:
    """The split whose later stages begin at ``starts``."""
    return tuple(b - a for a, b in itertools.pairwise((0, *starts, layers)))


def even_split(layers: int, pp: int) -> Split:
    """vLLM's own: equal parts, the remainder one layer each to the stages before the last, backwards."""
    split = [layers // pp] * pp
    for i in range(2, layers % pp + 2):
        split[-i] += 1
    return tuple(split)


def _room(found: Weights, stage: Stage, setting: Setting, usable: float) -> float:
    """KV blocks a rank of ``stage`` has room for; negative: bytes it lacks, in blocks."""
    held, block = before_kv(found, stage, setting)
    return (setting.utilisation * usable * GIB - held) / block


def _tightest(found: Weights, layout: Layout, setting: Setting, usable: float) -> float:
    return min(_room(found, stage, setting, usable) for stage in stages_of(layout, setting))


def best_split(found: Weights, ways: tuple[int, ...], dp: int, ep: int, setting: Setting, usable: float) -> Split:
    """The cuts whose fullest stage leaves the most KV blocks; of equal ones the most even.

    Exact: the best way to place layers [first, n) on the last stages, from the last stage forward.
    """
    n, pp = found.config.num_hidden_layers, len(ways)
    budget = setting.utilisation * usable * GIB
    # per first layer: (blocks of the tightest stage from there on, minus the squares of the sizes, split)
    tails: dict[int, tuple[float, int, Split]] = {}
    for index in reversed(range(pp)):
        cut = Layout((n,) * pp, ways, dp, ep).cut(index, setting)
        table = _table(found, cut, index == 0, index == pp - 1, setting)
        level: dict[int, tuple[float, int, Split]] = {}
        for first in [0] if index == 0 else range(index, n - (pp - 1 - index)):
            best: tuple[float, int, Split] = (-math.inf, 0, ())
            for end in [n] if index == pp - 1 else [end for end in tails if end > first]:
                held, block = table[first, end]
                below, squares, rest = tails.get(end, (math.inf, 0, ()))
                room = min((budget - held) / block, below)
                if room >= best[0]:
                    best = max(best, (room, squares - (end - first) ** 2, (end - first, *rest)))
            level[first] = best
        tails = level
    return tails[0][2]


@functools.lru_cache(maxsize=512)
def _table(
    found: Weights, cut: Cut, head: bool, tail: bool, setting: Setting
) -> dict[tuple[int, int], tuple[int, int]]:
    """``before_kv`` of every run of layers a stage may have."""
    n = found.config.num_hidden_layers
    return {
        (first, end): before_kv(found, Stage(first, end, cut, head, tail), setting)
        for first in ([0] if head else range(1, n))
        for end in ([n] if tail else range(first + 1, n))
    }
