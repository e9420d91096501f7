"""Every layout of a cluster, each with its best cuts, judged and put in order."""

from __future__ import annotations

import dataclasses
import itertools
from typing import TYPE_CHECKING

from deepinfer_sm80.topology import ran, serve
from deepinfer_sm80.topology.cuts import splits
from deepinfer_sm80.topology.layout import Layout, Memory, Setting, legal_stock, legal_tp, memory, replay
from deepinfer_sm80.topology.roofline import Estimate, estimate
from deepinfer_sm80.topology.serve import Standing

if TYPE_CHECKING:
    from collections.abc import Iterator

    from deepinfer_sm80.model.config import ModelConfig
    from deepinfer_sm80.topology.cluster import Cluster
    from deepinfer_sm80.topology.footprint import Weights

ANSWER_TOKENS = 1024
MAX_UNEQUAL_STAGES = 4  # asymmetric layouts of more stages are left out: each stage is one more hop

Ways = tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Only:
    """Sizes that the user has fixed; None: any."""

    tp: int | None = None
    pp: int | None = None
    dp: int | None = None

    def __str__(self) -> str:
        """As it was asked for: ``--tp 8 --pp 1``; empty where nothing was."""
        return " ".join(f"--{name} {size}" for name, size in dataclasses.asdict(self).items() if size is not None)

    def admits(self, ways: Ways, dp: int) -> bool:
        """Whether stages of ``ways`` tensor-parallel ranks, ``dp`` times, are of these sizes."""
        tp_fits = self.tp is None or set(ways) == {self.tp}
        return tp_fits and self.pp in (None, len(ways)) and self.dp in (None, dp)


ANY = Only()


@dataclasses.dataclass(frozen=True)
class Row:
    """A judged layout. ``engram``: where its tables are, ``host``, ``gpu`` or ``disk``. ``with_replicas``: the command
    once this package places replicas of KV sources, where only that is missing. ``cautions``: what in the command never
    ran or is taken as given, and what it leaves out. ``host_gib``: of RAM on the fullest host, Engram's tables and the
    processes."""

    layout: Layout
    standing: Standing
    legal: bool
    replay: bool
    engram: str
    fits: bool
    why: str
    memory: Memory
    estimate: Estimate
    command: str | None
    with_replicas: str | None
    cautions: tuple[str, ...]
    host_gib: tuple[float, float]

    @property
    def servable(self) -> bool:
        """Whether it fits and vLLM has a command for it."""
        return self.fits and self.standing == Standing.SERVABLE

    @property
    def over(self) -> str:
        """What a prefill speed is the sum over: `` over 2 replicas``; empty with one."""
        return f" over {self.layout.dp} replicas" if self.layout.dp > 1 else ""

    @property
    def contexts(self) -> float:
        """Full contexts that the caches of all replicas hold."""
        return self.layout.dp * self.memory.blocks / self.memory.per_request

    def job_seconds(self, streams: int) -> float:
        """What the order goes by: a prompt for each stream, of 64K or the context, then 1,024 decode steps."""
        return streams * self.estimate.prompt / self.estimate.prefill + ANSWER_TOKENS * self.estimate.decode_ms / 1e3


def plan(
    found: Weights,
    cluster: Cluster,
    setting: Setting,
    checkpoint: str = "DIR",
    only: Only = ANY,
    replicas: bool = True,
) -> list[Row]:
    """Every layout of ``only`` these sizes, best first: what fits before what does not, then by ``Standing``, then what
    fits by the least ``job_seconds`` and the rest by the least that is missing. Without ``replicas``: equal stages and
    legal cuts only."""
    rows = [
        judge(found, layout, cluster, setting, checkpoint)
        for layout in layouts(found, cluster, setting, only, replicas)
    ]

    def order(row: Row) -> tuple[object, ...]:
        layout = row.layout
        last = row.job_seconds(setting.streams) if row.fits else -_room(row)
        return (not row.fits, row.standing, last, layout.pp, layout.ep, layout.tp_per_stage, layout.split)

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
                f"; {ratio:.2f}x the best's time (prefill {row.estimate.prefill:,.0f} tok/s{row.over} against "
                f"{best.estimate.prefill:,.0f}{best.over}, step {row.estimate.decode_ms:.1f} against "
                f"{best.estimate.decode_ms:.1f} ms)"
            )
        out.append(dataclasses.replace(row, why=why))
    return out


def layouts(
    found: Weights, cluster: Cluster, setting: Setting, only: Only = ANY, replicas: bool = True
) -> Iterator[Layout]:
    """TP x PP x DP (x EP) over all GPUs, and pipelines of unequal stages, each with the cuts worth judging.
    Without ``replicas``: equal stages and legal cuts only."""
    usable = cluster.gpu.usable
    for ways, dp, ep in shapes(found.config, cluster.count, only):
        for split in splits(found, ways, dp, ep, setting, usable, replicas):
            yield Layout(split, ways, dp, ep)
    for ways in _unequal(found.config, cluster.count) if replicas else []:
        if only.admits(ways, 1):
            for split in splits(found, ways, 1, 1, setting, usable):
                yield Layout(split, ways)


def shapes(config: ModelConfig, count: int, only: Only = ANY) -> Iterator[tuple[Ways, int, int]]:
    """Ranks of each of the equal stages, replicas, and ranks that share whole experts, of ``count`` GPUs."""
    for tp in legal_tp(config):
        for dp in (d for d in range(1, count // tp + 1) if count % (tp * d) == 0):
            pp = count // (tp * dp)
            if pp <= config.num_hidden_layers and only.admits((tp,) * pp, dp):
                for ep in _expert_ways(config, tp * dp):
                    yield (tp,) * pp, dp, ep


def _expert_ways(config: ModelConfig, ranks: int) -> Iterator[int]:
    """1: columns cut ``ranks`` ways, where whole scale groups of 32 are left; ``ranks``: whole experts."""
    inter = config.moe_intermediate_size
    if inter % ranks == 0 and (inter // ranks) % 32 == 0:
        yield 1
    if 1 < ranks <= config.n_routed_experts:
        yield ranks


def _unequal(config: ModelConfig, count: int) -> list[tuple[int, ...]]:
    stages = range(2, MAX_UNEQUAL_STAGES + 1)
    every = itertools.chain.from_iterable(itertools.product(legal_tp(config), repeat=n) for n in stages)
    return sorted(ways for ways in every if sum(ways) == count and len(set(ways)) > 1)


def judge(found: Weights, layout: Layout, cluster: Cluster, setting: Setting, checkpoint: str = "DIR") -> Row:
    """Memory, speed and the command of one layout."""
    config = found.config
    kept, engram, short_of_ram = held(found, layout, setting, cluster)
    enough = holds(kept)
    fits = enough and not short_of_ram
    standing, missing = serve.standing(config, layout, cluster)
    reasons = [short_of_ram, "" if enough else _shortage(layout, kept, setting), missing]
    line = serve.command(layout, setting, cluster, checkpoint, engram) if fits and standing < Standing.NONE else None
    left_out = serve.notes(layout, setting) if line else ""
    reasons.append("" if missing else left_out)
    why = "; ".join(filter(None, reasons)) or f"{layout.dp * kept.blocks / kept.per_request:.2f} contexts fit"
    shared = serve.sharing(config, layout, kept.tables, cluster) if line and engram == "host" else ""
    left_out = f"{left_out[:1].upper()}{left_out[1:]}." if left_out else ""
    in_ram = 0.0 if engram == "gpu" else serve.host_tables(layout, kept.tables, cluster)
    return Row(
        layout,
        standing,
        legal_stock(config, layout),
        replay(config, layout),
        engram,
        fits,
        why,
        kept,
        estimate(found, layout, setting, cluster),
        None if missing else line,
        line if missing else None,
        (*ran.cautions(layout, cluster), *filter(None, (shared, left_out))),
        (in_ram, serve.processes(cluster)),
    )


def held(found: Weights, layout: Layout, setting: Setting, cluster: Cluster) -> tuple[Memory, str, str]:
    """What a rank holds, where Engram's tables are, and why they are nowhere: in host memory, else on the GPU."""
    kept = memory(found, layout, setting, cluster.gpu.usable)
    engram, short_of_ram = serve.placement(layout, kept, cluster)
    if short_of_ram and holds(kept) and serve.tables_may_be_on_gpu(found.config, layout, cluster):
        on_gpu = memory(found, layout, setting, cluster.gpu.usable, tables_on_gpu=True)
        if holds(on_gpu):
            return on_gpu, "gpu", ""
    return kept, engram, short_of_ram


def holds(kept: Memory) -> bool:
    """Whether the cache takes one context; vLLM holds one block back for itself."""
    return kept.blocks - 1 >= kept.per_request


def _shortage(layout: Layout, kept: Memory, setting: Setting) -> str:
    i = kept.short_stage
    first, end = layout.bounds[i]
    where = f"a rank of stage {i} (layers {first}-{end - 1})" if layout.pp > 1 else "a rank"
    needs = sum(kept.gib[i].values())
    if needs > kept.budget:
        return f"{where} needs {needs:.1f} GiB before its KV cache and may use {kept.budget:.1f}"
    share = kept.blocks / kept.per_request
    return f"{where} has {kept.budget - needs:.1f} GiB for KV, {share:.2f} of a context of {setting.context:,} tokens"
