"""vLLM 0.33.0's KV-cache plan in plain integers: caches of a stage, their groups, bytes per block, tokens that fit.

The rules are those of vLLM's block-outermost planner (``vllm/v1/core/kv_cache_planning.py``); what it answers for
twelve layouts is stored in tests/topology/vllm_planner_points.json and compared to the block.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from deepinfer_sm80.model.config import ModelConfig

BLOCK_TOKENS = 128
WINDOW_BLOCK_TOKENS = 32
PAGE_ALIGNMENT = 576
RECORD_BYTES = 584  # 448 e4m3, 64 bf16, 8 scale bytes
INDEX_RECORD_BYTES = 132  # 128 e4m3 and an fp32 scale
_RING_ROWS = 8

COMPRESSED, WINDOW, RING = "compressed", "window", "ring"


@dataclasses.dataclass(frozen=True, slots=True)
class Cache:
    """One layer's cache: its kind decides how many blocks a request needs, ``page`` its bytes in a block."""

    name: str
    kind: str
    page: int


Group = tuple[Cache, ...]


def up(value: int, multiple: int) -> int:
    """``value`` rounded up to ``multiple``."""
    return -(-value // multiple) * multiple


def sources_read(config: ModelConfig, first: int, end: int) -> tuple[int, ...]:
    """KV sources that layers [first, end) read, their own included."""
    read = {
        max(s for s in config.kv_source_layer_ids if s <= i) for i in range(first, end) if config.compress_ratios[i]
    }
    return tuple(sorted(read))


def stage_caches(config: ModelConfig, first: int, end: int, speculation: int = 0, last: bool = False) -> list[Cache]:
    """Caches on a rank that holds layers [first, end), in the order in which layers make them.

    A source outside the stage that a layer of it reads is there as a replica under the source's own name: vLLM's
    planner takes layers of one name on several workers for the same layer. ``last`` with ``speculation``: the draft
    layers too.
    """
    caches: list[Cache] = []
    sources = sources_read(config, first, end)
    draft = config.num_nextn_predict_layers if last and speculation else 0
    for layer in sorted({*range(first, end), *sources}):
        if layer in sources:
            rows = BLOCK_TOKENS // config.compress_ratios[layer]
            caches.append(Cache(f"{layer}.kv", COMPRESSED, up(rows * RECORD_BYTES, PAGE_ALIGNMENT)))
            caches.append(Cache(f"{layer}.index", COMPRESSED, up(rows * INDEX_RECORD_BYTES, PAGE_ALIGNMENT)))
            if config.compress_ratios[layer] > 1:
                caches.append(Cache(f"{layer}.ring", RING, _ring_bytes(config, speculation)))
        if first <= layer < end:
            caches.append(_window(layer))
    return caches + [_window(config.num_hidden_layers + i) for i in range(draft)]


def _window(layer: int) -> Cache:
    return Cache(f"{layer}.window", WINDOW, up(WINDOW_BLOCK_TOKENS * RECORD_BYTES, PAGE_ALIGNMENT))


def _ring_bytes(config: ModelConfig, speculation: int) -> int:
    """Key and gate of each token of the open group, fp32; rows: drafts, bonus and previous one, a power of two."""
    rows = max(_RING_ROWS, 1 << (speculation + 1).bit_length())
    return rows * 2 * config.head_dim * 4


def merge(stages: Iterable[Sequence[Cache]]) -> list[Cache]:
    """Every stage's caches, each name once."""
    return list({cache.name: cache for caches in stages for cache in caches}.values())


def groups_of(caches: Sequence[Cache]) -> list[Group]:
    """The groups in which the whole model's caches share blocks: every group's layers live in one block."""
    buckets = [tuple(c for c in caches if c.kind == kind) for kind in dict.fromkeys(c.kind for c in caches)]
    repeats = _repeats_per_group(buckets)
    counts = [_group_count(bucket, repeats) for bucket in buckets]
    anchor = max(
        _widest(bucket, len(bucket) if _is_state(bucket, repeats) else count)
        for bucket, count in zip(buckets, counts, strict=True)
    )
    groups: list[Group] = []
    for bucket, fixed in zip(buckets, counts, strict=True):
        count = fixed
        if _is_state(bucket, repeats):
            count = max(count, -(-len(bucket) // max(anchor // bucket[0].page, 1)))
        if count == 1:
            groups.append(bucket)
            continue
        rows = list(zip(*_by_page(bucket).values(), strict=False))
        groups += [tuple(cache for row in rows[i::count] for cache in row) for i in range(count)]
    return groups


def _by_page(bucket: Group) -> dict[int, list[Cache]]:
    pages: dict[int, list[Cache]] = {}
    for cache in bucket:
        pages.setdefault(cache.page, []).append(cache)
    return pages


def _balanced(bucket: Group) -> bool:
    return len({len(caches) for caches in _by_page(bucket).values()}) == 1


def _longest(bucket: Group) -> int:
    return max(map(len, _by_page(bucket).values()))


def _is_state(bucket: Group, repeats: int) -> bool:
    """Buckets that may be spread over as many groups as keep a block from growing."""
    return bucket[0].kind == RING or (bucket[0].kind == WINDOW and not repeats)


def _repeats_per_group(buckets: Sequence[Group]) -> int:
    """Layers of one page size per group where a balanced bucket mixes page sizes; 0 where none does."""
    balanced = [bucket for bucket in buckets if _balanced(bucket)]
    floor = max((_longest(bucket) for bucket in balanced if len(_by_page(bucket)) > 1), default=0)
    if not floor:
        return 0
    lengths = [_longest(bucket) for bucket in balanced]
    padding = {size: sum(-length % size for length in lengths) for size in range(floor, max(lengths) + 1)}
    return min(padding, key=lambda size: (padding[size], -size))


def _group_count(bucket: Group, repeats: int) -> int:
    return -(-_longest(bucket) // repeats) if repeats and _balanced(bucket) else 1


def _widest(bucket: Group, count: int) -> int:
    return sum(-(-len(caches) // count) * page for page, caches in _by_page(bucket).items())


def bytes_per_block(groups: Iterable[Group], caches: Iterable[Cache]) -> int:
    """Bytes of one block on a rank that holds ``caches``: its part of the widest group."""
    here = {cache.name for cache in caches}
    return max(sum(cache.page for cache in group if cache.name in here) for group in groups)


def blocks_per_request(groups: Iterable[Group], context: int, in_flight: int, window: int) -> int:
    """Blocks vLLM reserves for a request of ``context`` tokens; ``in_flight``: tokens scheduled and not settled."""
    held = min(window - 1 + in_flight, context)
    need = {COMPRESSED: -(-context // BLOCK_TOKENS), WINDOW: -(-held // WINDOW_BLOCK_TOKENS) + 1, RING: 1}
    return sum(need[group[0].kind] for group in groups)


def in_flight_tokens(batched_tokens: int, pp: int, async_scheduling: bool = True) -> int:
    """Tokens of every batch that may run at once: one per stage, one more with asynchronous scheduling."""
    return batched_tokens * (pp + int(async_scheduling))


def capacity(blocks: int, per_request: int, context: int) -> int:
    """The number of tokens vLLM logs as its KV cache size."""
    return int(blocks / per_request * context)
