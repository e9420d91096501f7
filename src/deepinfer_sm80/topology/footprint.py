"""Bytes of weights on each rank, from the checkpoint's tensor list and vLLM's way of holding and cutting them.

Differences to the file: dense FP8 weights keep one scale byte per row and 32 columns (the file: per 32 x 32), ``wo_a``
is bf16, experts are padded to Marlin's tile, Engram's tables stay in host memory.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import re
from typing import TYPE_CHECKING

from deepinfer_sm80.model.schema import BLOCK, expected_tensors

if TYPE_CHECKING:
    from deepinfer_sm80.model.config import ModelConfig

GIB = 2**30
OUR_MULTIPLE, STOCK_MULTIPLE = 64, 128
_BYTES = {"BF16": 2, "F32": 4, "I8": 1, "F8_E4M3": 1, "F8_E8M0": 1}

# component, how it is cut: by TP, not at all, over the experts' group, or a table in host memory. First match counts.
_RULES: tuple[tuple[str, str, str], ...] = (
    (r"ffn\.experts\.", "experts", "experts"),
    (r"engram\.embed\.", "engram_tables", "table"),
    (r"attn\.indexer\.|attn\.compressor\.", "indexer", "whole"),
    (r"attn\.wo_a\.", "wo_a", "tp"),
    (r"attn\.(wq_b|wo_b|attn_sink)", "attention", "tp"),
    (r"shared_experts\.", "shared_experts", "tp"),
    (r"engram\.wkv\.", "engram", "tp"),
    (r"engram\.", "engram", "whole"),
    (r"^(embed|head)\.weight$", "embeddings", "tp"),
    (r"markov_head\.", "draft", "tp"),
    (r"main_proj\.|main_norm|confidence_head", "draft", "whole"),
    (r"hc_|ffn\.gate\.", "mhc_and_router", "whole"),
    (r"", "attention", "whole"),
)


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
    """Bytes of one component of one layer that are cut the same way, as vLLM holds them before cutting."""

    component: str
    cut: str
    held: int
    stored: int


@dataclasses.dataclass(frozen=True, eq=False)  # one object per model: compared and hashed by identity
class Weights:
    """Pieces of each layer and of the model's ends. Layer keys: 0..n-1, ``embed``, ``head``, ``draft``."""

    config: ModelConfig
    pieces: dict[int | str, tuple[Piece, ...]]

    @property
    def components(self) -> tuple[str, ...]:
        return tuple(sorted({piece.component for pieces in self.pieces.values() for piece in pieces}))

    def stored(self, component: str | None = None) -> int:
        """Bytes in the checkpoint, of one component or all of them."""
        every = (piece for pieces in self.pieces.values() for piece in pieces)
        return sum(piece.stored for piece in every if component in (None, piece.component))


@functools.lru_cache(maxsize=4)
def weights(config: ModelConfig) -> Weights:
    """The tensor list of ``config``, summed by layer, component and cut.

    Nine tensors in ten belong to experts and routers, all alike: they are listed for a few experts and multiplied.
    """
    few = dataclasses.replace(
        config,
        n_routed_experts=config.num_experts_per_tok,
        dspark_n_routed_experts=config.dspark_num_experts_per_tok,
    )
    times = config.n_routed_experts, few.n_routed_experts
    draft_times = config.dspark_n_routed_experts, few.dspark_n_routed_experts
    sums: dict[int | str, dict[tuple[str, str], list[int]]] = {}
    rules = [(re.compile(pattern), component, cut) for pattern, component, cut in _RULES]
    tensors = expected_tensors(few)
    for name, (dtype, shape) in tensors.items():
        stored = math.prod(shape) * _BYTES[dtype]
        held = _held(name, dtype, shape, stored, tensors)
        component, cut = next((c, k) for pattern, c, k in rules if pattern.search(name))
        key = _place(name)
        if key == "draft":
            component = "draft"
        if ".ffn.experts." in name or ".ffn.gate." in name:
            many, listed = draft_times if key == "draft" else times
            stored, held = stored * many // listed, held * many // listed
        entry = sums.setdefault(key, {}).setdefault((component, cut), [0, 0])
        entry[0] += held
        entry[1] += stored
    pieces = {
        key: tuple(Piece(component, cut, *sizes) for (component, cut), sizes in entries.items())
        for key, entries in sums.items()
    }
    return Weights(config, pieces)


def _place(name: str) -> int | str:
    head, _, rest = name.partition(".")
    if head == "layers":
        return int(rest.partition(".")[0])
    return {"embed": "embed", "mtp": "draft"}.get(head, "head")


def _held(
    name: str, dtype: str, shape: tuple[int, ...], stored: int, tensors: dict[str, tuple[str, tuple[int, ...]]]
) -> int:
    """Bytes of a tensor as vLLM holds it on Ampere."""
    if ".experts." in name or ".embed." in name:
        return stored
    if ".wo_a." in name:
        return 2 * math.prod(shape) if dtype == "F8_E4M3" else 0
    if dtype == "F8_E8M0":
        weight = tensors[name.removesuffix("scale") + "weight"][1]
        return math.prod(weight) // BLOCK
    return stored


@dataclasses.dataclass(frozen=True, slots=True)
class Cut:
    """How a stage is cut: ``tp`` ranks; experts over ``shards`` column slices or ``ep`` ranks with whole experts."""

    tp: int
    shards: int
    ep: int = 1
    multiple: int = OUR_MULTIPLE

    def columns(self, config: ModelConfig) -> int:
        """Expert columns on a rank, padding included."""
        return -(-(config.moe_intermediate_size // self.shards) // self.multiple) * self.multiple


def expert_bytes(config: ModelConfig, cut: Cut, experts: int) -> int:
    """One layer's routed experts on one rank: FP4 codes, a scale byte per 32, padding."""
    each = 3 * config.hidden_size * cut.columns(config) * (BLOCK + 2)
    return -(-experts // cut.ep) * each // (2 * BLOCK)


def stage_weights(
    found: Weights, first: int, end: int, cut: Cut, speculation: int = 0, ends: tuple[bool, bool] = (False, False)
) -> dict[str, int]:
    """Bytes per component on one rank of the stage with layers [first, end). ``ends``: is it the first, the last.

    ``engram_tables`` is the rank's part of the tables, wherever they are held.
    """
    total: dict[str, int] = {}
    for key in _keys(first, end, speculation, ends):
        for component, size in _place_bytes(found, key, cut).items():
            total[component] = total.get(component, 0) + size
    return total


def stage_total(found: Weights, first: int, end: int, cut: Cut, speculation: int, ends: tuple[bool, bool]) -> int:
    """The sum of ``stage_weights`` without Engram's tables, quickly."""
    sums = _running_totals(found, cut)
    rest = (key for key in _keys(0, 0, speculation, ends))
    return sums[end] - sums[first] + sum(sum(_place_bytes(found, key, cut).values()) for key in rest)


@functools.lru_cache(maxsize=256)
def _running_totals(found: Weights, cut: Cut) -> list[int]:
    layers = (_place_bytes(found, layer, cut) for layer in range(found.config.num_hidden_layers))
    on_gpu = (sum(size for name, size in parts.items() if name != "engram_tables") for parts in layers)
    return list(itertools.accumulate(on_gpu, initial=0))


def _keys(first: int, end: int, speculation: int, ends: tuple[bool, bool]) -> list[int | str]:
    keys: list[int | str] = list(range(first, end))
    # the draft embeds its own tokens, so the last stage of a speculating pipeline holds the embedding as well
    keys += ["embed"] * (ends[0] or (ends[1] and speculation > 0)) + ["head"] * ends[1]
    return keys + ["draft"] * (ends[1] and speculation > 0)


@functools.lru_cache(maxsize=16384)
def _place_bytes(found: Weights, key: int | str, cut: Cut) -> dict[str, int]:
    config = found.config
    total: dict[str, int] = {}
    experts = config.dspark_n_routed_experts if key == "draft" else config.n_routed_experts
    layers = config.num_nextn_predict_layers if key == "draft" else 1
    for piece in found.pieces.get(key, ()):
        if piece.cut == "experts":
            size = layers * expert_bytes(config, cut, experts)
        else:
            size = piece.held if piece.cut == "whole" else -(-piece.held // cut.tp)
        total[piece.component] = total.get(piece.component, 0) + size
    return total
