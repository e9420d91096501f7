"""What else is possible: the longest context of a set of GPUs, and the smallest sets that hold a context."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from deepinfer_sm80.topology import ran, serve
from deepinfer_sm80.topology.cluster import HOST_GPUS, KNOWN, LINKS, Cluster, Gpu
from deepinfer_sm80.topology.cuts import splits
from deepinfer_sm80.topology.footprint import GIB
from deepinfer_sm80.topology.layout import Layout, Setting, legal_tp
from deepinfer_sm80.topology.search import ANY, Only, Row, Ways, held, holds, plan, shapes
from deepinfer_sm80.topology.serve import Standing

if TYPE_CHECKING:
    from collections.abc import Sequence

    from deepinfer_sm80.topology.footprint import Weights

STEP = 4096  # tokens between the contexts that are tried
MAX_SET = 32


@dataclasses.dataclass(frozen=True)
class Offer:
    """The best layout at a context: the one asked for, or the longest that fits."""

    context: int
    row: Row


def servable(
    found: Weights,
    cluster: Cluster,
    setting: Setting,
    checkpoint: str = "DIR",
    only: Only = ANY,
    rows: Sequence[Row] | None = None,
) -> Offer | None:
    """The best layout that vLLM serves, at the context asked for, else at the longest that one holds; None: none.
    ``rows``: the plan at the context asked for, where the caller has it."""
    for row in rows if rows is not None else plan(found, cluster, setting, checkpoint, only, replicas=False):
        if row.servable:
            return Offer(setting.context, row)
    return longest(found, cluster, setting, checkpoint, only)


def longest(
    found: Weights,
    cluster: Cluster,
    setting: Setting,
    checkpoint: str = "DIR",
    only: Only = ANY,
) -> Offer | None:
    """The longest context, in steps of 4,096 tokens, that a replica holds in a layout that vLLM serves, and the best
    such layout at it; None: none."""
    best = 0
    for ways, dp, ep in shapes(found.config, cluster.count, only):
        low, high = best // STEP + 1, setting.context // STEP
        while low <= high:
            middle = (low + high) // 2
            at = dataclasses.replace(setting, context=middle * STEP)
            if any(_holds(found, layout, cluster, at) for layout in _cut(found, ways, dp, ep, cluster, at)):
                best, low = middle * STEP, middle + 1
            else:
                high = middle - 1
    if not best:
        return None
    at = dataclasses.replace(setting, context=best)
    rows = plan(found, cluster, at, checkpoint, only, replicas=False)
    return next(Offer(best, row) for row in rows if row.servable)


def _cut(found: Weights, ways: Ways, dp: int, ep: int, cluster: Cluster, setting: Setting) -> list[Layout]:
    cuts = splits(found, ways, dp, ep, setting, cluster.gpu.usable, replicas=False)
    return [Layout(split, ways, dp, ep) for split in cuts]


def _holds(found: Weights, layout: Layout, cluster: Cluster, setting: Setting) -> bool:
    if serve.standing(found.config, layout, cluster)[0] != Standing.SERVABLE:
        return False
    kept, _, short_of_ram = held(found, layout, setting, cluster)
    return holds(kept) and not short_of_ram


def weights_gib(found: Weights, setting: Setting) -> float:
    """GiB of the weights that go to GPUs, as they are in the checkpoint."""
    left_out = {"engram_tables"} if setting.speculation else {"engram_tables", "draft"}
    return sum(found.stored(name) for name in found.components if name not in left_out) / GIB


@dataclasses.dataclass(frozen=True, slots=True)
class Smallest:
    """The fewest GPUs of a kind that hold a context in a layout of a ``standing``; ``layout`` None: no set of up to 32
    does, ``cluster`` then is one GPU."""

    cluster: Cluster
    layout: Layout | None
    standing: Standing

    @property
    def servable(self) -> bool:
        """Whether there is such a set and vLLM has a command for it."""
        return self.layout is not None and self.standing == Standing.SERVABLE

    @property
    def replicas(self) -> bool:
        """Whether it needs source replicas."""
        return self.standing == Standing.REPLICAS


def smallest_sets(found: Weights, setting: Setting, only: Only = ANY, ram: int | None = None) -> list[Smallest]:
    """For every known card the smallest set, of up to 32, that holds one context, in hosts of ``ram`` bytes: one of a
    kind that has run, then those that do with fewer GPUs what never ran or needs source replicas."""
    out: list[Smallest] = []
    counts: dict[tuple[float, Standing, Only], tuple[int, Layout] | None] = {}
    for gpu in KNOWN:
        if gpu.name in ("GA100", "A800"):
            continue  # the same memory as the A100
        below, without = MAX_SET + 1, True
        for standing, sizes in _kinds(only):
            key = gpu.usable, standing, sizes
            if key not in counts:
                counts[key] = _smallest(found, setting, gpu, standing, sizes, ram, below)
            hit = counts[key]
            if standing > Standing.SERVABLE and without:
                out.append(Smallest(Cluster(gpu, 1), None, Standing.SERVABLE))
                without = False
            if hit is not None:
                out.append(Smallest(equal_hosts(gpu, hit[0], ram, hit[1].tp), hit[1], standing))
                below, without = hit[0], False
    return out


def _kinds(only: Only) -> list[tuple[Standing, Only]]:
    one = [] if ran.REPLICAS or only.dp is not None else [(Standing.SERVABLE, dataclasses.replace(only, dp=1))]
    return [*one, *((standing, only) for standing in (Standing.SERVABLE, Standing.REPLICAS))]


def equal_hosts(gpu: Gpu, count: int, ram: int | None = None, tp: int = 1) -> Cluster:
    """``count`` GPUs in as few hosts of eight or fewer as hold equally many, whole groups of ``tp``."""
    hosts = next(n for n in range(-(-count // HOST_GPUS), count + 1) if count % (n * tp) == 0)
    return Cluster(gpu, count, hosts, ram, LINKS["pcie4"])


def _smallest(
    found: Weights, setting: Setting, gpu: Gpu, standing: Standing, only: Only, ram: int | None, below: int
) -> tuple[int, Layout] | None:
    """Fewer GPUs than ``below`` in a layout of just this ``standing``; large tensor-parallel sizes are tried first."""
    least = weights_gib(found, setting) / gpu.usable / setting.utilisation
    for count in range(max(1, int(least)), below):
        for ways, dp, ep in sorted(shapes(found.config, count, only), key=lambda shape: (-shape[0][0], shape[1:])):
            cluster = equal_hosts(gpu, count, ram, ways[0])
            if (standing == Standing.REPLICAS and len(ways) == 1) or not serve.processes_fit(cluster):
                continue
            if len(ways) > 1 and dp % 2 == 0 and 2 * ways[0] in legal_tp(found.config) and only == ANY:
                continue  # a stage of twice the ranks and half the replicas holds no more on each
            for split in splits(found, ways, dp, ep, setting, gpu.usable, replicas=standing == Standing.REPLICAS):
                layout = Layout(split, ways, dp, ep)
                if serve.standing(found.config, layout, cluster)[0] != standing:
                    continue
                kept, _, short_of_ram = held(found, layout, setting, cluster)
                if holds(kept) and not short_of_ram:
                    return count, layout
    return None
