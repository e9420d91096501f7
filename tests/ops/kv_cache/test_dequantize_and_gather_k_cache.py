"""What the shared contract cannot say about dequantize_and_gather_k_cache."""

import pytest
import torch

from deepinfer_sm80 import ops
from deepinfer_sm80.errors import TensorContractError
from deepinfer_sm80.ops.kv_cache.dequantize_and_gather_k_cache import tuning
from deepinfer_sm80.ops.kv_cache.dequantize_and_gather_k_cache.kernel import dequantize_and_gather_k_cache as kernel
from deepinfer_sm80.ops.kv_cache.layout import record_views
from deepinfer_sm80.testing.cloning import clone_arguments
from deepinfer_sm80.testing.graphs import NoHostSync

OP = "dequantize_and_gather_k_cache"
IMPLEMENTATIONS = (lambda **k: ops.spec(OP).reference(**k), lambda **k: ops.pytorch(OP)(**k), kernel)


def one_row(codes, scale_bytes, device):
    """A cache of one page, 32 rows, padded, whose row 3 holds ``codes`` [448] and ``scale_bytes`` [7]."""
    page = torch.full((32 * 584 + 64,), 0x7F, dtype=torch.uint8, device=device)
    cache = page.as_strided((1, 32, 584), (32 * 584 + 64, 584, 1))
    page[3 * 576 : 3 * 576 + 448] = codes
    page[3 * 576 + 448 : 4 * 576] = torch.arange(64, device=device).bfloat16().view(torch.uint8)
    page[32 * 576 + 3 * 8 : 32 * 576 + 3 * 8 + 7] = scale_bytes
    out = torch.zeros(1, 4, 512, dtype=torch.bfloat16, device=device)
    i32 = {"dtype": torch.int32, "device": device}
    return {
        "out": out,
        "k_cache": cache,
        "seq_lens": torch.tensor([4], **i32),
        "gather_lens": torch.tensor([1], **i32),
        "block_table": torch.zeros(1, 1, **i32),
        "block_size": 32,
        "offset": 2,
    }


@pytest.mark.parametrize("run", IMPLEMENTATIONS)
def test_every_code_with_every_scale(run, device):
    def e4m3(code):
        exponent, mantissa = (code >> 3) & 15, code & 7
        if code & 0x7F == 0x7F:
            return float("nan")
        value = (mantissa + 8) * 2.0 ** (exponent - 10) if exponent else mantissa * 2.0**-9
        return -value if code & 0x80 else value

    table = torch.tensor([e4m3(c) for c in range(256)], dtype=torch.float64, device=device)
    codes = (torch.arange(448, device=device) % 256).to(torch.uint8)
    for first in range(0, 256, 7):
        scale_bytes = torch.arange(first, first + 7, device=device).clamp(max=255)
        kwargs = one_row(codes, scale_bytes.to(torch.uint8), device)
        run(**kwargs)
        factor = torch.exp2(scale_bytes.double() - 127).masked_fill(scale_bytes == 255, float("nan"))
        want = (table[codes.long()] * factor.repeat_interleave(64)).float().bfloat16()
        got = kwargs["out"][0, 2]
        assert torch.equal(got[:448].isnan(), want.isnan())
        assert torch.equal(got[:448].nan_to_num(0, 9e9, -9e9), want.nan_to_num(0, 9e9, -9e9))
        assert got[448:].tolist() == list(range(64))
        assert (kwargs["out"][0, [0, 1, 3]] == 0).all()


@pytest.mark.parametrize("run", IMPLEMENTATIONS)
def test_unreadable_blocks_are_zeros_and_the_rest_is_kept(run, device):
    kwargs = clone_arguments(dict(ops.spec(OP).cases(device))["R3-ratio2-page64"])
    kwargs["block_table"][0, 0], kwargs["block_table"][0, 1] = 2, 9  # page 9 of 9
    kwargs["seq_lens"] = torch.tensor([70, 0, 65], dtype=torch.int32, device=device)
    kwargs["block_table"] = kwargs["block_table"][:, :1].expand(3, 1).clone()  # one column: row 64 has no page
    kwargs["out"].fill_(3.0)
    run(**kwargs)
    assert (kwargs["out"][0, :64] != 3.0).any(-1).all()
    assert (kwargs["out"][0, 64:70] == 0).all()
    assert (kwargs["out"][0, 70:] == 3.0).all()
    assert (kwargs["out"][1] == 3.0).all()


@pytest.mark.parametrize("shape", [(0, 5), (9, 0)])
def test_empty_cache_or_table_gives_zeros(shape, device):
    kwargs = clone_arguments(dict(ops.spec(OP).cases(device))["R3-ratio2-page64"])
    blocks, columns = shape
    kwargs["k_cache"], kwargs["block_table"] = kwargs["k_cache"][:blocks], kwargs["block_table"][:, :columns]
    for run in IMPLEMENTATIONS:
        kwargs["out"].fill_(3.0)
        run(**kwargs)
        assert (kwargs["out"][0, :97] == 0).all()
        assert (kwargs["out"][0, 97:] == 3.0).all()


def test_more_rows_than_one_step_without_host_sync(device):
    kwargs = clone_arguments(dict(ops.spec(OP).cases(device))["R1-one-token"])
    n = 16384 + 5
    kwargs["out"] = torch.full((1, n + 3, 512), 3.0, dtype=torch.bfloat16, device=device)
    kwargs["block_table"] = (torch.arange(513, dtype=torch.int32, device=device) % 9)[None]
    kwargs["seq_lens"] = torch.tensor([n], dtype=torch.int32, device=device)
    with NoHostSync():
        ops.pytorch(OP)(**kwargs)
    assert torch.equal(kwargs["out"][0, 9 * 32 : n], kwargs["out"][0, : n - 9 * 32])  # the table repeats every 9 pages
    assert (kwargs["out"][0, n:] == 3.0).all()
    assert kwargs["out"][0, :n].isfinite().all()


def test_page_ids_times_stride_beyond_int32(device):
    """Pages 2^24 bytes apart: page 200 begins beyond 2^31. Virtual memory: few of its pages are ever touched."""
    blocks, stride = 201, 1 << 24
    storage = torch.empty(blocks * stride, dtype=torch.uint8, device=device)
    cache = storage.as_strided((blocks, 1, 584), (stride, 584, 1))
    data, scales = record_views(cache)
    data[200], scales[200] = 0x38, 128  # 1.0 * 2
    out = torch.zeros(1, 1, 512, dtype=torch.bfloat16, device=device)
    one = torch.ones(1, dtype=torch.int32, device=device)
    ops.pytorch(OP)(out, cache, one, None, one[:, None] * 200, 1, 0)
    assert (out[0, 0, :448] == 2.0).all()


def test_block_size_must_be_the_page_size(device):
    kwargs = dict(ops.spec(OP).cases(device))["R1-one-token"]
    with pytest.raises(TensorContractError, match=r"block_size must be 32, the rows of a page, got 64"):
        ops.pytorch(OP)(**{**kwargs, "block_size": 64})


def test_overlapping_pages_are_refused(device):
    kwargs = dict(ops.spec(OP).cases(device))["R1-one-token"]
    cache = kwargs["k_cache"].as_strided((2, 32, 584), (18000, 584, 1))
    with pytest.raises(TensorContractError, match=r"k_cache must be pages at least .*18688 bytes apart, got .*18000"):
        ops.pytorch(OP)(**{**kwargs, "k_cache": cache})


@pytest.mark.parametrize("name", [name for name, _ in ops.spec(OP).cases("cpu")])
def test_kernel_gives_the_same_bits(name, device, kernel_gives_the_same_bits):
    kernel_gives_the_same_bits(OP, dict(ops.spec(OP).cases(device))[name])


def test_kernel_without_aligned_strides(device, kernel_gives_the_same_bits):
    """Rows an odd number of elements apart take the other variant; lengths and tables may be slices."""
    kwargs = clone_arguments(dict(ops.spec(OP).cases(device))["R4-window-page32"])
    R, rows = kwargs["out"].shape[:2]
    kwargs["out"] = torch.randn(R, rows, 517, device=device).bfloat16()[..., :512]
    assert tuning.choose(kwargs["out"].stride(0), 517).name == "out1"
    for name in ("seq_lens", "gather_lens"):
        kwargs[name] = torch.cat((kwargs[name][:1], kwargs[name]))[1:]
    table = kwargs["block_table"]
    kwargs["block_table"] = torch.cat((table[:1], table)).repeat(1, 2)[1:, 1:8]
    kernel_gives_the_same_bits(OP, kwargs)


def test_kernel_programs_go_on_to_their_next_rows(device, monkeypatch, kernel_gives_the_same_bits):
    monkeypatch.setattr(tuning, "PROGRAMS", 6)
    kwargs = dict(ops.spec(OP).cases(device))["R3-ratio2-page64"]
    assert tuning.programs_per_request(3, 100) == 2
    kernel_gives_the_same_bits(OP, kwargs)


def test_kernel_on_pages_beyond_int32(device):
    blocks, stride = 201, 1 << 24
    storage = torch.empty(blocks * stride, dtype=torch.uint8, device=device)
    cache = storage.as_strided((blocks, 1, 584), (stride, 584, 1))
    data, scales = record_views(cache)
    data[200], scales[200] = 0x38, 128  # 1.0 * 2
    out = torch.zeros(1, 1, 512, dtype=torch.bfloat16, device=device)
    one = torch.ones(1, dtype=torch.int32, device=device)
    kernel(out, cache, one, None, one[:, None] * 200, 1, 0)
    assert (out[0, 0, :448] == 2.0).all()


@pytest.mark.parametrize("run", IMPLEMENTATIONS)
def test_rows_before_the_first_token_are_zeros(run, device):
    kwargs = clone_arguments(dict(ops.spec(OP).cases(device))["R4-window-page32"])
    kwargs["seq_lens"][1:3] = torch.tensor([3, -(2**31)], dtype=torch.int32, device=device)
    kwargs["gather_lens"][1:3] = torch.tensor([40, 2**31 - 1], dtype=torch.int32, device=device)
    kwargs["block_table"][1, 0] = 2
    kwargs["out"].fill_(3.0)
    run(**kwargs)
    assert (kwargs["out"][1, 7:44] == 0).all()
    assert (kwargs["out"][1, 44:47] != 0).any(-1).all()
    assert (kwargs["out"][2, 7:] == 0).all()


def test_kernel_on_pages_without_rows(device, kernel_gives_the_same_bits):
    kwargs = clone_arguments(dict(ops.spec(OP).cases(device))["R1-one-token"])
    kwargs |= {"k_cache": kwargs["k_cache"][:, :0], "block_size": 0}
    kernel(**kwargs)
    assert (kwargs["out"] == 0).all()
