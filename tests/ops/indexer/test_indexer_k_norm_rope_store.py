"""What the shared contract cannot say about indexer_k_norm_rope_store."""

import sys

import pytest
import torch

from deepinfer_sm80 import ops
from deepinfer_sm80.errors import TensorContractError
from deepinfer_sm80.ops.formats import e4m3
from deepinfer_sm80.ops.indexer.indexer_k_norm_rope_store.kernel import indexer_k_norm_rope_store as kernel
from deepinfer_sm80.ops.kv_cache.layout import index_key_views
from deepinfer_sm80.testing.cloning import clone_arguments, storage_bytes

OP = "indexer_k_norm_rope_store"
launch = ops.pytorch(OP)
room = sys.modules[launch.__module__]


def example(device, case="T45-stored37-bs64-r2"):
    return clone_arguments(dict(ops.spec(OP).cases(device))[case])


def simple(device, k_pre, positions, slots, ratio):
    """Unit weight and a table that turns pairs by 90 degrees at position 2 only."""
    table = torch.zeros(8, 64, device=device)
    table[:, :32] = 1.0
    table[2, :32], table[2, 32:] = 0.0, 1.0
    storage = torch.full((2 * 8640,), 0xA5, dtype=torch.uint8, device=device)
    return {
        "k_pre": k_pre.to(device).bfloat16(),
        "positions": torch.tensor(positions, device=device),
        "cos_sin_cache": table,
        "norm_weight": torch.ones(128, dtype=torch.bfloat16, device=device),
        "eps": 1e-20,
        "kv_cache": storage.as_strided((2, 64, 132), (8640, 132, 1)),
        "slot_mapping": torch.tensor(slots, device=device),
        "compress_ratio": ratio,
    }


def stored(kwargs, slot):
    codes, scales = index_key_views(kwargs["kv_cache"])
    return e4m3.decode(codes[slot // 64, slot % 64]) * scales[slot // 64, slot % 64].clone().view(torch.float32)


def test_key_is_normalised_then_turned_at_the_start_of_its_group(device):
    x = torch.arange(1, 129, dtype=torch.float32)
    kwargs = simple(device, x.expand(4, 128), [0, 1, 2, 3], [70, 71, 72, 73], 2)
    launch(**kwargs)
    norm = x / x.square().mean().sqrt()
    turned = norm.clone()
    turned[64::2], turned[65::2] = -norm[65::2], norm[64::2]
    for slot, want in ((71, norm), (73, turned)):
        got = stored(kwargs, slot).cpu()
        assert ((got - want).abs() <= 0.07 * want.abs() + 1e-3).all(), slot


def test_only_the_bytes_of_closed_groups_change(device):
    kwargs = example(device)
    before = storage_bytes(kwargs, "kv_cache").clone()
    launch(**kwargs)
    slots, positions = kwargs["slot_mapping"].tolist(), kwargs["positions"].tolist()
    writable = torch.zeros_like(before, dtype=torch.bool)
    page, start = kwargs["kv_cache"].stride(0), kwargs["kv_cache"].storage_offset()
    live = 0
    for slot, position in zip(slots, positions[: len(slots)], strict=True):
        if 0 <= slot < 3 * 64 and position % 2 == 1:
            base = start + slot // 64 * page
            writable[base + slot % 64 * 128 :][:128] = True
            writable[base + 64 * 128 + slot % 64 * 4 :][:4] = True
            live += 1
    assert 5 < live < 37
    changed = storage_bytes(kwargs, "kv_cache") != before
    assert not (changed & ~writable).any()
    assert (changed & writable).sum() > 100 * live


@pytest.mark.parametrize("first_valid", [0, 3, 8, None])
def test_masked_rows_never_disturb_a_live_slot(device, first_valid):
    """Masked rows name live slots through stale positions and through -1; slot 0 is live too."""
    g = torch.Generator().manual_seed(3)
    positions, slots = [2] * 9, [-1, 0, 64, 0, 1, -1, 1 << 50, 128, 0]
    if first_valid is not None:
        positions[first_valid], slots[first_valid] = 3, 64
    kwargs = simple(device, torch.randn(9, 128, generator=g), positions, slots, 2)
    before = kwargs["kv_cache"].clone()
    launch(**kwargs)
    assert torch.equal(index_key_views(kwargs["kv_cache"])[0][0], before[0].reshape(-1)[: 64 * 128].view(64, 128))
    changed = (kwargs["kv_cache"] != before).flatten(1).any(1).tolist()
    assert changed == [False, first_valid is not None]


def test_rows_do_not_depend_on_the_tile_they_fall_in(device, monkeypatch):
    whole, tiled = example(device), example(device)
    launch(**whole)
    monkeypatch.setattr(room, "_ROWS_AT_ONCE", 4)
    launch(**tiled)
    assert torch.equal(storage_bytes(whole, "kv_cache"), storage_bytes(tiled, "kv_cache"))


def test_int32_slots_and_strided_keys(device):
    want, got = example(device), example(device)
    launch(**want)
    wide = torch.zeros(45, 300, dtype=torch.bfloat16, device=device)
    wide[:, 128:256] = got["k_pre"]
    slots = got["slot_mapping"].clamp(-1, 1 << 20).int()
    launch(**(got | {"k_pre": wide[:, 128:256], "slot_mapping": slots, "positions": got["positions"].int()}))
    assert torch.equal(storage_bytes(want, "kv_cache"), storage_bytes(got, "kv_cache"))


def test_cache_without_pages_is_left_alone(device):
    kwargs = example(device)
    kwargs["kv_cache"] = kwargs["kv_cache"][:0]
    assert launch(**kwargs) is None


def test_can_be_captured(device, forbid_host_sync):
    kwargs = example(device)
    with forbid_host_sync():
        launch(**kwargs)


def test_more_slots_than_keys_are_refused(device):
    kwargs = example(device)
    kwargs["slot_mapping"] = torch.zeros(46, dtype=torch.int64, device=device)
    with pytest.raises(TensorContractError, match="slot_mapping must be of at most T=45 rows, got 46 rows"):
        launch(**kwargs)


def test_pages_that_overlap_are_refused(device):
    kwargs = example(device)
    kwargs["kv_cache"] = kwargs["kv_cache"].as_strided((3, 64, 132), (8000, 132, 1))
    with pytest.raises(TensorContractError, match=r"kv_cache must be pages at least .* 8448 bytes apart, got .* 8000"):
        launch(**kwargs)


def test_ratio_zero_is_refused(device):
    with pytest.raises(TensorContractError, match="compress_ratio must be 1 or larger, got 0"):
        launch(**(example(device) | {"compress_ratio": 0}))


@pytest.mark.parametrize("name", [name for name, _ in ops.spec(OP).cases("cpu")])
def test_kernel_gives_the_same_bits(name, device, kernel_gives_the_same_bits):
    kernel_gives_the_same_bits(OP, example(device, name))


def test_kernel_takes_slices_and_int32(device, kernel_gives_the_same_bits):
    kwargs = example(device)
    wide = torch.zeros(45, 301, dtype=torch.bfloat16, device=device)
    wide[:, 129:257] = kwargs["k_pre"]
    kwargs |= {
        "k_pre": wide[1:, 129:257],
        "positions": kwargs["positions"][1:],
        "slot_mapping": kwargs["slot_mapping"][1:],
    }
    kernel_gives_the_same_bits(OP, kwargs)
    narrow = {"slot_mapping": kwargs["slot_mapping"].clamp(-1, 1 << 20).int(), "positions": kwargs["positions"].int()}
    kernel_gives_the_same_bits(OP, kwargs | narrow)


def test_kernel_stores_nan_and_infinity_as_the_reference_does(device, kernel_gives_the_same_bits):
    k_pre = torch.ones(4, 128)
    k_pre[0, 3], k_pre[1, 100], k_pre[2, 7], k_pre[3] = float("nan"), float("inf"), 1e30, -0.0
    kwargs = simple(device, k_pre, [1, 3, 5, 7], [3, 70, 71, 127], 2)
    kwargs["kv_cache"].fill_(0x5A)
    kernel_gives_the_same_bits(OP, kwargs)


def test_kernel_needs_no_host_sync(device, kernel_without_host_sync):
    kernel_without_host_sync(OP, example(device))


def test_kernel_refuses_pages_it_cannot_address(device):
    kwargs = example(device)
    kwargs["kv_cache"] = torch.zeros(30000, dtype=torch.uint8, device=device).as_strided((3, 64, 132), (8456, 132, 1))
    with pytest.raises(TensorContractError, match="kv_cache must be pages a multiple of 16 bytes apart, got 8456"):
        kernel(**kwargs)
