"""What the shared contract cannot say about indexer_topk."""

import sys

import pytest
import torch

from deepinfer_sm80 import ops
from deepinfer_sm80.errors import TensorContractError
from deepinfer_sm80.ops.indexer import tournament
from deepinfer_sm80.ops.indexer.indexer_topk import kernel as kernel_room

OP = "indexer_topk"
launch = ops.pytorch(OP)
kernel = kernel_room.indexer_topk
room = sys.modules[launch.__module__]


def lens(device, *values):
    return torch.tensor(values, dtype=torch.int32, device=device)


def example(device, case="T8-S1100-candidates"):
    return dict(dict(ops.spec(OP).cases(device))[case])


@pytest.mark.parametrize("levels", [1, 2, 5, 1000])
def test_heavy_ties_against_a_stable_sort(device, levels):
    g = torch.Generator().manual_seed(levels)
    logits = torch.randint(-levels, levels, (6, 1537), generator=g).float().to(device)
    order = logits.sort(dim=-1, descending=True, stable=True).indices[:, :512]
    got = launch(logits, lens(device, *[1537] * 6), 512)
    assert torch.equal(got.long(), order.sort(dim=-1).values)


def test_neighbouring_floats_are_told_apart(device):
    """2000 consecutive float32 values: histogram methods put them into one bin."""
    values = torch.arange(2000, dtype=torch.int32) + torch.tensor(1.0).view(torch.int32)
    shuffle = torch.randperm(2000, generator=torch.Generator().manual_seed(0))
    for sign in (1.0, -1.0):
        logits = sign * values.view(torch.float32)[shuffle]
        want = logits.argsort(descending=True)[:512].sort().values
        got = launch(logits[None].to(device), lens(device, 2000), 512)
        assert torch.equal(got[0].long().cpu(), want)


@pytest.mark.parametrize("length", [0, 1, 511, 512, 513, 1023, 1024, 1025])
def test_lengths_around_k(device, length):
    g = torch.Generator().manual_seed(length)
    logits = torch.randn(1, 1100, generator=g).to(device)
    logits[0, length:] = 100.0  # stale columns, larger than all
    got = launch(logits, lens(device, length), 512)[0]
    count = min(length, 512)
    assert got[count:].eq(-1).all()
    want = logits[0, :length].argsort(descending=True)[:512].sort().values
    assert torch.equal(got[:count].long(), want)


def test_nan_and_minus_infinity_are_never_chosen(device):
    logits = torch.full((3, 600), float("nan"), device=device)
    logits[1] = float("-inf")
    logits[2, ::2] = -torch.arange(300, device=device).float()
    got = launch(logits, lens(device, 600, 600, 600), 512)
    assert got[:2].eq(-1).all()
    assert got[2].tolist() == [*range(0, 600, 2)] + [-1] * 212
    negative_nan = torch.tensor([[-1]], dtype=torch.int32, device=device).view(torch.float32)
    assert launch(negative_nan, lens(device, 1), 2).tolist() == [[-1, -1]]


def test_extreme_values_keep_their_order(device):
    logits = torch.tensor([[float("inf"), 3.4e38, 1e-45, 0.0, -0.0, -1e-45, -3.4e38, float("inf")]], device=device)
    for k, want in ((1, [0]), (2, [0, 7]), (3, [0, 1, 7]), (4, [0, 1, 2, 7]), (6, [0, 1, 2, 3, 4, 7])):
        assert launch(logits, lens(device, 8), k).tolist() == [want]


def test_candidates_equal_masked_logits(device):
    kwargs = example(device)
    masked = kwargs["logits"].clone()
    for t in range(8):
        kept = set(kwargs["candidate_blocks"][t].tolist())
        masked[t, [c for c in range(1100) if c // 8 not in kept]] = float("-inf")
    assert torch.equal(launch(**kwargs), launch(masked, kwargs["row_lens"], 512))


def test_writes_into_a_strided_view_and_nothing_else(device):
    kwargs = example(device)
    buffer = torch.full((10, 700), 77, dtype=torch.int32, device=device)
    view = buffer[1:9, 100:612]
    assert launch(**kwargs, out=view) is view
    assert torch.equal(view, launch(**kwargs))
    view.fill_(77)
    assert buffer.eq(77).all()


def test_rows_do_not_depend_on_the_tile_they_fall_in(device, monkeypatch):
    whole = launch(**example(device))
    monkeypatch.setattr(room, "_LOGITS_AT_ONCE", 3300)
    assert torch.equal(launch(**example(device)), whole)


def test_can_be_captured(device, forbid_host_sync):
    kwargs = example(device)
    with forbid_host_sync():
        launch(**kwargs)


def test_candidates_without_a_block_size_are_refused(device):
    with pytest.raises(TensorContractError, match="candidate_block_size must be 1 or larger, got 0"):
        launch(**(example(device) | {"candidate_block_size": 0}))


def test_narrow_out_is_refused(device):
    out = torch.empty(8, 511, dtype=torch.int32, device=device)
    with pytest.raises(TensorContractError, match=r"out must be torch.int32 of shape \[T=8, 512\]"):
        launch(**example(device), out=out)


@pytest.mark.parametrize("name", [name for name, _ in ops.spec(OP).cases("cpu")])
def test_kernel_gives_the_same_bits(name, device, kernel_gives_the_same_bits):
    kernel_gives_the_same_bits(OP, example(device, name))


@pytest.mark.parametrize("levels", [1, 2, 5, 1000])
@pytest.mark.parametrize("width", [1537, 2049, 8193, 21000])
def test_kernel_on_heavy_ties_in_one_round_and_in_several(levels, width, device):
    g = torch.Generator().manual_seed(levels)
    logits = torch.randint(-levels, levels, (3, width), generator=g).float().to(device)
    length = lens(device, width, width - 1, 700)
    assert torch.equal(kernel(logits, length, 512), launch(logits, length, 512))


@pytest.mark.parametrize("width", [150_001, pytest.param(1 << 20, marks=pytest.mark.slow)])
def test_kernel_in_three_rounds(width, device):
    logits = torch.randn(1, width, generator=torch.Generator().manual_seed(1)).to(device)
    logits[0, ::3] = logits[0, 7]
    logits[0, 1::1000] = float("nan")
    length = lens(device, width - 5)
    assert torch.equal(kernel(logits, length, 512), launch(logits, length, 512))


def test_kernel_tells_neighbouring_floats_apart_and_keeps_extremes_in_order(device):
    values = (torch.arange(9000, dtype=torch.int32) + torch.tensor(1.0).view(torch.int32)).view(torch.float32)
    shuffled = values[torch.randperm(9000, generator=torch.Generator().manual_seed(0))].to(device)
    logits = torch.stack((shuffled, -shuffled))
    assert torch.equal(kernel(logits, lens(device, 9000, 8500), 512), launch(logits, lens(device, 9000, 8500), 512))
    logits = torch.tensor([[float("inf"), 3.4e38, 1e-45, 0.0, -0.0, -1e-45, -3.4e38, float("inf")]], device=device)
    for k in range(1, 10):
        assert torch.equal(kernel(logits, lens(device, 8), k), launch(logits, lens(device, 8), k))


@pytest.mark.parametrize("length", [0, 1, 511, 512, 513, 1023, 1024, 1025])
def test_kernel_around_k(length, device):
    logits = torch.randn(1, 1100, generator=torch.Generator().manual_seed(length)).to(device)
    logits[0, length:] = 100.0
    assert torch.equal(kernel(logits, lens(device, length), 512), launch(logits, lens(device, length), 512))


@pytest.mark.parametrize(
    ("order", "entries"), [("ascending", 1100), ("shuffled", 300), ("repeated", 300), ("repeated", 90)]
)
@pytest.mark.parametrize("topk", [7, 512])
def test_kernel_on_candidates_in_any_order(order, entries, topk, device):
    g = torch.Generator().manual_seed(topk)
    logits = torch.randint(-9, 9, (3, 20001), generator=g).float().to(device)
    blocks = torch.stack([torch.randperm(2501, generator=g)[:entries].sort().values for _ in range(3)]).int()
    blocks[1, -50:], blocks[2, -1] = -1, 2500
    if order != "ascending":
        blocks = blocks[:, torch.randperm(entries, generator=g)]
    if order == "repeated":
        blocks[:, 20:80] = blocks[:, :1].expand(-1, 60)
    blocks, length = blocks.to(device), lens(device, 20001, 20001, 9999)
    got = kernel(logits, length, topk, blocks, 8)
    assert torch.equal(got, launch(logits, length, topk, blocks, 8))
    assert torch.equal(got[1:], kernel(logits[1:], length[1:], topk, blocks[1:], 8))


def test_kernel_rows_do_not_depend_on_the_group_they_fall_in(device, monkeypatch):
    logits = torch.randn(5, 9000, generator=torch.Generator().manual_seed(4)).to(device)
    whole = kernel(logits, lens(device, *[9000] * 5), 33)
    monkeypatch.setattr(tournament, "_SCRATCH_AT_ONCE", 140)
    assert torch.equal(kernel(logits, lens(device, *[9000] * 5), 33), whole)


def test_kernel_writes_into_a_strided_view_and_nothing_else(device):
    kwargs = example(device)
    buffer = torch.full((1030, 11), 77, dtype=torch.int32, device=device)
    view = buffer[3:1027:2, 1:9].T
    assert kernel(**kwargs, out=view) is view
    assert torch.equal(view, launch(**kwargs))
    view.fill_(77)
    assert buffer.eq(77).all()


def test_kernel_needs_no_host_sync(device, kernel_without_host_sync):
    kernel_without_host_sync(OP, example(device))
    kernel_without_host_sync(OP, example(device) | {"logits": torch.zeros(8, 90000, device=device)})


def test_kernel_refuses_a_topk_that_no_round_could_halve(device):
    kwargs = {"logits": torch.zeros(1, 9000, device=device), "row_lens": lens(device, 9000)}
    with pytest.raises(TensorContractError, match="topk must be at most 4096 of long rows, got 4097"):
        kernel(**kwargs, topk=4097)
