"""What the shared contract cannot say about stable_expert_order."""

import pytest
import torch

from deepinfer_sm80 import ops
from deepinfer_sm80.errors import TensorContractError

CASES = dict(ops.spec("stable_expert_order").cases("cpu"))


@pytest.mark.parametrize("case", CASES)
def test_any_shuffle_inside_experts_gives_the_same_order(case):
    kwargs = dict(CASES[case])
    expected = ops.stable_expert_order(**kwargs)
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
    assert torch.equal(ops.stable_expert_order(**kwargs)[:used], expected[:used])


def test_every_route_stays_with_its_expert():
    kwargs = CASES["T200-K2-E8-block64"]
    before, after = kwargs["sorted_token_ids"], ops.stable_expert_order(**kwargs)
    for block, expert in enumerate(kwargs["expert_ids"].tolist()):
        if block * 64 < int(kwargs["num_tokens_post_padded"]):
            owners = (kwargs["expert_ids"] == expert).repeat_interleave(64)[: before.numel()]
            assert set(before[owners].tolist()) == set(after[owners].tolist())


def test_it_can_be_captured(forbid_host_sync):
    with forbid_host_sync():
        ops.stable_expert_order(**CASES["T65-K6-E384-block8-local48"])


def test_too_few_blocks_are_named():
    kwargs = dict(CASES["T3-K2-E8-block16"])
    kwargs["expert_ids"] = kwargs["expert_ids"][:1].contiguous()
    with pytest.raises(TensorContractError, match="expert_ids must be at least"):
        ops.stable_expert_order(**kwargs)
