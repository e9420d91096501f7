"""What the shared contract cannot say about indexer_logits_paged."""

import sys

import pytest
import torch

from deepinfer_sm80 import ops
from deepinfer_sm80.errors import TensorContractError
from deepinfer_sm80.ops.indexer.indexer_logits_paged import kernel as kernel_room
from deepinfer_sm80.ops.indexer.indexer_logits_paged import tuning
from deepinfer_sm80.ops.kv_cache.layout import index_key_views
from deepinfer_sm80.testing.compare import assert_agrees

OP = "indexer_logits_paged"
launch = ops.pytorch(OP)
room = sys.modules[launch.__module__]


def example(device, case="T5-bs64"):
    return dict(dict(ops.spec(OP).cases(device))[case])


def test_equals_prefill_on_the_gathered_keys(device):
    kwargs = example(device, "T4-bs128-odd")
    codes, scales = index_key_views(kwargs["kv_cache"])
    pages = kwargs["block_table"].long()
    k_codes = codes[pages].reshape(-1, 128)
    k_scale = scales[pages].contiguous().view(torch.float32).reshape(-1)
    start = torch.arange(4, device=device, dtype=torch.int32) * 384
    end = start + kwargs["context_lens"].clamp(0, 384)
    want = ops.pytorch("indexer_logits_prefill")(
        kwargs["q_codes"], kwargs["weights"], k_codes, k_scale, start, end, 333
    )
    assert_agrees(OP, launch(**kwargs), want, ops.spec(OP).tolerance)


def test_missing_pages_and_ends_are_minus_infinity(device):
    kwargs = example(device)
    got = launch(**kwargs)
    finite = got.isfinite() | got.isnan()
    assert not finite[0].any()
    assert finite[1].nonzero().flatten().tolist() == [0]
    assert finite[2].sum() == 63
    assert finite[3].nonzero().flatten().tolist() == [*range(64), *range(128, 200)]  # page id -1 in the middle
    assert finite[4].nonzero().flatten().tolist() == [*range(64, 128), *range(192, 256)]  # 256 = table width, 300 asked
    assert got[~finite].eq(float("-inf")).all()


def test_keys_that_are_not_named_may_hold_anything(device):
    clean = example(device, "T4-bs128-odd")
    kwargs = example(device, "T4-bs128-odd")
    kwargs["block_table"] = torch.tensor([[1, 2, 9], [1, 1, 1], [1, 2, 1], [2, 9, 9]], device=device).int()
    clean["block_table"] = kwargs["block_table"]
    codes, scales = index_key_views(kwargs["kv_cache"])
    for page in (0, 3, 4, 5, 6):
        codes[page], scales[page] = 0x7F, 0xFF
    assert torch.equal(launch(**kwargs), launch(**clean))
    assert not launch(**kwargs).isnan().any()


@pytest.mark.parametrize(("keys", "columns"), [(64, 64), (256, 128), (1, 1)])
def test_tiles_join_without_a_seam(device, monkeypatch, keys, columns):
    whole = launch(**example(device))
    monkeypatch.setattr(room, "_KEYS_AT_ONCE", keys)
    monkeypatch.setattr(room, "_COLUMNS_AT_ONCE", columns)
    assert_agrees(OP, launch(**example(device)), whole, ops.spec(OP).tolerance)


def test_cache_without_pages(device):
    kwargs = example(device)
    kwargs["kv_cache"] = kwargs["kv_cache"][:0]
    assert launch(**kwargs).eq(float("-inf")).all()


def test_can_be_captured(device, forbid_host_sync):
    kwargs = example(device)
    with forbid_host_sync():
        launch(**kwargs)


def test_record_of_another_cache_is_refused(device):
    kwargs = example(device)
    kwargs["kv_cache"] = torch.zeros(7, 64, 584, dtype=torch.uint8, device=device)
    with pytest.raises(TensorContractError, match=r"kv_cache must be torch.uint8 of shape \[blocks=7.*132\].*584\]"):
        launch(**kwargs)


def test_table_of_other_rows_is_refused(device):
    kwargs = example(device)
    kwargs["block_table"] = kwargs["block_table"][:4]
    with pytest.raises(TensorContractError, match=r"block_table must be .*\[T=5, C\].*\[4, 4\]"):
        launch(**kwargs)


@pytest.mark.parametrize("name", [name for name, _ in ops.spec(OP).cases("cpu")])
def test_kernel_agrees(name, device, kernel_agrees):
    kernel_agrees(OP, example(device, name))


@pytest.mark.parametrize("programs", [1, 2, 3])
def test_kernel_tiles_join_without_a_seam(programs, device, monkeypatch, kernel_agrees):
    kwargs = example(device, "T4-bs128-odd") | {"max_context_len": 700}
    monkeypatch.setattr(kernel_room, "programs_per_row", lambda rows, width: programs)
    kernel_agrees(OP, kwargs)


def test_kernel_decodes_every_code(device, kernel_agrees):
    """Every key holds one code throughout, NaN codes among them; queries hold them all but NaN, then NaN too."""
    codes = torch.arange(256, dtype=torch.uint8, device=device)
    kwargs = example(device, "T4-bs128-odd")
    data, scales = index_key_views(kwargs["kv_cache"])
    data[1], data[2] = codes[:128, None].expand(-1, 128), codes[128:, None].expand(-1, 128)
    data[3] = codes.view(2, 128)[0].expand(128, -1).masked_fill(codes[:128] == 0x7F, 0x38)
    scales[1:4] = torch.tensor([1.0], device=device).view(torch.uint8)
    kwargs["block_table"] = torch.tensor([[1, 2, 3]] * 4, dtype=torch.int32, device=device)
    kwargs["context_lens"] = torch.tensor([384, 384, 256, 130], dtype=torch.int32, device=device)
    q = kwargs["q_codes"]
    q[0] = codes[torch.randperm(256, generator=torch.Generator().manual_seed(2))[:128].to(device)]
    q[0, q[0] & 0x7F == 0x7F] = 0
    q[1, 3, 77] = 0x7F
    kernel_agrees(OP, kwargs)
    got = kernel_room.indexer_logits_paged(**kwargs)
    assert got[0].isnan().nonzero().flatten().tolist() == [0x7F, 0xFF]
    assert got[1, :333].isnan().all()


def test_kernel_takes_unaligned_slices_and_int64(device, kernel_agrees):
    kwargs = example(device)
    for name in ("q_codes", "weights", "context_lens", "block_table"):
        kwargs[name] = kwargs[name][1:]
    kernel_agrees(OP, kwargs)
    kwargs["context_lens"], kwargs["block_table"] = kwargs["context_lens"].long(), kwargs["block_table"].long()
    kwargs["context_lens"][0], kwargs["block_table"][1, 0] = (1 << 33) + 3, 1 << 32
    kernel_agrees(OP, kwargs)


def test_kernel_spreads_a_row_over_the_gpu_and_never_over_more_than_its_tiles():
    assert tuning.programs_per_row(1, 1 << 20) == tuning.PROGRAMS
    assert tuning.programs_per_row(1, 1) == 1
    assert tuning.programs_per_row(32, 1 << 20) == 27
    assert tuning.programs_per_row(4096, 1 << 20) == 1


def test_kernel_needs_no_host_sync(device, kernel_without_host_sync):
    kernel_without_host_sync(OP, example(device))


def test_kernel_refuses_pages_it_cannot_address(device):
    kwargs = example(device)
    kwargs["kv_cache"] = torch.zeros(30000, dtype=torch.uint8, device=device).as_strided((3, 64, 132), (8456, 132, 1))
    with pytest.raises(TensorContractError, match="kv_cache must be pages a multiple of 16 bytes apart, got 8456"):
        kernel_room.indexer_logits_paged(**kwargs)
