"""What the shared contract cannot say about stable_expert_order."""

import dataclasses
import importlib

import pytest
import torch

from deepinfer_sm80 import ops
from deepinfer_sm80.errors import TensorContractError
from deepinfer_sm80.ops.moe.stable_expert_order.kernel import stable_expert_order as kernel
from deepinfer_sm80.ops.moe.stable_expert_order.reference import _aligned as aligned
from deepinfer_sm80.testing.poison import poisoned_empty

CASES = dict(ops.spec("stable_expert_order").cases("cpu"))


@pytest.mark.parametrize("case", CASES)
def test_any_shuffle_inside_experts_gives_the_same_order(case):
    kwargs = dict(CASES[case])
    expected = ops.pytorch("stable_expert_order")(**kwargs)
    used, block = int(kwargs["num_tokens_post_padded"]), kwargs["block_size"]
    ids, start = kwargs["sorted_token_ids"].clone(), 0
    experts = kwargs["expert_ids"].tolist()
    while start < used:
        end = start + block
        while end < used and experts[end // block] == experts[start // block]:
            end += block
        ids[start:end] = ids[start:end][torch.randperm(end - start)]
        start = end
    kwargs["sorted_token_ids"] = ids
    assert torch.equal(ops.pytorch("stable_expert_order")(**kwargs)[:used], expected[:used])


def test_every_route_stays_with_its_expert():
    kwargs = CASES["T200-K2-E8-block64"]
    before, after = kwargs["sorted_token_ids"], ops.pytorch("stable_expert_order")(**kwargs)
    for block, expert in enumerate(kwargs["expert_ids"].tolist()):
        if block * 64 < int(kwargs["num_tokens_post_padded"]):
            owners = (kwargs["expert_ids"] == expert).repeat_interleave(64)[: before.numel()]
            assert set(before[owners].tolist()) == set(after[owners].tolist())


def test_it_can_be_captured(forbid_host_sync):
    with forbid_host_sync():
        ops.pytorch("stable_expert_order")(**CASES["T65-K6-E384-block8-local48"])


def test_too_few_blocks_are_named():
    kwargs = dict(CASES["T3-K2-E8-block16"])
    kwargs["expert_ids"] = kwargs["expert_ids"][:1].contiguous()
    with pytest.raises(TensorContractError, match="expert_ids must be at least"):
        ops.pytorch("stable_expert_order")(**kwargs)


@pytest.mark.parametrize(
    ("tokens", "topk", "experts", "block_size", "local"),
    [
        (0, 2, 8, 8, 8),
        (1, 6, 24, 8, 24),
        (3, 2, 8, 16, 8),
        (33, 6, 40, 8, 5),  # runs of other ranks' blocks, and blocks half as long as the kernel's tile
        (130, 2, 3, 64, 3),  # segments longer than one step
        (57, 3, 12, 48, 12),
    ],
)
def test_kernel_gives_the_same_bits(tokens, topk, experts, block_size, local, device, kernel_gives_the_same_bits):
    kwargs = aligned(tokens, topk, experts, block_size, local, tokens, device)
    kernel_gives_the_same_bits("stable_expert_order", kwargs)


def test_kernel_steps_through_blocks_and_rows(device, monkeypatch, kernel_gives_the_same_bits):
    room = importlib.import_module(kernel.__module__)
    short = {**room.ORDER.constants, "BLOCKS": 8, "OTHERS": 16}
    monkeypatch.setattr(room, "ORDER", dataclasses.replace(room.ORDER, constants=short))
    kernel_gives_the_same_bits("stable_expert_order", aligned(24, 3, 12, 32, 12, 2, device))
    kernel_gives_the_same_bits("stable_expert_order", aligned(60, 2, 3, 4, 2, 3, device))


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_kernel_gives_the_same_bits_at_real_sizes(case, device, kernel_gives_the_same_bits):
    kernel_gives_the_same_bits("stable_expert_order", dict(ops.spec("stable_expert_order").cases(device))[case])


def test_kernel_takes_slices_and_leaves_no_row_unwritten(device):
    kwargs = aligned(33, 6, 40, 8, 40, 1, device)
    shifted = {
        name: torch.cat((value[:1], value))[1:] if torch.is_tensor(value) else value for name, value in kwargs.items()
    }
    want = ops.spec("stable_expert_order").reference(**kwargs)
    assert torch.equal(kernel(**shifted), want)
    kwargs["num_tokens_post_padded"] = kwargs["num_tokens_post_padded"] - 3  # no whole number of blocks
    with poisoned_empty():
        got = kernel(**kwargs)
    assert torch.equal(got.sort().values, want.sort().values)
