"""What the shared contract cannot say about global_topk_indices."""

import pytest
import torch

from deepinfer_sm80 import ops
from deepinfer_sm80.errors import TensorContractError
from deepinfer_sm80.ops.attention.global_topk_indices.kernel import global_topk_indices as kernel
from deepinfer_sm80.testing.graphs import NoHostSync

OP = "global_topk_indices"
LAUNCHERS = (lambda **k: ops.pytorch(OP)(**k), kernel)


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
    for indices, lens in (run(**kwargs) for run in (ops.spec(OP).reference, ops.pytorch(OP), kernel)):
        assert indices.tolist() == want
        assert lens.tolist() == [4, 6, 0, 5]  # the last valid position, not the number of valid entries


@pytest.mark.parametrize("run", LAUNCHERS)
def test_slots_beyond_int32_never_wrap(run, device):
    kwargs = {
        "topk_indices": i32([[0, 127]], device),
        "token_to_req_indices": i32([0], device),
        "block_table": i32([[2**24 - 1]], device),
        "block_size": 128,
        "is_valid_token": torch.ones(1, dtype=torch.bool, device=device),
    }
    assert run(**kwargs)[0].tolist() == [[2**31 - 128, 2**31 - 1]]
    kwargs["block_table"] += 1
    indices, lens = run(**kwargs)
    assert indices.tolist() == [[-1, -1]]
    assert lens.tolist() == [0]


@pytest.mark.parametrize("run", LAUNCHERS)
@pytest.mark.parametrize("request_id", [-1, 2, 2**31 - 1, -(2**31), 2**32, -(2**62)])
def test_requests_that_do_not_exist(request_id, run, device):
    kwargs = dict(dict(ops.spec(OP).cases(device))["T1-W512-page128"])
    narrow = -(2**31) <= request_id < 2**31
    kwargs["token_to_req_indices"] = torch.tensor([request_id], device=device, dtype=torch.int32 if narrow else None)
    indices, lens = run(**kwargs)
    assert (indices == -1).all()
    assert lens.item() == 0


@pytest.mark.parametrize("run", LAUNCHERS)
def test_empty_block_table(run, device):
    kwargs = dict(dict(ops.spec(OP).cases(device))["T5-W512-page64"])
    kwargs["block_table"] = torch.zeros(0, 9, dtype=torch.int32, device=device)
    indices, lens = run(**kwargs)
    assert (indices == -1).all()
    assert (lens == 0).all()


def test_caller_buffers(device):
    kwargs = dict(dict(ops.spec(OP).cases(device))["T5-W512-page64"])
    wide = torch.full((5, 520), 77, dtype=torch.int32, device=device)
    out = (wide[:, :512], torch.full((5,), 77, dtype=torch.int32, device=device))
    with NoHostSync():
        ops.pytorch(OP)(**kwargs, out=out)
    want = ops.spec(OP).reference(**kwargs)
    assert torch.equal(wide[:, :512], want[0])
    assert torch.equal(out[1], want[1])
    assert (wide[:, 512:] == 77).all()


def test_too_few_request_ids_are_refused(device):
    kwargs = dict(dict(ops.spec(OP).cases(device))["T5-W512-page64"])
    kwargs["token_to_req_indices"] = kwargs["token_to_req_indices"][:4]
    with pytest.raises(TensorContractError, match=r"token_to_req_indices must be at least T=5 long, got 4"):
        ops.pytorch(OP)(**kwargs)


@pytest.mark.parametrize("name", [name for name, _ in ops.spec(OP).cases("cpu")])
def test_kernel_gives_the_same_bits(name, device, kernel_gives_the_same_bits):
    kernel_gives_the_same_bits(OP, dict(ops.spec(OP).cases(device))[name])


@pytest.mark.parametrize("flag", [torch.uint8, torch.int8, torch.int64, torch.int32])
def test_kernel_with_slices_and_every_kind_of_flag(flag, device, kernel_gives_the_same_bits):
    kwargs = dict(dict(ops.spec(OP).cases(device))["T5-W512-page64"])
    true = -128 if flag == torch.int8 else 128 if flag == torch.uint8 else 256  # 256: the low byte is zero
    kwargs["is_valid_token"] = torch.tensor([true, 0, true, true, 0, true], dtype=flag, device=device)[1:]
    kwargs["token_to_req_indices"] = torch.cat((kwargs["token_to_req_indices"][:1], kwargs["token_to_req_indices"]))[1:]
    kwargs["topk_indices"] = torch.nn.functional.pad(kwargs["topk_indices"], (1, 2))[:, 1:513]
    kernel_gives_the_same_bits(OP, kwargs)
    kernel_gives_the_same_bits(OP, kwargs | {"token_to_req_indices": kwargs["token_to_req_indices"].long()})


def test_kernel_walks_rows_wider_than_its_block(device, kernel_gives_the_same_bits):
    g = torch.Generator(device).manual_seed(3)
    kwargs = dict(dict(ops.spec(OP).cases(device))["T3-W200-page1"])
    kwargs["topk_indices"] = torch.randint(-2, 11, (3, 1300), generator=g, device=device, dtype=torch.int32)
    kernel_gives_the_same_bits(OP, kwargs)


def test_kernel_fills_caller_buffers(device):
    kwargs = dict(dict(ops.spec(OP).cases(device))["T5-W512-page64"])
    wide = torch.full((5, 521), 77, dtype=torch.int32, device=device)
    out = (wide[:, 1:513], torch.full((6,), 77, dtype=torch.int32, device=device)[1:])
    kernel(**kwargs, out=out)
    want = ops.spec(OP).reference(**kwargs)
    assert torch.equal(out[0], want[0])
    assert torch.equal(out[1], want[1])
    assert (wide[:, 513:] == 77).all()
    assert (wide[:, 0] == 77).all()
