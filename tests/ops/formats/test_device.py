"""The Triton decoders and encoders against the PyTorch ones: every code, every rounding boundary."""

import pytest
import torch
import triton
import triton.language as tl

from deepinfer_sm80.ops.formats import device, e4m3, ue8m0

BLOCK = 4096


@triton.jit
def decode_e4m3(x, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, device.e4m3_to_fp32(tl.load(x + i, mask=i < n, other=0)), mask=i < n)


@triton.jit
def encode_e4m3(x, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, device.fp32_to_e4m3(tl.load(x + i, mask=i < n, other=0.0)), mask=i < n)


@triton.jit
def decode_ue8m0(x, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, device.ue8m0_to_fp32(tl.load(x + i, mask=i < n, other=0)), mask=i < n)


@triton.jit
def scale_of_amax(x, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, device.ue8m0_of_amax(tl.load(x + i, mask=i < n, other=1.0)).to(tl.uint8), mask=i < n)


def run(kernel, x, dtype):
    out = torch.empty(x.numel(), dtype=dtype, device=x.device)
    kernel[(triton.cdiv(x.numel(), BLOCK),)](x, out, x.numel(), BLOCK=BLOCK)
    return out


def assert_same_bits(a, b):
    assert torch.equal(a.isnan(), b.isnan())
    assert torch.equal(a.nan_to_num(0.0).view(torch.int32), b.nan_to_num(0.0).view(torch.int32))


@pytest.mark.parametrize(("kernel", "decode"), [(decode_e4m3, e4m3.decode), (decode_ue8m0, ue8m0.decode)])
def test_every_byte_decodes_alike(device, kernel, decode):
    codes = torch.arange(256, dtype=torch.uint8, device=device)
    assert_same_bits(run(kernel, codes, torch.float32), decode(codes))


def boundaries(device):
    values = e4m3.decode(torch.arange(127, dtype=torch.uint8))
    middles = ((values[1:] + values[:-1]) / 2).view(torch.int32)
    return torch.cat([(middles + step).view(torch.float32) for step in (-1, 0, 1)]).to(device)


def all_bf16(device):
    bits = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    return bits.float().to(device)


def test_encoding_agrees_on_every_bf16_value_and_at_every_boundary(device):
    x = torch.cat((all_bf16(device), boundaries(device), -boundaries(device)))
    assert torch.equal(run(encode_e4m3, x, torch.uint8), e4m3.encode(x))


def test_scale_byte_agrees_for_every_amax(device):
    x = all_bf16(device)
    x = x[x.isfinite() & (x >= 1e-4)]
    assert torch.equal(run(scale_of_amax, x, torch.uint8), ue8m0.encode_amax(x, e4m3.LARGEST))
