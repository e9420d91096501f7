"""Block borders, ragged edges and the scale rule of the 32x32 weight format."""

from fractions import Fraction

import pytest
import torch

from deepinfer_sm80.ops.formats import e4m3, fp8_block


@pytest.mark.parametrize("shape", [(1, 1), (32, 32), (33, 31), (70, 100), (0, 64)])
def test_decode_takes_the_scale_of_its_block(device, shape):
    g = torch.Generator().manual_seed(0)
    rows, columns = shape
    weight = torch.randint(0, 0x7F, shape, generator=g).to(torch.uint8)
    scale = torch.randint(100, 150, (-(-rows // 32), -(-columns // 32)), generator=g).to(torch.uint8)
    got = fp8_block.decode(weight.to(device), scale.to(device)).cpu()
    assert got.shape == shape
    for n in range(rows):
        for k in range(columns):
            code, byte = weight[n, k].item(), scale[n // 32, k // 32].item()
            tail = Fraction(code & 7, 8) + (code >> 3 > 0)
            want = tail * Fraction(2) ** (max(code >> 3, 1) - 7) * Fraction(2) ** (byte - 127)
            assert Fraction(got[n, k].item()) == want


def test_encode_scale_rule_per_block(device):
    x = torch.zeros(65, 40, device=device)
    x[0, 0] = 448.0  # exactly representable at scale 1
    x[31, 39] = -448.5  # just above: scale 2
    x[33, 2] = 1e-4  # the floor itself
    x[64, 39] = float(torch.nextafter(torch.tensor(1792.0), torch.tensor(9e9)))
    weight, scale = fp8_block.encode(x)
    floor = 127 - 22  # 1e-4 / 448 = 2.2e-7, next power of two 2^-22
    assert scale.cpu().tolist() == [[127, 128], [floor, floor], [floor, 130]]
    assert weight[0, 0].item() == 0x7E
    assert weight[31, 39].item() == 0xF6  # -224 at scale 2


@pytest.mark.parametrize("shape", [(32, 64), (45, 33), (1, 200)])
def test_encode_is_nearest_under_its_scale(device, shape):
    g = torch.Generator().manual_seed(2)
    x = (torch.randn(shape, generator=g) * torch.logspace(-6, 3, shape[1])).to(device)
    weight, scale = fp8_block.encode(x)
    grid = e4m3.decode(torch.arange(0x7F, dtype=torch.uint8, device=device)).double()
    step = fp8_block.decode(torch.full_like(weight, 0x38), scale).double()  # 0x38 is 1.0
    scaled = x.double() / step
    assert scaled.abs().max() <= 448
    best = (scaled.abs()[..., None] - grid).abs().amin(-1)
    assert torch.equal((fp8_block.decode(weight, scale).double() / step - scaled).abs(), best)


def test_round_trip(device):
    weight = torch.arange(64 * 96, device=device).view(64, 96).remainder(0x7F).to(torch.uint8)
    weight[:, ::2] |= 0x80
    scale = torch.tensor([[120, 127, 130], [121, 128, 133]], dtype=torch.uint8, device=device)
    again = fp8_block.encode(fp8_block.decode(weight, scale))
    assert torch.equal(again[0], weight)
    assert torch.equal(again[1], scale)
