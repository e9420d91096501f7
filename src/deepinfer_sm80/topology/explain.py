"""The plan in words and bars."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from deepinfer_sm80.topology import measured, ran, reckoning
from deepinfer_sm80.topology.offers import MAX_SET
from deepinfer_sm80.topology.search import ANY, Only
from deepinfer_sm80.topology.serve import Standing
from deepinfer_sm80.topology.tiles import tile

if TYPE_CHECKING:
    from collections.abc import Sequence

    from deepinfer_sm80.model.config import ModelConfig
    from deepinfer_sm80.topology.cluster import Cluster
    from deepinfer_sm80.topology.layout import Memory, Setting
    from deepinfer_sm80.topology.offers import Offer, Smallest
    from deepinfer_sm80.topology.search import Row

BAR = 40
SHOWN = 8
COMPONENTS = (
    ("experts", "routed experts, FP4"),
    ("attention", "attention, FP8"),
    ("wo_a", "wo_a as bf16"),
    ("shared_experts", "shared experts, FP8"),
    ("mhc_and_router", "mHC and routers"),
    ("indexer", "indexer, compressor"),
    ("engram", "Engram projection"),
    ("engram_tables", "Engram tables on the GPU"),
    ("embeddings", "embedding, head, bf16"),
    ("draft", "DSpark draft"),
    ("rope", "RoPE tables"),
    ("activations", "activations"),
    ("workspace", "prefill workspace"),
    ("graphs", "CUDA graphs (assumed)"),
    ("cuda_context", "CUDA context, NCCL (assumed)"),
)


def text(
    rows: Sequence[Row], cluster: Cluster, setting: Setting, config: ModelConfig, offer: Offer | None, only: Only
) -> str:
    """The plan for a terminal: the answer, the best layout's memory, command and reckoning, then the others."""
    fitting = [row for row in rows if row.fits]
    lines = _heading(cluster, setting)
    if not fitting:
        return "\n".join([*lines, *others(rows[:SHOWN], "The closest, and what stops each:")])
    best = fitting[0]
    first = best if best.servable or offer is None else offer.row
    lines += _first_what_runs(offer, setting, config, only) if not best.servable else []
    lines += [f"Best of {len(rows)} layouts, of which {len(fitting)} fit: {best.layout.name}{stop(best)}"]
    lines += ["", *in_full(best, setting, config), ""]
    lines += [*reckoning.lines(first, cluster, setting), ""]
    lines += others(fitting[1 : SHOWN + 1], "The next ones that fit:")
    rest = rows[len(fitting) :]
    return "\n".join([*lines, *(others(rest[:3], f"The first of {len(rest)} that do not fit:") if rest else [])])


def in_full(row: Row, setting: Setting, config: ModelConfig) -> list[str]:
    """The figures of a layout, the memory of its ranks, and its command."""
    bars = ["GiB on a rank of each stage, before the KV cache:", *memory_bars(row.memory)]
    return [*summary(row, setting, config), "", *bars, "", command_lines(row)]


def _first_what_runs(offer: Offer | None, setting: Setting, config: ModelConfig, only: Only) -> list[str]:
    """The best that can be served, at the context that it holds, where the best at the one asked for cannot be."""
    lines = [f"Best that vLLM serves: {offered(offer, only)}", ""]
    if offer is not None:
        at = dataclasses.replace(setting, context=offer.context)
        lines += [*in_full(offer.row, at, config), *([LIMIT] if offer.context < setting.context else []), ""]
    return [*lines, f"What would hold {setting.context:,} tokens cannot be served yet."]


def offered(offer: Offer | None, only: Only = ANY) -> str:
    """The layout of ``offer`` and how far it goes; that there is none of ``only`` these sizes."""
    if offer is None:
        return f"none{with_sizes(only)}, whatever the context"
    return f"{offer.row.layout.name}{stop(offer.row)}: up to {offer.context:,} tokens of context"


def with_sizes(only: Only) -> str:
    """`` with --tp 8``; empty where no size was asked for."""
    return f" with {only}" if only != ANY else ""


def stop(row: Row) -> str:
    """What keeps a layout that fits from being served, as a clause; empty where nothing does."""
    if row.standing == Standing.NONE:
        return " (vLLM has no command for it)"
    return " (needs source replicas)" if row.standing == Standing.REPLICAS else ""


def every(
    rows: Sequence[Row], cluster: Cluster, setting: Setting, config: ModelConfig, offer: Offer | None, only: Only
) -> str:
    """Every layout in full, best first: verdict, figures, memory of a rank, command; before them, where the best is
    none that can be served, the one that can."""
    lines = _heading(cluster, setting)
    if rows and rows[0].fits and not rows[0].servable:
        lines += [*_first_what_runs(offer, setting, config, only), ""]
    for number, row in enumerate(rows, 1):
        verdict = "fits" if row.fits else "does not fit"
        lines += [f"{number}. {row.layout.name}: {verdict}; {row.why}", *summary(row, setting, config)]
        lines += [*memory_bars(row.memory), command_lines(row), ""]
    return "\n".join([*lines, *(reckoning.lines(rows[0], cluster, setting) if rows else [])])


def _heading(cluster: Cluster, setting: Setting) -> list[str]:
    return [
        f"{cluster.label}, {cluster.hosts} host(s), {cluster.link.name}; {setting.context:,} tokens of context, "
        f"{setting.streams} streams, speculation {setting.speculation}, utilisation {setting.utilisation:g}",
        f"Memory is computed and speeds are estimates from a roofline; {_measured(cluster)}. "
        f"This plugin has run on at most {ran.GPUS} GPUs together.",
        *([cluster.taken] if cluster.taken else []),
        "",
    ]


def _measured(cluster: Cluster) -> str:
    here = measured.of(cluster.gpu)[0]
    return "what was measured on this card stands below" if here else "nothing here was measured on these GPUs"


def summary(row: Row, setting: Setting, config: ModelConfig) -> list[str]:
    """The main figures of a layout, a line each."""
    layout, kept, speed = row.layout, row.memory, row.estimate
    one = f"{row.over}, one prompt {speed.prefill / layout.dp:,.0f}" if layout.dp > 1 else ""
    cuts = "none" if layout.pp == 1 else "taken by stock vLLM" if row.legal else "need source replicas"
    if row.replay:
        replay = f"available; without it prefill would be {speed.replay_off:,.0f} tok/s{row.over}"
    else:
        replay = f"not available; with it prefill would be {speed.replay_on:,.0f} tok/s{row.over}"
    return [
        f"  KV cache        {kept.tokens:,} tokens, {row.contexts:.2f} full contexts "
        f"({kept.blocks:,} blocks, {kept.per_request:,} per request)",
        f"  cuts            {cuts}",
        f"  Engram tables   {row.engram}: {', '.join(f'{t:.1f}' for t in kept.tables)} GiB per rank of each stage",
        f"  host memory     {host_memory(row)}",
        f"  decoder replay  {replay}",
        f"  expert columns  {columns(row, config)}",
        f"  prefill         {speed.prefill:,.0f} tok/s{one} (estimated, prompt of {speed.prompt:,} tokens)",
        f"  decode step     {speed.decode_ms:.1f} ms (estimated, {setting.streams} streams of {setting.context // 2:,} "
        "tokens)",
    ]


def host_memory(row: Row) -> str:
    """GiB that the fullest host needs, and what for."""
    tables, processes = row.host_gib
    where = {"gpu": " (on the GPUs)", "disk": " (more than it has)"}.get(row.engram, "")
    return (
        f"{tables + processes:.0f} GiB per host: Engram tables {tables:.0f}{where}, processes and system "
        f"{processes:.0f} (assumed)"
    )


def columns(row: Row, config: ModelConfig) -> str:
    """Expert columns per rank of each kind of stage, with the useful share after padding."""
    if row.layout.ep > 1:
        return f"whole experts, {config.moe_intermediate_size} wide: no padding"
    found = [tile(width, config.hidden_size) for width in sorted(set(widths(row, config)), reverse=True)]
    return "; ".join(
        f"{t.columns} held as {t.padded} ({t.useful:.0%} useful; vLLM alone {t.padded_stock}, {t.useful_stock:.0%})"
        for t in found
    )


def widths(row: Row, config: ModelConfig) -> list[int]:
    """Expert columns of a rank of each stage before padding."""
    layout = row.layout
    shards = (1 if layout.ep > 1 else tp * layout.dp for tp in layout.tp_per_stage)
    return [config.moe_intermediate_size // count for count in shards]


def memory_bars(kept: Memory) -> list[str]:
    """Each stage's rank: a bar of its budget (``#`` weights, ``+`` the rest, ``.`` KV cache) and its components."""
    runtime = ("rope", "activations", "workspace", "graphs", "cuda_context")
    lines = []
    for i, parts in enumerate(kept.gib):
        weights = sum(size for name, size in parts.items() if name not in runtime)
        rest = sum(parts.values()) - weights
        filled = min(BAR, round(BAR * weights / kept.budget)), round(BAR * rest / kept.budget)
        bar = ("#" * filled[0] + "+" * filled[1])[:BAR].ljust(BAR, ".")
        free = kept.budget - weights - rest
        lines.append(f"  stage {i} [{bar}] weights {weights:.1f} + {rest:.1f}, KV {free:.1f} of {kept.budget:.1f}")
    for name, label in COMPONENTS:
        sizes = [parts.get(name, 0.0) for parts in kept.gib]
        if any(sizes):
            lines.append(f"    {label:29}" + "".join(f"{size:8.2f}" for size in sizes))
    return lines


LIMIT = (
    "This context is the longest by computation, in steps of 4,096 tokens: where vLLM finds less room it stops and "
    "names the longest that it can hold."
)


def command_lines(row: Row) -> str:
    """The command and what to know before it is used, or that there is none and why."""
    if row.command:
        return "\n".join([f"Command:\n  {row.command}", *row.cautions])
    why = row.why.removeprefix("best: ")
    if row.with_replicas:
        return "\n".join(
            [f"No command: {why}.\nWith source replicas it would be:\n  {row.with_replicas}", *row.cautions]
        )
    return f"No command: {why}."


def others(rows: Sequence[Row], title: str) -> list[str]:
    """A line for each row, with what it lost by."""
    lines = [f"  {row.layout.name}: {row.memory.tokens:,} tokens; {row.why}" for row in rows]
    return [title, *lines] if lines else []


def smallest(found: Sequence[Smallest], setting: Setting, only: Only) -> str:
    """The smallest sets that hold a context, a line each, and what to know of them."""
    lines = [f"Smallest sets that hold one context of {setting.context:,} tokens{with_sizes(only)}:"]
    held = {entry.cluster.gpu for entry in found if entry.layout}
    for entry in found:
        card = f"{entry.cluster.gpu.name}-{entry.cluster.gpu.memory}GB"
        if entry.layout is None:
            kind = " that vLLM serves" if entry.cluster.gpu in held else ""
            lines.append(f"  {card}: no set of up to {MAX_SET} GPUs{kind}")
            continue
        tags = [f"{entry.cluster.hosts} hosts"] if entry.cluster.hosts > 1 else []
        tags += ["a pipeline"] if entry.layout.pp > 1 else []
        tags += ["source replicas"] if entry.replicas else []
        lines.append(f"  {entry.cluster.label} as {entry.layout.name}" + (f" ({', '.join(tags)})" if tags else ""))
    return "\n".join([*lines, *_of_the_sets(found)])


def verdict(setting: Setting, only: Only, served: bool) -> str:
    """The last line of a plan: whether a layout that vLLM serves holds what was asked for, and the exit code."""
    asked = f"one context of {setting.context:,} tokens, in a cache that {setting.streams} stream(s) share"
    sizes = f", {only}" if only != ANY else ""
    return f"Exit code {0 if served else 1}: held by {'a' if served else 'no'} layout that vLLM serves: {asked}{sizes}."


def _of_the_sets(found: Sequence[Smallest]) -> list[str]:
    held = [(entry.layout, entry.cluster.hosts, entry.replicas) for entry in found if entry.layout]
    facts = (
        (any(replicas for _, _, replicas in held), "Source replicas: neither vLLM nor this plugin places them yet."),
        (any(layout.dp > 1 for layout, _, _ in held) and not ran.REPLICAS, ran.NO_REPLICAS),
        (any(hosts > 1 for _, hosts, _ in held) and not ran.RAY, f"Several hosts need Ray, which {ran.NEVER}."),
    )
    return [sentence for holds, sentence in facts if holds]


def capacity_chart(entries: Sequence[tuple[str, int]]) -> list[str]:
    """A bar per layout, as long as its tokens."""
    most = max((tokens for _, tokens in entries), default=1) or 1
    width = max(len(name) for name, _ in entries)
    return [f"{name:{width}} |{'#' * round(BAR * tokens / most):{BAR}}| {tokens:>12,}" for name, tokens in entries]
