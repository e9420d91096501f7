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


@triton.jit
def round_to_bf16(x, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, device.fp32_to_bf16(tl.load(x + i, mask=i < n, other=0.0)), mask=i < n)


@triton.jit
def through_words(x, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    low, high = device.bf16_pair_to_fp32(tl.load(x + i, mask=i < n, other=0))
    tl.store(out + i, device.fp32_to_bf16_pair(low, high), mask=i < n)


@triton.jit
def rotation(x, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    a, b = tl.load(x + i, mask=i < n, other=0.0), tl.load(x + n + i, mask=i < n, other=0.0)
    tl.store(out + i, device.sub_rn(device.mul_rn(a, b), device.mul_rn(b, a)), mask=i < n)
    tl.store(out + n + i, device.add_rn(device.mul_rn(a, b), device.mul_rn(b, b)), mask=i < n)


def test_rounding_to_bf16_agrees_at_every_boundary(device):
    exact = torch.arange(65536, dtype=torch.int32).repeat_interleave(5) << 16
    x = (exact + torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001], dtype=torch.int32).repeat(65536)).view(torch.float32)
    x = x.to(device)
    assert torch.equal(run(round_to_bf16, x, torch.bfloat16).view(torch.int16), x.bfloat16().view(torch.int16))


def test_pairs_of_bf16_go_through_a_word(device):
    x = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).to(device)
    x = torch.stack((x, x.flip(0)), dim=-1)[: 0x7F80 + 1]  # the first half without NaN, beside every negative value
    x = x[~x.isnan().any(-1)].contiguous().view(torch.int32).flatten()
    assert torch.equal(run(through_words, x, torch.int32), x)


def test_products_are_rounded_before_the_sum(device):
    """A fused difference of equal products is not zero but a rounding error, nearly everywhere."""
    x = torch.randn(2, 5000, generator=torch.Generator().manual_seed(1)).to(device)
    out = torch.empty_like(x)
    rotation[(triton.cdiv(5000, BLOCK),)](x, out, 5000, BLOCK=BLOCK)
    assert (out[0] == 0).all()
    assert torch.equal(out[1], x[0] * x[1] + x[1] * x[1])
