"""Weights: what is stored is the tensor list to the byte, what a rank holds is what vLLM's cutting leaves of it."""

import dataclasses
import math

import pytest

from deepinfer_sm80.model.config import ModelConfig, preset
from deepinfer_sm80.model.schema import expected_tensors
from deepinfer_sm80.topology.footprint import (
    GIB,
    STOCK_MULTIPLE,
    Cut,
    expert_bytes,
    stage_total,
    stage_weights,
    weights,
)
from deepinfer_sm80.topology.tiles import tile

CONFIG = ModelConfig()
FOUND = weights(CONFIG)
SIZES = {"BF16": 2, "F32": 4, "I8": 1, "F8_E4M3": 1, "F8_E8M0": 1}


@pytest.mark.parametrize("name", ["released", "tiny", "layer"])
def test_stored_bytes_are_the_tensor_lists(name):
    config = preset(name)
    listed = sum(math.prod(shape) * SIZES[dtype] for dtype, shape in expected_tensors(config).values())
    assert weights(config).stored() == listed


def test_components_of_the_released_model():
    """GiB that vLLM's own construction of the model gave."""
    whole = stage_weights(FOUND, 0, 40, Cut(1, 1), ends=(True, True))
    expected = {"experts": 268.95, "engram_tables": 188.83, "wo_a": 2.5, "shared_experts": 1.36, "embeddings": 2.47}
    for component, gib in expected.items():
        assert whole[component] / GIB == pytest.approx(gib, rel=0.005), component
    assert FOUND.stored("wo_a") / GIB == pytest.approx(1.25, rel=0.005)
    # 281 GiB with the vision tower (0.90), which the plugin leaves out, and RoPE tables (0.50), counted elsewhere
    device = sum(size for name, size in whole.items() if name != "engram_tables") / GIB
    assert device == pytest.approx(281 - 0.90 - 0.50, rel=0.005)


def test_held_weights_differ_from_stored_ones_as_stated():
    """wo_a doubles and loses its scales; dense FP8 gains 31 of 32 scale rows; the rest is kept to 0.5 %."""
    held = sum(stage_weights(FOUND, 0, 40, Cut(1, 1), 5, (True, True)).values())
    wo_a = 40 * 8192 * 4096
    assert held == pytest.approx(FOUND.stored() + wo_a, rel=0.005)
    assert stage_weights(FOUND, 0, 40, Cut(1, 1))["wo_a"] == 2 * wo_a


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_ranks_add_up_to_the_model(tp):
    one, cut = (stage_weights(FOUND, 0, 40, Cut(t, t, multiple=32), 5, (True, True)) for t in (1, tp))
    for component in ("experts", "wo_a", "shared_experts", "embeddings", "engram_tables"):
        assert tp * cut[component] == pytest.approx(one[component], rel=1e-6)
    for component in ("indexer", "mhc_and_router"):
        assert cut[component] == one[component]


def test_stages_add_up_and_the_quick_sum_is_the_same():
    cut = Cut(2, 2)
    parts = [(0, 14, (True, False)), (14, 28, (False, False)), (28, 40, (False, True))]
    whole = stage_weights(FOUND, 0, 40, cut, ends=(True, True))
    stages = [stage_weights(FOUND, first, end, cut, ends=ends) for first, end, ends in parts]
    assert sum(sum(s.values()) for s in stages) == sum(whole.values())
    assert stage_weights(FOUND, 28, 40, cut, 5, (False, True))["embeddings"] == whole["embeddings"], "draft and head"
    for first, end, ends in parts:
        for speculation in (0, 5):
            quick = stage_total(FOUND, first, end, cut, speculation, ends)
            slow = stage_weights(FOUND, first, end, cut, speculation, ends)
            assert quick == sum(size for name, size in slow.items() if name != "engram_tables")


@pytest.mark.parametrize(("tp", "ours", "stock"), [(1, 2304, 2304), (2, 1152, 1152), (4, 576, 640), (8, 320, 384)])
def test_expert_columns_and_what_rounding_to_64_saves(tp, ours, stock):
    ours_cut, stock_cut = Cut(tp, tp), Cut(tp, tp, multiple=STOCK_MULTIPLE)
    assert (ours_cut.columns(CONFIG), stock_cut.columns(CONFIG)) == (ours, stock)
    saved = 40 * (expert_bytes(CONFIG, stock_cut, 384) - expert_bytes(CONFIG, ours_cut, 384)) / GIB
    assert saved == pytest.approx(7.47 if ours != stock else 0, abs=0.01)


def test_whole_experts_are_never_padded():
    assert Cut(8, 1, 8).columns(CONFIG) == 2304
    assert 8 * expert_bytes(CONFIG, Cut(8, 1, 8), 384) == expert_bytes(CONFIG, Cut(1, 1), 384)
    assert expert_bytes(CONFIG, Cut(8, 1, 5), 384) == 77 * expert_bytes(CONFIG, Cut(1, 1), 1), "the fullest rank"


@pytest.mark.parametrize(
    ("columns", "useful", "stock", "down"),
    [(1152, 1, 1, (128, 128)), (576, 1, 0.9, (64, 256)), (320, 1, 320 / 384, (64, 256)), (288, 0.9, 0.75, (64, 256))],
)
def test_tiles(columns, useful, stock, down):
    found = tile(columns, 5120)
    assert (found.useful, found.useful_stock, found.down) == (useful, stock, down)


def test_a_changed_model_changes_the_sum():
    wider = dataclasses.replace(CONFIG, n_routed_experts=512)
    assert weights(wider).stored("experts") == FOUND.stored("experts") * 512 // 384
