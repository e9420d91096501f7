"""The estimates by hand: every term of the formulas against numbers that are worked out here."""

import dataclasses
import math

import pytest

from deepinfer_sm80.model.config import ModelConfig
from deepinfer_sm80.topology import reckoning, roofline
from deepinfer_sm80.topology.cluster import LINKS, NETWORK, Cluster, Gpu, cluster
from deepinfer_sm80.topology.footprint import stage_weights, weights
from deepinfer_sm80.topology.layout import Layout, Setting
from deepinfer_sm80.topology.search import judge, plan

CONFIG = ModelConfig()
FOUND = weights(CONFIG)
SETTING = Setting()
EIGHT = cluster("8xA100-80GB")
TP8 = Layout((40,), (8,))
NVLINK = LINKS["nvlink"]


def reduce(size, ranks, link=NVLINK):
    return link.latency * 1e-6 + 2 * (ranks - 1) / ranks * size / (link.rate * 1e9)


def test_a_decode_step_by_hand():
    """TP8, four streams of 512K, five drafts: 24 rows."""
    setting = dataclasses.replace(SETTING, speculation=0)
    speed = roofline.estimate(FOUND, TP8, setting, EIGHT)
    parts = stage_weights(FOUND, 0, 40, TP8.cut(0, setting), 0, (False, True))
    reached = 384 * (1 - (378 / 384) ** 4)
    weighed = sum(size for name, size in parts.items() if name not in ("engram_tables", "experts"))
    weighed += parts["experts"] * reached / 384
    cache = 4 * 584 * (2 * 128 + 38 * (128 + 512))
    # layers 2, 8 and 14 score every second token, 20 every one, the four after it their 2,048 blocks of 8
    cache += 4 * 132 * (3 * 524_288 / 2 + 524_288 + 4 * 16_384)
    assert speed.read * 2**30 == pytest.approx(weighed + cache)
    joined = 40 * (60e-6 + 2 * reduce(4 * 5120 * 2, 8))
    assert speed.decode_ms == pytest.approx(1e3 * ((weighed + cache) / (2039e9 * 0.7) + joined))
    assert (speed.rows, speed.passes, speed.reached) == (4, 1, pytest.approx(reached))


def test_the_draft_is_read_and_its_layers_take_their_time():
    off, on = (
        roofline.estimate(FOUND, TP8, dataclasses.replace(SETTING, streams=streams, speculation=k), EIGHT)
        for streams, k in ((6, 0), (1, 5))
    )
    assert off.rows == on.rows == 6
    held = stage_weights(FOUND, 0, 0, TP8.cut(0, SETTING), 5, (False, True))["draft"]
    experts = 3 * 3 * 128 * 5120 * 320 * 34 // 64
    draft = held - experts + experts * (1 - (125 / 128) ** 5)
    scored = 5 * 132 * (3 * 524_288 / 2 + 524_288 + 4 * 16_384)
    assert (on.read - off.read) * 2**30 == pytest.approx(draft - scored)
    layers = 3 * (60e-6 + 2 * reduce(6 * 5120 * 2, 8))
    assert on.decode_ms - off.decode_ms == pytest.approx(1e3 * ((draft - scored) / (2039e9 * 0.7) + layers))


def test_a_prefill_by_hand():
    """What a token costs in each layer, from the widths; the card is slow enough to be the limit, the links free."""
    slow = Cluster(Gpu("slow", 80, 79.2, 1e6, 10), 1, link=NVLINK)
    speed = roofline.estimate(FOUND, Layout((40,), (1,)), SETTING, slow)
    experts = 7 * 3 * 5120 * 2304
    dense = 5120 * (1280 + 512) + 1280 * 64 * 512 + 8192 * 64 * 512 // 8 + 8192 * 5120
    index = [32 * 128 * (keys + 1280) for keys in (*[16_384] * 3, 32_768, *[16_384] * 4)]
    attention = 2 * 64 * 512 * (2 * 128 + 38 * 640)
    whole = 2 * (40 * (experts + dense) + attention + sum(index))
    assert speed.replay_off == pytest.approx(10e12 * 0.1032 / whole)
    half = 2 * (20 * (experts + dense) + 2 * 64 * 512 * (2 * 128 + 18 * 640) + sum(index[:3]))
    assert speed.replay_on == speed.prefill == pytest.approx(10e12 * 0.1032 / half)


def test_a_prefill_that_reads_longer_than_it_counts():
    slow = Cluster(Gpu("slow", 80, 79.2, 1, 1e6), 1, link=NVLINK)
    layout = Layout((40,), (1,))
    parts = stage_weights(FOUND, 0, 40, layout.cut(0, SETTING))
    read = sum(size for name, size in parts.items() if name != "engram_tables")
    found = roofline.estimate(FOUND, layout, SETTING, slow)
    assert found.replay_off == pytest.approx(2048 * 0.7e9 / read)
    assert found.replay_on == pytest.approx(2 * found.replay_off)


def test_a_pipeline_fills_and_hops():
    """Equal stages: PP2 is the slower of both plus a hop, and the first chunk runs through an empty pipeline."""
    quick = Gpu("quick", 80, 79.2, 1e9, 1e9)
    free = dataclasses.replace(NVLINK, rate=1e9, latency=0.0)
    slow_hop = Cluster(quick, 2, hosts=2, link=free)
    found = roofline.estimate(FOUND, Layout((20, 20), (1, 1)), SETTING, slow_hop)
    hop = roofline.HAND_OVER + 2048 * 4 * (2 * 5120 + 4) / (NETWORK.rate * 1e9)
    assert found.replay_off == pytest.approx(2048 * 32 / (33 * hop), rel=1e-3)
    step = 43 * 60e-6 + roofline.HAND_OVER + 24 * 4 * (2 * 5120 + 4) / (NETWORK.rate * 1e9)
    assert found.decode_ms == pytest.approx(1e3 * step, rel=1e-3)


def test_collectives_are_two_a_layer_the_experts_over_every_replica():
    found = roofline.estimate(FOUND, Layout((40,), (4,), 2), SETTING, EIGHT)
    alone = roofline._joined(CONFIG, Layout((40,), (4,), 2), SETTING, EIGHT, 12)
    assert alone == pytest.approx(43 * (60e-6 + reduce(12 * 10_240, 4) + reduce(2 * 12 * 10_240, 8)))
    assert found.collectives == 80
    assert roofline.estimate(FOUND, Layout((40,), (1,)), SETTING, EIGHT).collectives == 0
    assert roofline.estimate(FOUND, Layout((40,), (1,), 8), SETTING, EIGHT).collectives == 80
    two = dataclasses.replace(EIGHT, hosts=2)
    apart = roofline._joined(CONFIG, Layout((40,), (4,), 2), SETTING, two, 12)
    assert apart == pytest.approx(43 * (60e-6 + reduce(12 * 10_240, 4) + reduce(2 * 12 * 10_240, 8, NETWORK)))


def test_whole_experts_fall_unevenly():
    reached = 384 * (1 - (378 / 384) ** 24)
    assert roofline._imbalance(8, reached) == pytest.approx(1 + math.sqrt(2 * math.log(8) * 8 / reached))
    cut, whole = (roofline.estimate(FOUND, Layout((40,), (8,), ep=ep), SETTING, EIGHT) for ep in (1, 8))
    assert whole.read > 0.9 * cut.read, "no padding, but the fullest rank is waited for"
    full, nearly = (roofline._read(FOUND, Layout((40,), (8,), ep=8), SETTING, 0, 0, n) for n in (384, 300))
    assert full == nearly, "all of a rank's experts at most"


def test_more_rows_than_a_batch_takes_are_more_passes():
    """vLLM schedules --max-num-batched-tokens rows at a time: 1,024 streams of 6 are three batches of 2,048."""
    found = roofline.estimate(FOUND, TP8, dataclasses.replace(SETTING, streams=1024), EIGHT)
    assert (found.rows, found.passes) == (2048, 3)
    third = roofline.estimate(FOUND, TP8, dataclasses.replace(SETTING, streams=341), EIGHT)
    assert third.passes == 1
    assert found.decode_ms == pytest.approx(3 * third.decode_ms, rel=1e-2)
    split = roofline.estimate(FOUND, Layout((40,), (4,), 2), dataclasses.replace(SETTING, streams=5), EIGHT)
    assert split.rows == 18, "three streams on the fuller replica"


def test_a_context_shorter_than_64k_has_a_shorter_prompt():
    short = roofline.estimate(FOUND, TP8, dataclasses.replace(SETTING, context=8192), EIGHT)
    assert short.prompt == 8192
    assert roofline.estimate(FOUND, TP8, SETTING, EIGHT).prompt == roofline.PROMPT == 65_536
    assert roofline.estimate(FOUND, TP8, SETTING, EIGHT, 8192).prefill == short.prefill
    rows = plan(FOUND, EIGHT, dataclasses.replace(SETTING, context=8192))
    assert rows[0].job_seconds(4) == pytest.approx(
        4 * 8192 / rows[0].estimate.prefill + 1024 * rows[0].estimate.decode_ms / 1e3
    )


def test_the_reckoning_has_the_formulas_their_inputs_and_the_row():
    group = dataclasses.replace(EIGHT, hosts=2)
    row = judge(FOUND, Layout((40,), (4,), 2), group, SETTING)
    said = "\n".join(reckoning.lines(row, group, SETTING))
    assert all(line in said for line in roofline.FORMULAS)
    for words in (
        "card (data sheet): 2,039 GB/s x 0.7 (assumed), 312 TFLOP/s x 0.1032 (fitted to one published run)",
        "nvlink (measured between two NVIDIA H200, docs/multi-gpu.md): 195.7 GB/s, 6.02 us",
        "hand-over of a hop (measured between two NVIDIA H200): 516 us",
        "100 Gb/s network (assumed): 10 GB/s, 40 us",
        "small kernels (assumed): 60 us",
        "TP4 x DP2: 12 rows in a pass, passes: 1 (4 streams, speculation 5)",
        f"they reach 121 routed experts a layer and read {row.estimate.read:.2f} GiB",
        "collectives: 80, hops: 0",
    ):
        assert words in said
    assert "network" not in "\n".join(reckoning.lines(row, EIGHT, SETTING)), "of one host"
