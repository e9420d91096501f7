"""Estimated prefill rate and decode step: bytes and operations of a stage against the card, plus the links.

FORMULAS says how, and is printed with every plan. Of the constants one is taken from a published run, those of NVLink
and of a hop's hosts were measured between two GPUs, and the others are assumptions. measured.py holds measured layouts.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

from deepinfer_sm80.topology.cluster import NETWORK, Link
from deepinfer_sm80.topology.footprint import expert_bytes, stage_weights
from deepinfer_sm80.topology.kv_cache import INDEX_RECORD_BYTES, RECORD_BYTES
from deepinfer_sm80.topology.layout import replay

if TYPE_CHECKING:
    from deepinfer_sm80.model.config import ModelConfig
    from deepinfer_sm80.topology.cluster import Cluster
    from deepinfer_sm80.topology.footprint import Weights
    from deepinfer_sm80.topology.layout import Layout, Setting

PREFILL_SHARE = 0.1032  # of the card's TFLOP/s: chosen so that the published 4,507 tok/s come out (published.py)
BANDWIDTH_SHARE = 0.7  # of the data sheet's bandwidth, assumed
LAYER_OVERHEAD = 60e-6  # seconds a layer's small kernels take beside its weights, assumed
HAND_OVER = 516e-6  # seconds a hop takes its stages' hosts, measured between two NVIDIA H200 (docs/multi-gpu.md)
PROMPT = 65_536
FORMULAS = (
    "decode step = passes x [sum over stages of (weights + cache read) / (GB/s x its share)",
    "              + per layer: overhead + all-reduce over TP + all-reduce over TP x DP, rows x hidden each",
    "              + one hop per cut: rows x streams and pre-mix]",
    "prefill chunk of a stage = max(operations / (TP x TFLOP/s x its share), weights / (GB/s x its share))",
    "              + per layer the two all-reduces, tokens x hidden each",
    "prefill tok/s = DP x tokens x chunks / ((chunks + PP - 1) x (slowest stage + hop))",
    "all-reduce over n ranks = latency + 2 (n - 1) / n x bytes / GB/s; a hop = hand-over + bytes / GB/s",
    "weights read in a decode step: all but the routed experts that none of its rows reaches, picked at random",
)


@dataclasses.dataclass(frozen=True, slots=True)
class Estimate:
    """``prefill``: tokens/s for one prompt of ``prompt`` tokens per replica, all replicas together, with decoder replay
    where the layout has it; ``replay_on``, ``replay_off``: the same if it had it, if not; ``decode_ms``: one step of
    all streams of one replica; ``hops``, ``collectives``: per step. ``rows``: tokens of one pass of a decode step on a
    replica, ``passes``: batches that the step takes; ``reached``: routed experts of a layer that they reach; ``read``:
    GiB that one rank of each stage reads, all stages together."""

    prefill: float
    replay_on: float
    replay_off: float
    decode_ms: float
    hops: int
    collectives: int
    prompt: int
    rows: float
    passes: int
    reached: float
    read: float


def estimate(found: Weights, layout: Layout, setting: Setting, cluster: Cluster, prompt: int | None = None) -> Estimate:
    """What the formulas give. ``prompt``: its tokens, 64K or the context if that is shorter. Expects a layout of no
    more GPUs than the cluster has."""
    prompt = prompt or min(PROMPT, setting.context)
    off, on = (_prefill(found, layout, setting, cluster, prompt, skip) for skip in (False, True))
    collectives = sum(2 * n for n, tp in zip(layout.split, layout.tp_per_stage, strict=True) if tp * layout.dp > 1)
    streams, rows, passes = _pass(layout, setting)
    reached = _touched(found.config.n_routed_experts, found.config.num_experts_per_tok, rows * layout.dp)
    read = [_read(found, layout, setting, i, streams, reached) for i in range(layout.pp)]
    seconds = passes * (_joined(found.config, layout, setting, cluster, rows) + sum(read) / _rate(cluster))
    best = on if replay(found.config, layout) else off
    held = sum(read) / 2**30
    return Estimate(best, on, off, 1e3 * seconds, layout.pp - 1, collectives, prompt, rows, passes, reached, held)


def links(layout: Layout, cluster: Cluster) -> tuple[list[Link], list[Link]]:
    """The link of each stage's collectives and of each hop: the network's wherever the GPUs are on two hosts."""
    stages, hops, first = [], [], 0
    for i, tp in enumerate(layout.tp_per_stage):
        last = first + tp - 1
        together = first // cluster.per_host == last // cluster.per_host
        stages.append(cluster.link if together else NETWORK)
        if i + 1 < layout.pp:
            hops.append(cluster.link if last // cluster.per_host == (last + 1) // cluster.per_host else NETWORK)
        first += tp
    return stages, hops


def _reduce(size: float, ranks: int, link: Link) -> float:
    return 0.0 if ranks == 1 else link.latency * 1e-6 + 2 * (ranks - 1) / ranks * size / (link.rate * 1e9)


def _layer_collectives(layout: Layout, cluster: Cluster, stage: int, size: float, link: Link) -> float:
    """Seconds of a layer's two: attention over TP, experts over TP x DP with every replica's tokens."""
    tp = layout.tp_per_stage[stage]
    wide = NETWORK if layout.dp > 1 and cluster.hosts > 1 else link
    return _reduce(size, tp, link) + _reduce(size * layout.dp, tp * layout.dp, wide)


def hop_bytes(config: ModelConfig) -> int:
    """Bytes of a token that one pipeline stage hands to the next: the streams in bfloat16, their pre-mix in float32."""
    return config.hc_mult * (config.hidden_size * 2 + 4)


def _hop(config: ModelConfig, rows: float, links_: list[Link]) -> float:
    size = rows * hop_bytes(config)
    return max((HAND_OVER + size / (link.rate * 1e9) for link in links_), default=0.0)


def _operations(config: ModelConfig, layer: int, context: float) -> float:
    """Floating-point operations of a token in a layer, ``context`` tokens behind it."""
    hidden, width = config.hidden_size, config.num_attention_heads * config.head_dim
    experts = (config.num_experts_per_tok + config.n_shared_experts) * 3 * hidden * config.moe_intermediate_size
    low = config.o_groups * config.o_lora_rank
    dense = hidden * (config.q_lora_rank + config.head_dim) + config.q_lora_rank * width
    dense += low * width // config.o_groups + low * hidden
    keys = config.sliding_window + (config.index_topk if config.compress_ratios[layer] else 0)
    attention = 2 * width * keys
    index = 0.0
    if layer in config.index_source_layer_ids:
        scored = _scored(config, layer, context)
        index = config.index_n_heads * config.index_head_dim * (scored + config.q_lora_rank)
    return 2.0 * (experts + dense + attention + index)


def _scored(config: ModelConfig, layer: int, context: float) -> float:
    """Index keys scored per row. Layers after the candidates' source score the candidates only."""
    rows = context / config.compress_ratios[layer]
    after = config.candidate_source_layer_id >= 0 and layer > config.candidate_source_layer_id
    return min(rows, config.candidate_topk_blocks * config.candidate_block_size) if after else rows


def _rate(cluster: Cluster) -> float:
    """Bytes/s that a card reads."""
    return cluster.gpu.bandwidth * 1e9 * BANDWIDTH_SHARE


def _prefill(found: Weights, layout: Layout, setting: Setting, cluster: Cluster, prompt: int, skip: bool) -> float:
    config, gpu, tokens = found.config, cluster.gpu, min(setting.batched_tokens, prompt)
    cut = max(config.kv_source_layer_ids)
    stage_links, hops = links(layout, cluster)
    slowest = 0.0
    for i, (first, end) in enumerate(layout.bounds):
        tp = layout.tp_per_stage[i]
        run = range(first, min(end, cut) if skip else end)
        work = tokens * sum(_operations(config, layer, prompt / 2) for layer in run)
        compute = work / (tp * gpu.tflops * 1e12 * PREFILL_SHARE)
        read = _resident(found, layout, setting, i) * len(run) / max(1, end - first)
        loading = read / _rate(cluster)
        size = tokens * config.hidden_size * 2
        joined = _layer_collectives(layout, cluster, i, size, stage_links[i])
        slowest = max(slowest, max(compute, loading) + len(run) * joined)
    slowest += _hop(config, tokens, hops)
    chunks = -(-prompt // tokens)
    return layout.dp * tokens * chunks / ((chunks + layout.pp - 1) * slowest)


def _resident(found: Weights, layout: Layout, setting: Setting, stage: int) -> int:
    first, end = layout.bounds[stage]
    parts = stage_weights(found, first, end, layout.cut(stage, setting))
    return sum(size for name, size in parts.items() if name != "engram_tables")


def _touched(experts: int, chosen: int, rows: float) -> float:
    """Experts that ``rows`` tokens reach if each picks ``chosen`` at random."""
    missed: float = (1 - chosen / experts) ** rows
    return experts * (1 - missed)


def _imbalance(ranks: int, reached: float) -> float:
    """Load of the fullest of ``ranks`` against the mean when ``reached`` experts fall on them at random."""
    return 1.0 if ranks == 1 else 1 + math.sqrt(2 * math.log(ranks) * ranks / reached)


def _pass(layout: Layout, setting: Setting) -> tuple[float, float, int]:
    """Streams and rows of one batch of a decode step on a replica, and the batches that all its streams take."""
    streams = -(-setting.streams // layout.dp)
    rows = streams * (setting.speculation + 1)
    passes = -(-rows // setting.batched_tokens)
    return streams / passes, rows / passes, passes


def _joined(config: ModelConfig, layout: Layout, setting: Setting, cluster: Cluster, rows: float) -> float:
    """Seconds of a decode step that are not reading: hops, collectives, and the layers' small kernels."""
    stage_links, hops = links(layout, cluster)
    seconds = sum((_hop(config, rows, [link]) for link in hops), 0.0)
    for i, layers in enumerate(layout.split):
        drafts = config.num_nextn_predict_layers if setting.speculation and i == layout.pp - 1 else 0
        joined = _layer_collectives(layout, cluster, i, rows * config.hidden_size * 2, stage_links[i])
        seconds += (layers + drafts) * (LAYER_OVERHEAD + joined)
    return seconds


def _read(found: Weights, layout: Layout, setting: Setting, stage: int, streams: float, reached: float) -> float:
    """Bytes that a rank of ``stage`` reads in a pass: its weights, the experts ``reached`` alone, and its caches."""
    config, rows, last = found.config, streams * (setting.speculation + 1), stage == layout.pp - 1
    first, end = layout.bounds[stage]
    parts = stage_weights(found, first, end, layout.cut(stage, setting), 0, (False, last))
    read: float = sum(size for name, size in parts.items() if name not in ("engram_tables", "experts"))
    read += parts["experts"] * min(1.0, reached / config.n_routed_experts * _imbalance(layout.ep, reached))
    for layer in range(first, end):
        keys = config.sliding_window + config.index_topk * bool(config.compress_ratios[layer])
        read += rows * RECORD_BYTES * keys
        if layer in config.index_source_layer_ids:
            read += streams * INDEX_RECORD_BYTES * _scored(config, layer, setting.context / 2)
    return read + (_draft_read(found, layout, setting, stage, streams) if setting.speculation and last else 0)


def _draft_read(found: Weights, layout: Layout, setting: Setting, stage: int, streams: float) -> float:
    config, cut = found.config, layout.cut(stage, setting)
    held = stage_weights(found, 0, 0, cut, setting.speculation, (False, True)).get("draft", 0)
    experts = config.num_nextn_predict_layers * expert_bytes(config, cut, config.dspark_n_routed_experts)
    reached = _touched(config.dspark_n_routed_experts, config.dspark_num_experts_per_tok, streams * setting.speculation)
    return held - experts + experts * reached / config.dspark_n_routed_experts
