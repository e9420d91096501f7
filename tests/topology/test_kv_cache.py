"""The KV-cache plan equals vLLM 0.33.0's own, to the block, and the sizes it is made of are the operators'."""

import json
from pathlib import Path

import pytest

from deepinfer_sm80.model.config import ModelConfig, preset
from deepinfer_sm80.ops.kv_cache import layout as record
from deepinfer_sm80.topology import kv_cache as kv
from deepinfer_sm80.topology.layout import Layout

CONFIG = ModelConfig()
STORED = json.loads(Path(__file__).with_name("vllm_planner_points.json").read_text())
POINTS = STORED["points"]


def planned(point):
    layout = Layout(tuple(point["split"]), (1,) * len(point["split"]))
    last = layout.pp - 1
    stages = [
        kv.stage_caches(CONFIG, first, end, point["speculation"], i == last)
        for i, (first, end) in enumerate(layout.bounds)
    ]
    groups = kv.groups_of(kv.merge(stages))
    block_bytes = [kv.bytes_per_block(groups, caches) for caches in stages]
    blocks = min(k // b for k, b in zip(point["kv_bytes"], block_bytes, strict=True))
    flight = kv.in_flight_tokens(point["batched_tokens"], layout.pp, point["async_scheduling"])
    per_request = kv.blocks_per_request(groups, point["context"], flight, CONFIG.sliding_window)
    return groups, block_bytes, blocks, kv.capacity(blocks, per_request, point["context"])


def test_the_points_are_twelve_layouts_of_the_supported_release():
    assert STORED["vllm"] == "0.33.0"
    assert len(POINTS) == 12
    assert len({(tuple(p["split"]), p["context"], p["batched_tokens"]) for p in POINTS}) == 12
    assert {len(p["split"]) for p in POINTS} == {1, 2, 3, 4, 6, 8}


@pytest.mark.parametrize("point", POINTS, ids=lambda p: f"{p['split']}-{p['context']}-{p['batched_tokens']}")
def test_blocks_and_tokens_are_vllms(point):
    groups, block_bytes, blocks, tokens = planned(point)
    assert sorted(sorted(cache.name for cache in group) for group in groups) == point["groups"]
    assert block_bytes == point["block_bytes"]
    assert blocks == point["blocks"]
    assert tokens == point["tokens"]


@pytest.mark.parametrize(
    ("gib", "context", "batched", "tokens"),
    [
        (10, 131072, 8192, 1974894),
        (10, 131072, 2048, 3923152),
        (10, 1048576, 8192, 4762380),
        (10, 32768, 2048, 1935471),
    ],
)
def test_one_stage_against_recorded_answers_of_vllm(gib, context, batched, tokens):
    point = {"split": [40], "kv_bytes": [gib * 2**30], "context": context, "batched_tokens": batched}
    assert planned({**point, "speculation": 0, "async_scheduling": True})[3] == tokens


def test_page_sizes_come_from_the_record_of_the_operators():
    pages = {c.name: c.page for c in kv.stage_caches(CONFIG, 0, 40)}
    assert (pages["2.kv"], pages["20.kv"], pages["0.window"]) == (37440, 74880, 19008)
    assert (pages["2.index"], pages["20.index"], pages["2.ring"]) == (8640, 17280, 32768)
    assert record.RECORD_BYTES == kv.RECORD_BYTES


def test_speculation_makes_the_ring_longer():
    ring = [c.page for c in kv.stage_caches(CONFIG, 0, 8, speculation=7) if c.kind == kv.RING]
    assert ring == [65536]


def test_a_stage_after_a_cut_holds_replicas_of_what_it_reads():
    names = [c.name for c in kv.stage_caches(CONFIG, 28, 40) if c.kind == kv.COMPRESSED]
    assert names == ["20.kv", "20.index"]
    assert kv.sources_read(CONFIG, 14, 28) == (14, 20)
    assert kv.sources_read(CONFIG, 0, 2) == ()


def test_balanced_buckets_are_split_in_repeats():
    """The tiny model has two sources of different ratios: four page sizes, one layer each."""
    groups = kv.groups_of(kv.stage_caches(preset("tiny"), 0, 8))
    sizes = sorted((group[0].kind, len(group)) for group in groups)
    assert sizes[0] == (kv.COMPRESSED, 4)
    assert all(size == 1 for kind, size in sizes if kind == kv.WINDOW)


def test_a_context_of_a_token_holds_no_more_than_that():
    """A compressed block, a window block and the one it begins in for each of four groups, a ring."""
    groups = kv.groups_of(kv.stage_caches(CONFIG, 0, 40, 5, last=True))
    assert kv.blocks_per_request(groups, 1, 4096, 128) == 1 + 4 * 2 + 1
    assert kv.blocks_per_request(groups, 32, 4096, 128) == 1 + 4 * 2 + 1
    assert kv.blocks_per_request(groups, 33, 4096, 128) == 1 + 4 * 3 + 1


def test_of_equal_paddings_the_larger_group_is_taken():
    """As vLLM's _approximate_gcd has it: two repeats and three pad 2 and 3 layers by one alike."""
    pair = tuple(kv.Cache(f"{i}.{name}", kv.COMPRESSED, page) for i in range(2) for name, page in (("kv", 9), ("x", 1)))
    windows = tuple(kv.Cache(f"{i}.window", kv.WINDOW, 5) for i in range(3))
    assert [len(group) for group in kv.groups_of([*pair, *windows])] == [4, 3]
