"""Arithmetic of a row: quantiles, order of the arms, ratio, share of the roofline. Standard library only."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from deepinfer_sm80.ops.contract import Cost


def quantile(samples: Sequence[float], q: float) -> float:
    """The ``q`` quantile (0..1) of at least one sample, linear between neighbours."""
    ordered = sorted(samples)
    at = q * (len(ordered) - 1)
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (at - low) * (ordered[high] - ordered[low])


def least_us(cost: Cost, copy_rate: float, dot_rate: float) -> float:
    """Microseconds below which the roofline forbids a result. Rates in bytes/s and FLOP/s."""
    return 1e6 * max(cost.bytes / copy_rate, cost.flops / dot_rate)


def clones_needed(bytes_per_call: int, l2_bytes: int, affordable: int, most: int = 40) -> int:
    """Copies of the arguments whose traffic passes 3x L2 before one is used again; at most what memory holds.

    ``most`` is enough for small calls: each copy is then used once in a graph, and the cache is swept before each.
    """
    wanted = -(-3 * l2_bytes // max(bytes_per_call, 1))
    return max(1, min(wanted, affordable, most))


def takes_part(round_: int, rounds: int, own: int) -> bool:
    """Whether an arm that is to run ``own`` of ``rounds`` rounds, spread evenly, runs in this one."""
    return (round_ + 1) * own // rounds > round_ * own // rounds


def calls_in_graph(clones: int, least: int = 20) -> int:
    """Calls of one graph: at least ``least``, every clone used equally often."""
    return clones * -(-least // clones)
