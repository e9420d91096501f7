"""What the shared contract cannot say about global_topk_indices."""

import pytest
import torch

from deepinfer_sm80 import ops
from deepinfer_sm80.errors import TensorContractError
from deepinfer_sm80.testing.graphs import NoHostSync

OP = "global_topk_indices"


def i32(values, device):
    return torch.tensor(values, dtype=torch.int32, device=device)


def test_hand_worked_rows(device):
    kwargs = {
        "topk_indices": i32(
            [[0, 3, -1, 5, -1, -1], [9, 8, 4, 2, 1, 0], [1, 1, 1, 1, 1, 1], [-7, 11, 12, 2, 3, -1]], device
        ),
        "token_to_req_indices": i32([1, 0, 0, 2, 99], device),
        "block_table": i32([[5, 6, 7], [2, 0, 9], [1, -1, 3]], device),
        "block_size": 4,
        "is_valid_token": torch.tensor([True, True, False, True], device=device),
    }
    want = [[8, 11, -1, 1, -1, -1], [29, 28, 24, 22, 21, 20], [-1] * 6, [-1, 15, -1, 6, 7, -1]]
    for indices, lens in (ops.spec(OP).reference(**kwargs), ops.launcher(OP)(**kwargs)):
        assert indices.tolist() == want
        assert lens.tolist() == [4, 6, 0, 5]  # the last valid position, not the number of valid entries


def test_slots_beyond_int32_never_wrap(device):
    kwargs = {
        "topk_indices": i32([[0, 127]], device),
        "token_to_req_indices": i32([0], device),
        "block_table": i32([[2**24 - 1]], device),
        "block_size": 128,
        "is_valid_token": torch.ones(1, dtype=torch.bool, device=device),
    }
    assert ops.launcher(OP)(**kwargs)[0].tolist() == [[2**31 - 128, 2**31 - 1]]
    kwargs["block_table"] += 1
    indices, lens = ops.launcher(OP)(**kwargs)
    assert indices.tolist() == [[-1, -1]]
    assert lens.tolist() == [0]


@pytest.mark.parametrize("request_id", [-1, 2, 2**31 - 1, -(2**31)])
def test_requests_that_do_not_exist(request_id, device):
    kwargs = dict(dict(ops.spec(OP).cases(device))["T1-W512-page128"])
    kwargs["token_to_req_indices"] = i32([request_id], device)
    indices, lens = ops.launcher(OP)(**kwargs)
    assert (indices == -1).all()
    assert lens.item() == 0


def test_empty_block_table(device):
    kwargs = dict(dict(ops.spec(OP).cases(device))["T5-W512-page64"])
    kwargs["block_table"] = torch.zeros(0, 9, dtype=torch.int32, device=device)
    indices, lens = ops.launcher(OP)(**kwargs)
    assert (indices == -1).all()
    assert (lens == 0).all()


def test_caller_buffers(device):
    kwargs = dict(dict(ops.spec(OP).cases(device))["T5-W512-page64"])
    wide = torch.full((5, 520), 77, dtype=torch.int32, device=device)
    out = (wide[:, :512], torch.full((5,), 77, dtype=torch.int32, device=device))
    with NoHostSync():
        ops.launcher(OP)(**kwargs, out=out)
    want = ops.spec(OP).reference(**kwargs)
    assert torch.equal(wide[:, :512], want[0])
    assert torch.equal(out[1], want[1])
    assert (wide[:, 512:] == 77).all()


def test_too_few_request_ids_are_refused(device):
    kwargs = dict(dict(ops.spec(OP).cases(device))["T5-W512-page64"])
    kwargs["token_to_req_indices"] = kwargs["token_to_req_indices"][:4]
    with pytest.raises(TensorContractError, match=r"token_to_req_indices must be at least T=5 long, got 4"):
        ops.launcher(OP)(**kwargs)
