"""Every layout of a cluster, each with its best cuts, judged and put in order."""

from __future__ import annotations

import dataclasses
import itertools
from typing import TYPE_CHECKING

from deepinfer_sm80.topology import serve
from deepinfer_sm80.topology.cluster import KNOWN, LINKS, Cluster
from deepinfer_sm80.topology.cuts import splits
from deepinfer_sm80.topology.layout import LEGAL_TP, Layout, Memory, Setting, legal_stock, memory, replay
from deepinfer_sm80.topology.roofline import PROMPT, Estimate, estimate

if TYPE_CHECKING:
    from collections.abc import Iterator

    from deepinfer_sm80.model.config import ModelConfig
    from deepinfer_sm80.topology.footprint import Weights

ANSWER_TOKENS = 1024
MAX_UNEQUAL_STAGES = 4  # asymmetric layouts of more stages are left out: each stage is one more hop
MAX_SET = 32


@dataclasses.dataclass(frozen=True)
class Row:
    """A judged layout. ``engram``: where its tables are, ``host``, ``gpu`` or ``disk``. ``with_replicas``: the command
    once this package places replicas of KV sources, where only that is missing."""

    layout: Layout
    legal: bool
    replay: bool
    engram: str
    fits: bool
    why: str
    memory: Memory
    estimate: Estimate
    command: str | None
    with_replicas: str | None

    @property
    def contexts(self) -> float:
        """Full contexts that the caches of all replicas hold."""
        return self.layout.dp * self.memory.blocks / self.memory.per_request

    def job_seconds(self, streams: int) -> float:
        """What the order goes by: a 64K prompt for each stream, then 1,024 decode steps."""
        return streams * PROMPT / self.estimate.prefill + ANSWER_TOKENS * self.estimate.decode_ms / 1e3


def plan(
    found: Weights, cluster: Cluster, setting: Setting, checkpoint: str = "DIR", tp: int | None = None
) -> list[Row]:
    """Every layout, best first: what fits, of that what vLLM serves before what it would with source
    replicas and what it cannot, of that the least ``job_seconds``. ``tp``: only layouts of that size."""
    every = layouts(found, cluster, setting)
    wanted = (layout for layout in every if tp is None or set(layout.tp_per_stage) == {tp})
    rows = [judge(found, layout, cluster, setting, checkpoint) for layout in wanted]

    def order(row: Row) -> tuple[object, ...]:
        layout = row.layout
        last = row.job_seconds(setting.streams) if row.fits else -_room(row)
        served = 0 if row.command else 1 if row.with_replicas else 2
        return (not row.fits, served, last, layout.pp, layout.ep, layout.tp_per_stage, layout.split)

    return _compared(sorted(rows, key=order), setting)


def _room(row: Row) -> float:
    return min(row.memory.kv_bytes) / row.memory.per_request


def _compared(rows: list[Row], setting: Setting) -> list[Row]:
    """Say of every layout that fits and is not the first by how much it lost, and where."""
    if not rows or not rows[0].fits:
        return rows
    best = rows[0]
    out = [dataclasses.replace(best, why=f"best: {best.why}")]
    for row in rows[1:]:
        why = row.why
        if row.fits:
            ratio = row.job_seconds(setting.streams) / best.job_seconds(setting.streams)
            why += (
                f"; {ratio:.2f}x the best's time (prefill {row.estimate.prefill:,.0f} against "
                f"{best.estimate.prefill:,.0f} tok/s, step {row.estimate.decode_ms:.1f} against "
                f"{best.estimate.decode_ms:.1f} ms)"
            )
        out.append(dataclasses.replace(row, why=why))
    return out


def layouts(found: Weights, cluster: Cluster, setting: Setting, replicas: bool = True) -> Iterator[Layout]:
    """TP x PP x DP (x EP) over all GPUs, and pipelines of unequal stages, each with the cuts worth judging.
    Without ``replicas``: equal stages and legal cuts only."""
    config, count, usable = found.config, cluster.count, cluster.gpu.usable
    for tp in LEGAL_TP:
        for dp in (d for d in range(1, count // tp + 1) if count % (tp * d) == 0):
            pp = count // (tp * dp)
            if pp > config.num_hidden_layers:
                continue
            for ep in _expert_ways(config, tp * dp):
                for split in splits(found, (tp,) * pp, dp, ep, setting, usable, replicas):
                    yield Layout(split, (tp,) * pp, dp, ep)
    for ways in _unequal(count) if replicas else []:
        for split in splits(found, ways, 1, 1, setting, usable):
            yield Layout(split, ways)


def _expert_ways(config: ModelConfig, ranks: int) -> Iterator[int]:
    """1: columns cut ``ranks`` ways, where whole scale groups of 32 are left; ``ranks``: whole experts."""
    inter = config.moe_intermediate_size
    if inter % ranks == 0 and (inter // ranks) % 32 == 0:
        yield 1
    if 1 < ranks <= config.n_routed_experts:
        yield ranks


def _unequal(count: int) -> list[tuple[int, ...]]:
    stages = range(2, MAX_UNEQUAL_STAGES + 1)
    every = itertools.chain.from_iterable(itertools.product(LEGAL_TP, repeat=n) for n in stages)
    return sorted(ways for ways in every if sum(ways) == count and len(set(ways)) > 1)


def judge(found: Weights, layout: Layout, cluster: Cluster, setting: Setting, checkpoint: str = "DIR") -> Row:
    """Memory, speed and the command of one layout."""
    config = found.config
    kept = memory(found, layout, setting, cluster.gpu.usable)
    engram, short_of_ram = serve.placement(layout, kept, cluster)
    if short_of_ram:
        on_gpu = memory(found, layout, setting, cluster.gpu.usable, tables_on_gpu=True)
        if on_gpu.blocks - 1 >= on_gpu.per_request:
            kept, engram, short_of_ram = on_gpu, "gpu", ""
    # vLLM holds one block back for itself
    enough = kept.blocks - 1 >= kept.per_request
    fits = enough and not short_of_ram
    missing = serve.unservable(config, layout)
    reasons = [short_of_ram, "" if enough else _shortage(layout, kept, setting), missing]
    line = serve.command(layout, setting, cluster, checkpoint, engram) if fits and layout.uniform else None
    if line and not missing:
        reasons.append(serve.notes(layout, setting))
    why = "; ".join(filter(None, reasons)) or f"{layout.dp * kept.blocks / kept.per_request:.2f} contexts fit"
    return Row(
        layout,
        legal_stock(config, layout),
        replay(config, layout),
        engram,
        fits,
        why,
        kept,
        estimate(found, layout, setting, cluster),
        None if missing else line,
        line if missing else None,
    )


def _shortage(layout: Layout, kept: Memory, setting: Setting) -> str:
    i = kept.short_stage
    first, end = layout.bounds[i]
    where = f"a rank of stage {i} (layers {first}-{end - 1})" if layout.pp > 1 else "a rank"
    needs = sum(kept.gib[i].values())
    if needs > kept.budget:
        return f"{where} needs {needs:.1f} GiB before its KV cache and may use {kept.budget:.1f}"
    share = kept.blocks / kept.per_request
    return f"{where} has {kept.budget - needs:.1f} GiB for KV, {share:.2f} of a context of {setting.context:,} tokens"


def longest_context(found: Weights, cluster: Cluster, setting: Setting) -> tuple[int, Layout] | None:
    """The longest context, in steps of 4,096 tokens, that a replica holds in a layout vLLM serves; None: none."""
    short = dataclasses.replace(setting, context=4096)
    best: tuple[int, Layout] | None = None
    for layout in layouts(found, cluster, short, replicas=False):
        low = best[0] // 4096 + 1 if best else 1
        high = setting.context // 4096
        while low <= high:
            middle = (low + high) // 2
            if _holds(found, layout, cluster, dataclasses.replace(setting, context=middle * 4096)):
                best, low = (middle * 4096, layout), middle + 1
            else:
                high = middle - 1
    return best


def _holds(found: Weights, layout: Layout, cluster: Cluster, setting: Setting) -> bool:
    if serve.unservable(found.config, layout):
        return False
    kept = memory(found, layout, setting, cluster.gpu.usable)
    return kept.blocks - 1 >= kept.per_request and not serve.placement(layout, kept, cluster)[1]


@dataclasses.dataclass(frozen=True, slots=True)
class Smallest:
    """The fewest GPUs of one kind that hold a context: with cuts vLLM takes, and with source replicas."""

    cluster: Cluster
    layout: Layout
    replicas: bool


def smallest_sets(found: Weights, setting: Setting) -> list[Smallest]:
    """For every known card the smallest set, of up to 32, that holds one context; hosts of eight. Without a set that
    vLLM serves today, or with a smaller one given source replicas, that one as well."""
    out: list[Smallest] = []
    hits: dict[tuple[float, bool], tuple[int, Layout] | None] = {}
    for gpu in KNOWN:
        if gpu.name in ("GA100", "A800"):
            continue  # the same memory as the A100
        for replicas in (False, True):
            if (gpu.usable, replicas) not in hits:
                hits[gpu.usable, replicas] = _smallest(found, setting, gpu.usable, replicas)
            hit = hits[gpu.usable, replicas]
            if hit is None or any(s.cluster.gpu is gpu and s.cluster.count <= hit[0] for s in out):
                continue
            count, layout = hit
            hosts = -(-count // 8)
            hosts = hosts if count % hosts == 0 else 1
            out.append(Smallest(Cluster(gpu, count, hosts, None, LINKS["pcie4"]), layout, replicas))
    return out


def _smallest(found: Weights, setting: Setting, usable: float, replicas: bool) -> tuple[int, Layout] | None:
    layers = found.config.num_hidden_layers
    total = sum(found.stored(name) for name in found.components if name != "engram_tables") / 2**30
    for count in range(max(1, int(total / usable / setting.utilisation)), MAX_SET + 1):
        for tp in reversed(LEGAL_TP):
            if count % tp or count // tp > layers:
                continue
            pp = count // tp
            for ep in _expert_ways(found.config, tp):
                for split in splits(found, (tp,) * pp, 1, ep, setting, usable, replicas):
                    layout = Layout(split, (tp,) * pp, 1, ep)
                    if not replicas and serve.unservable(found.config, layout):
                        continue
                    kept = memory(found, layout, setting, usable)
                    if kept.blocks - 1 >= kept.per_request:
                        return count, layout
    return None
