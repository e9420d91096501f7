"""One layout: where it cuts the model, what each rank holds, how many tokens the KV cache takes."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import TYPE_CHECKING

from deepinfer_sm80.topology.footprint import GIB, Cut, Weights, stage_total, stage_weights
from deepinfer_sm80.topology.kv_cache import (
    blocks_per_request,
    bytes_per_block,
    capacity,
    groups_of,
    in_flight_tokens,
    sources_read,
    stage_caches,
)

if TYPE_CHECKING:
    from deepinfer_sm80.model.config import ModelConfig
    from deepinfer_sm80.topology.kv_cache import Group

LEGAL_TP = (1, 2, 4, 8)
PREFILL_REQUESTS = 4  # requests whose compressed rows one prefill chunk gathers (vLLM's PREFILL_CHUNK_SIZE)
INDEX_LOGITS = 512 * 2**20  # VLLM_SPARSE_INDEXER_MAX_LOGITS_MB


@dataclasses.dataclass(frozen=True, slots=True)
class Setting:
    """What is asked and assumed, the same for every layout.

    ``graphs`` and ``context_and_nccl`` in GiB: assumed. Their sum, 1.15, is the one number here that was chosen by the
    published capacities (published.py); everything else is computed. ``stock_rounding``: expert columns rounded to 128,
    as vLLM does without this plugin.
    """

    context: int = 1_048_576
    streams: int = 4
    speculation: int = 5
    utilisation: float = 0.95
    batched_tokens: int = 2048
    async_scheduling: bool = True
    graphs: float = 0.5
    context_and_nccl: float = 0.65
    stock_rounding: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Layout:
    """``split``: layers per stage; ``tp_per_stage``; ``ep``: ranks that share whole experts, 1: cut by columns."""

    split: tuple[int, ...]
    tp_per_stage: tuple[int, ...]
    dp: int = 1
    ep: int = 1

    @property
    def pp(self) -> int:
        return len(self.split)

    @property
    def tp(self) -> int:
        """Of every stage; the largest where they differ."""
        return max(self.tp_per_stage)

    @property
    def uniform(self) -> bool:
        return len(set(self.tp_per_stage)) == 1

    @property
    def gpus(self) -> int:
        return sum(self.tp_per_stage) * self.dp

    @property
    def bounds(self) -> tuple[tuple[int, int], ...]:
        edges = (0, *itertools.accumulate(self.split))
        return tuple(itertools.pairwise(edges))

    @property
    def name(self) -> str:
        tp = f"TP{self.tp}" if self.uniform else "TP" + "/".join(map(str, self.tp_per_stage))
        parts = [tp, *([f"PP{self.pp}"] if self.pp > 1 else []), *([f"DP{self.dp}"] if self.dp > 1 else [])]
        expert = f" + EP{self.ep}" if self.ep > 1 else ""
        layers = f" [{','.join(map(str, self.split))}]" if self.pp > 1 else ""
        return " x ".join(parts) + expert + layers

    def cut(self, stage: int, setting: Setting) -> Cut:
        tp = self.tp_per_stage[stage]
        multiple = 128 if setting.stock_rounding else 64
        return Cut(tp, 1 if self.ep > 1 else tp * self.dp, self.ep, multiple)


def legal_tp(config: ModelConfig) -> tuple[int, ...]:
    """Tensor-parallel sizes of the plugin that cut heads, output groups and Engram columns evenly."""
    cut = config.num_attention_heads, config.o_groups, *([config.engram_columns] if config.engram_layer_ids else [])
    return tuple(tp for tp in LEGAL_TP if all(count % tp == 0 for count in cut))


def legal_stock(config: ModelConfig, layout: Layout) -> bool:
    """True where no stage reads a KV source of another: the only cuts vLLM 0.33.0 takes."""
    return all(s >= first for first, end in layout.bounds for s in sources_read(config, first, end))


def replay(config: ModelConfig, layout: Layout) -> bool:
    """Whether prefill may run the layers from the last KV source on over the trailing window only: the last stage
    holds all of them, and no sequence parallelism (vLLM turns it on with EP, DP and TP together) shrinks the batch."""
    sequence_parallel = layout.ep > 1 and layout.dp > 1 and layout.tp > 1
    return layout.bounds[-1][0] <= max(config.kv_source_layer_ids) and not sequence_parallel


@dataclasses.dataclass(frozen=True, slots=True)
class Stage:
    """Layers [first, end) on the ranks of one pipeline stage; ``head``, ``tail``: is it the first, the last."""

    first: int
    end: int
    cut: Cut
    head: bool
    tail: bool


def stages_of(layout: Layout, setting: Setting) -> tuple[Stage, ...]:
    """The stages of ``layout`` in order."""
    last = layout.pp - 1
    return tuple(
        Stage(first, end, layout.cut(i, setting), i == 0, i == last) for i, (first, end) in enumerate(layout.bounds)
    )


@dataclasses.dataclass(frozen=True, slots=True)
class Memory:
    """GiB by component on each stage's ranks (``engram_tables`` apart: in host memory), KV bytes and blocks."""

    gib: tuple[dict[str, float], ...]
    tables: tuple[float, ...]
    budget: float
    kv_bytes: tuple[int, ...]
    block_bytes: tuple[int, ...]
    blocks: int
    per_request: int
    tokens: int

    @property
    def short_stage(self) -> int:
        """The stage with the fewest blocks."""
        return min(range(len(self.kv_bytes)), key=lambda i: self.kv_bytes[i] / self.block_bytes[i])


def memory(found: Weights, layout: Layout, setting: Setting, usable: float, tables_on_gpu: bool = False) -> Memory:
    """Plan ``layout`` on GPUs of ``usable`` GiB. ``tokens`` counts every data-parallel replica."""
    config, budget = found.config, setting.utilisation * usable
    groups = model_groups(config, setting.speculation)
    flight = in_flight_tokens(setting.batched_tokens, layout.pp, setting.async_scheduling)
    per_request = blocks_per_request(groups, setting.context, flight, config.sliding_window)
    gib, tables, kv, block_bytes = [], [], [], []
    for stage in stages_of(layout, setting):
        parts, held = stage_bytes(found, stage, setting)
        tables.append(held / GIB)
        if tables_on_gpu and held:
            parts = {**parts, "engram_tables": held}
        gib.append({name: size / GIB for name, size in parts.items()})
        kv.append(int(budget * GIB) - sum(parts.values()))
        block_bytes.append(block_size(config, stage, setting.speculation))
    blocks = max(0, min(k // b for k, b in zip(kv, block_bytes, strict=True)))
    tokens = capacity(blocks, per_request, setting.context) * layout.dp
    return Memory(tuple(gib), tuple(tables), budget, tuple(kv), tuple(block_bytes), blocks, per_request, tokens)


@functools.lru_cache(maxsize=64)
def model_groups(config: ModelConfig, speculation: int) -> tuple[Group, ...]:
    """The cache groups: those of the whole model, whatever the cuts, since replicas carry their source's name."""
    return tuple(groups_of(stage_caches(config, 0, config.num_hidden_layers, speculation, last=True)))


@functools.lru_cache(maxsize=8192)
def _block_size(config: ModelConfig, first: int, end: int, speculation: int, tail: bool) -> int:
    return bytes_per_block(model_groups(config, speculation), stage_caches(config, first, end, speculation, tail))


def block_size(config: ModelConfig, stage: Stage, speculation: int) -> int:
    """Bytes of one KV block on a rank of ``stage``."""
    return _block_size(config, stage.first, stage.end, speculation, stage.tail)


def stage_bytes(found: Weights, stage: Stage, setting: Setting) -> tuple[dict[str, int], int]:
    """Bytes by component on a rank of ``stage`` before its KV cache, and its part of Engram's tables."""
    parts = stage_weights(found, stage.first, stage.end, stage.cut, setting.speculation, (stage.head, stage.tail))
    tables = parts.pop("engram_tables", 0)
    return parts | runtime_bytes(found.config, stage, setting), tables


@functools.lru_cache(maxsize=65536)
def before_kv(found: Weights, stage: Stage, setting: Setting) -> tuple[int, int]:
    """Bytes on a rank of ``stage`` before its KV cache, and bytes of one KV block."""
    ends = (stage.head, stage.tail)
    held = stage_total(found, stage.first, stage.end, stage.cut, setting.speculation, ends)
    rest = sum(runtime_bytes(found.config, stage, setting).values())
    return held + rest, block_size(found.config, stage, setting.speculation)


def runtime_bytes(config: ModelConfig, stage: Stage, setting: Setting) -> dict[str, int]:
    """Bytes on a rank that are neither weights nor KV cache.

    ``activations``: per token of a full batch the streams in and out, sublayer inputs, and the largest of attention,
    experts and Engram projection. ``workspace``: the bf16 rows one prefill chunk gathers (four requests of the full
    context, at the lowest ratio of the stage), its index lists, and the indexer's logits. ``rope``: two fp32 tables.
    """
    first, end, tokens = stage.first, stage.end, setting.batched_tokens
    columns = stage.cut.columns(config)
    streams = 2 * config.hc_mult * config.hidden_size * 2 + 3 * config.hidden_size * 2
    heads = config.num_attention_heads // stage.cut.tp
    attention = 2 * heads * config.head_dim * 2 + config.o_groups * config.o_lora_rank // stage.cut.tp * 2
    experts = config.num_experts_per_tok * (max(2 * columns, config.hidden_size) + columns) * 2
    engram = (config.hc_mult + 1) * config.hidden_size * 2 * any(first <= i < end for i in config.engram_layer_ids)
    ratios = [config.compress_ratios[i] for i in range(first, end) if config.compress_ratios[i]]
    rows = setting.context // min(ratios) if ratios else 0
    gathered = PREFILL_REQUESTS * (rows + config.sliding_window + tokens) * config.head_dim * 2
    lists = tokens * (config.index_topk + config.sliding_window + config.candidate_topk_blocks) * 4
    plain = 0 in config.compress_ratios[first:end] or (setting.speculation > 0 and stage.tail)
    return {
        "rope": (bool(ratios) + plain) * config.max_position_embeddings * config.qk_rope_head_dim * 4,
        "activations": tokens * (streams + max(attention, experts, engram)),
        "workspace": gathered + lists + INDEX_LOGITS * bool(ratios),
        "graphs": int(setting.graphs * GIB),
        "cuda_context": int(setting.context_and_nccl * GIB),
    }
