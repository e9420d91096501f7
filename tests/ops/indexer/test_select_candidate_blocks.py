"""What the shared contract cannot say about select_candidate_blocks."""

import sys

import pytest
import torch

from deepinfer_sm80 import ops
from deepinfer_sm80.errors import TensorContractError
from deepinfer_sm80.ops.indexer.select_candidate_blocks.kernel import select_candidate_blocks as kernel

OP = "select_candidate_blocks"
launch = ops.pytorch(OP)
room = sys.modules[launch.__module__]


def lens(device, *values):
    return torch.tensor(values, dtype=torch.int32, device=device)


def example(device, case="T9-S203-k5"):
    return dict(dict(ops.spec(OP).cases(device))[case])


def test_every_block_is_kept_when_all_fit(device):
    logits = torch.randn(3, 16384 + 8, device=device)
    got = launch(logits, lens(device, 16384, 16377, 9), 2048, 8)
    assert got[0].tolist() == got[1].tolist() == list(range(2048))
    assert got[2].tolist() == [0, 1] + [-1] * 2046


def test_newest_block_is_pinned_at_every_length(device):
    logits = -torch.arange(40, device=device).float().expand(41, 40)  # the newest is always the worst
    got = launch(logits, lens(device, *range(41)), 2, 8)
    for length in range(41):
        want = sorted({0, (length - 1) // 8}) if length else []
        assert got[length].tolist() == want + [-1] * (2 - len(want)), length


def test_newest_block_survives_infinities_nan_and_emptiness(device):
    logits = torch.full((3, 64), float("inf"), device=device)
    logits[1], logits[2] = float("nan"), float("-inf")
    got = launch(logits, lens(device, 64, 60, 57), 3, 8)
    assert got.tolist() == [[0, 1, 7], [7, -1, -1], [7, -1, -1]]


def test_columns_beyond_the_length_do_not_count(device):
    logits = torch.zeros(1, 64, device=device)
    logits[0, 20:] = 100.0
    logits[0, 3] = 1.0
    assert launch(logits, lens(device, 20), 2, 8).tolist() == [[0, 2]]  # block 2 as the newest, block 1 lost to 0


def test_ties_keep_the_lowest_blocks(device):
    logits = torch.zeros(2, 800, device=device)
    logits[1, ::2] = -0.0
    assert launch(logits, lens(device, 800, 800), 5, 8).tolist() == [[0, 1, 2, 3, 99]] * 2


def test_best_columns_are_always_among_the_candidates(device):
    """topk <= topk_blocks: restricting to the candidates must not change the layer's own best columns."""
    logits = torch.randn(2, 3000, generator=torch.Generator().manual_seed(5)).to(device)
    length = lens(device, 3000, 2999)
    blocks = launch(logits, length, 65, 8)
    free = ops.pytorch("indexer_topk")(logits, length, 64)
    assert torch.equal(ops.pytorch("indexer_topk")(logits, length, 64, blocks, 8), free)


def test_writes_into_a_strided_view_and_nothing_else(device):
    kwargs = example(device)
    buffer = torch.full((11, 9), 77, dtype=torch.int32, device=device)
    view = buffer[1:10, 2:7]
    assert launch(**kwargs, out=view) is view
    assert torch.equal(view, launch(**kwargs))
    view.fill_(77)
    assert buffer.eq(77).all()


def test_rows_do_not_depend_on_the_tile_they_fall_in(device, monkeypatch):
    whole = launch(**example(device))
    monkeypatch.setattr(room, "_LOGITS_AT_ONCE", 500)
    assert torch.equal(launch(**example(device)), whole)


def test_can_be_captured(device, forbid_host_sync):
    kwargs = example(device)
    with forbid_host_sync():
        launch(**kwargs)


def test_block_size_zero_is_refused(device):
    with pytest.raises(TensorContractError, match="block_size must be 1 or larger, got 0"):
        launch(**(example(device) | {"block_size": 0}))


def test_bfloat16_logits_are_refused(device):
    kwargs = example(device)
    kwargs["logits"] = kwargs["logits"].bfloat16()
    with pytest.raises(TensorContractError, match=r"logits must be torch.float32"):
        launch(**kwargs)


@pytest.mark.parametrize("name", [name for name, _ in ops.spec(OP).cases("cpu")])
def test_kernel_gives_the_same_bits(name, device, kernel_gives_the_same_bits):
    kernel_gives_the_same_bits(OP, example(device, name))


@pytest.mark.parametrize("block_size", [1, 3, 8, 13, 5000])
def test_kernel_on_blocks_of_any_size(block_size, device):
    logits = torch.randn(4, 500, generator=torch.Generator().manual_seed(block_size)).to(device)
    logits[1, 100:300], logits[2, ::2] = float("-inf"), float("nan")
    length = lens(device, 500, 499, 77, 0)
    assert torch.equal(kernel(logits, length, 9, block_size), launch(logits, length, 9, block_size))


def test_kernel_on_more_blocks_than_one_round_holds(device):
    logits = torch.randint(-50, 50, (2, 150_001), generator=torch.Generator().manual_seed(6)).float().to(device)
    logits[0, 7] = float("inf")
    length = lens(device, 150_001, 90_000)
    assert torch.equal(kernel(logits, length, 2048, 8), launch(logits, length, 2048, 8))


def test_kernel_pins_the_newest_block_at_every_length(device):
    logits = -torch.arange(40, device=device).float().expand(41, 40)
    length = lens(device, *range(41))
    assert torch.equal(kernel(logits, length, 2, 8), launch(logits, length, 2, 8))
    for value in (float("inf"), float("nan"), -float("inf")):
        logits = torch.full((41, 40), value, device=device)
        assert torch.equal(kernel(logits, length, 2, 8), launch(logits, length, 2, 8))


def test_kernel_refuses_a_topk_that_no_round_could_halve(device):
    with pytest.raises(TensorContractError, match="topk_blocks must be at most 4096 of long rows, got 4097"):
        kernel(torch.zeros(1, 9000, device=device), lens(device, 9000), 4097, 1)


def test_kernel_writes_into_a_strided_view_and_nothing_else(device):
    kwargs = example(device)
    buffer = torch.full((11, 19), 77, dtype=torch.int32, device=device)
    view = buffer[1:10, 2:12:2]
    assert kernel(**kwargs, out=view) is view
    assert torch.equal(view, launch(**kwargs))
    view.fill_(77)
    assert buffer.eq(77).all()


def test_kernel_needs_no_host_sync(device, kernel_without_host_sync):
    kernel_without_host_sync(OP, example(device))
