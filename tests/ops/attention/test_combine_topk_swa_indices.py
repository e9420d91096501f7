"""What the shared contract cannot say about combine_topk_swa_indices."""

import pytest
import torch

from deepinfer_sm80 import ops
from deepinfer_sm80.errors import TensorContractError
from deepinfer_sm80.ops.attention.combine_topk_swa_indices.kernel import combine_topk_swa_indices as kernel
from deepinfer_sm80.testing.graphs import NoHostSync

OP = "combine_topk_swa_indices"


def i32(values, device):
    return torch.tensor(values, dtype=torch.int32, device=device)


def every(kwargs):
    return [run(**kwargs) for run in (ops.spec(OP).reference, ops.pytorch(OP), kernel)]


def test_hand_worked_request(device):
    # Second request of a chunk: 2 query tokens, 10 tokens in all, 9 gathered from position 1 on, window of 4, ratio 2.
    kwargs = {
        "topk_indices": i32([[0, 1, 2, 3, 4, 9], [4, -1, 6, 2, 1, 0]], device),
        "query_start_loc": i32([7, 7, 9], device),
        "seq_lens": i32([3, 10], device),
        "gather_lens": i32([3, 9], device),
        "window_size": 4,
        "compress_ratio": 2,
        "topk": 6,
        "M": 20,
        "N": 6,
    }
    # token 0: pos 8, four closed groups, window 5..8 -> rows 26+5-1..; token 1: pos 9, five groups, window 6..9
    first = [20, 21, 22, 23, 30, 31, 32, 33]
    second = [24, -1, -1, 22, 21, 31, 32, 33, 34]
    for indices, lens in every(kwargs):
        assert indices.shape == (2, 128)
        assert lens.tolist() == [8, 9]
        assert indices[0].tolist() == first + [-1] * 120
        assert indices[1].tolist() == second + [-1] * 119


@pytest.mark.parametrize("seq_len", [1, 2, 127, 128, 129, 511, 512, 513, 1023, 1024, 1025])
@pytest.mark.parametrize("ratio", [0, 1, 2])
def test_regions_at_the_edges(seq_len, ratio, device):
    topk = 512 if ratio else 0
    kwargs = {
        "topk_indices": torch.arange(512, dtype=torch.int32, device=device).repeat(1, 1),
        "query_start_loc": i32([0, 1], device),
        "seq_lens": i32([seq_len], device),
        "gather_lens": i32([min(seq_len, 128)], device),
        "window_size": 128,
        "compress_ratio": ratio,
        "topk": topk,
        "M": 1300,
        "N": 1100,
    }
    compressed = min(seq_len // ratio, 512) if ratio else 0
    window = min(seq_len, 128)
    for indices, lens in every(kwargs):
        assert indices.shape[1] == (640 if ratio else 128)
        assert lens.item() == compressed + window
        want = list(range(compressed)) + list(range(1100, 1100 + window))
        assert indices[0].tolist() == want + [-1] * (indices.shape[1] - len(want))


def test_window_rows_never_reach_the_next_request(device):
    kwargs = dict(dict(ops.spec(OP).cases(device))["ratio1"])
    kwargs["M"] = kwargs["N"] + 50  # too small for 128 window rows
    for indices, lens in every(kwargs):
        rows, listed = indices[3:8], torch.arange(640, device=device) < lens[3:8, None]  # the second request's tokens
        assert (rows[rows >= 0] // kwargs["M"] == 1).all()
        assert (rows[:, 512:][listed[:, 512:]] == -1).sum() == 128 * 5 - (50 + 49 + 48 + 47 + 46)


def test_caller_buffers_are_overwritten_whole(device):
    kwargs = dict(dict(ops.spec(OP).cases(device))["ratio1"])
    T = len(kwargs["topk_indices"])
    wide = torch.full((T, 700), 77, dtype=torch.int32, device=device)
    out = (wide[:, :640], torch.full((T,), 77, dtype=torch.int32, device=device))
    with NoHostSync():
        got = ops.pytorch(OP)(**kwargs, out=out)
    want = ops.spec(OP).reference(**kwargs)
    assert got[0].data_ptr() == wide.data_ptr()
    assert torch.equal(wide[:, :640], want[0])
    assert torch.equal(out[1], want[1])
    assert (wide[:, 640:] == 77).all()


def test_more_rows_than_one_step(device):
    T = 4096 + 3
    kwargs = {
        "topk_indices": torch.zeros(T, 1, dtype=torch.int32, device=device),
        "query_start_loc": i32([0, T - 1], device),
        "seq_lens": i32([T - 1], device),
        "gather_lens": i32([T - 1], device),
        "window_size": 2,
        "compress_ratio": 1,
        "topk": 1,
        "M": 5000,
        "N": 1,
    }
    indices, lens = ops.pytorch(OP)(**kwargs)
    assert lens[:3].tolist() == [2, 3, 3]
    assert indices[T - 2, :4].tolist() == [0, T - 2, T - 1, -1]
    assert lens[T - 1] == 0
    assert (indices[T - 1] == -1).all()


def test_topk_wider_than_the_rows_is_refused(device):
    kwargs = dict(dict(ops.spec(OP).cases(device))["ratio1"], topk=513)
    with pytest.raises(TensorContractError, match=r"topk must be 0\.\.512, .*got 513"):
        ops.pytorch(OP)(**kwargs)


def test_wrong_width_of_a_caller_buffer_is_refused(device):
    kwargs = dict(dict(ops.spec(OP).cases(device))["ratio1"])
    T = len(kwargs["topk_indices"])
    out = (torch.zeros(T, 512, dtype=torch.int32, device=device), torch.zeros(T, dtype=torch.int32, device=device))
    with pytest.raises(TensorContractError, match=r"out\[0\] must be torch.int32 of shape \[T=12, 640\]"):
        ops.pytorch(OP)(**kwargs, out=out)


@pytest.mark.parametrize("name", [name for name, _ in ops.spec(OP).cases("cpu")])
def test_kernel_gives_the_same_bits(name, device, kernel_gives_the_same_bits):
    kernel_gives_the_same_bits(OP, dict(ops.spec(OP).cases(device))[name])


def test_kernel_with_many_requests_and_slices(device, kernel_gives_the_same_bits):
    """More requests than one step of the search, some of them empty; every array begins between aligned addresses."""
    g = torch.Generator(device).manual_seed(5)
    counts = torch.randint(0, 3, (150,), generator=g, device=device)
    starts = torch.nn.functional.pad(counts.cumsum(0), (2, 0)).int()[1:]
    T = int(counts.sum()) + 2
    seq_lens = torch.randint(0, 900, (151,), generator=g, device=device, dtype=torch.int32)
    kwargs = {
        "topk_indices": torch.randint(-9, 700, (T, 67), generator=g, device=device, dtype=torch.int32)[:, 1:],
        "query_start_loc": starts,
        "seq_lens": seq_lens[1:],
        "gather_lens": (seq_lens.clamp(max=130))[1:],
        "window_size": 128,
        "compress_ratio": 2,
        "topk": 66,
        "M": 900,
        "N": 600,
    }
    kernel_gives_the_same_bits(OP, kwargs)


def test_kernel_overwrites_caller_buffers_whole(device):
    kwargs = dict(dict(ops.spec(OP).cases(device))["ratio1"])
    T = len(kwargs["topk_indices"])
    wide, lens = (torch.full((T, w), 77, dtype=torch.int32, device=device) for w in (701, 1))
    out = (wide[:, 1:641], lens[:, 0])
    got = kernel(**kwargs, out=out)
    want = ops.spec(OP).reference(**kwargs)
    assert got[0] is out[0]
    assert torch.equal(out[0], want[0])
    assert torch.equal(out[1], want[1])
    assert (wide[:, :1] == 77).all()
    assert (wide[:, 641:] == 77).all()
