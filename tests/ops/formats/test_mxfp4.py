"""All codes under all scales, the packing order, and the encoder against brute force."""

import math
from fractions import Fraction

import pytest
import torch

from deepinfer_sm80.ops.formats import mxfp4

MAGNITUDES = [Fraction(n, 2) for n in (0, 1, 2, 3, 4, 6, 8, 12)]


def nearest_even(scaled):
    """Code of an exact scaled value, sign apart."""
    return min(range(8), key=lambda c: (abs(MAGNITUDES[c] - abs(scaled)), c & 1))


def scale_byte(amax):
    amax = max(Fraction(amax), 6 * Fraction(2) ** -126)
    return next(b for b in range(255) if Fraction(2) ** (b - 127) * 6 >= amax)


def unpack(packed):
    return torch.stack([packed & 15, packed >> 4], -1).flatten(-2)


def test_low_nibble_is_the_even_column(device):
    packed = torch.zeros(1, 16, dtype=torch.uint8, device=device)
    packed[0, 3] = 0xA7  # column 6: 7 -> 6.0; column 7: 0xA -> -1.0
    got = mxfp4.decode(packed, torch.full((1, 1), 128, dtype=torch.uint8, device=device))
    want = torch.zeros(1, 32, device=device)
    want[0, 6], want[0, 7] = 12.0, -2.0
    assert torch.equal(got, want)


def test_decode_all_codes_under_all_scales(device):
    codes = torch.arange(32) % 16
    packed = (codes[0::2] | codes[1::2] << 4).to(torch.uint8).expand(256, 16).contiguous()
    got = mxfp4.decode(packed.to(device), torch.arange(256, dtype=torch.uint8, device=device)[:, None]).cpu()
    for b in range(255):
        for column in range(16):
            exact = MAGNITUDES[column & 7] * Fraction(2) ** (b - 127)
            value = got[b, column].item()
            overflow = exact > Fraction(torch.finfo(torch.float32).max)
            assert abs(value) == math.inf if overflow else Fraction(abs(value)) == exact
            assert math.copysign(1.0, value) == (-1.0 if column & 8 else 1.0)
            assert value == got[b, column + 16].item()
    assert got[255].isnan().all()


def test_scales_belong_to_groups_of_32(device):
    packed = torch.full((2, 48), 0x22, dtype=torch.uint8, device=device)  # all 1.0
    scale = torch.tensor([[127, 128, 129], [126, 125, 124]], dtype=torch.uint8, device=device)
    got = mxfp4.decode(packed, scale)
    assert got.shape == (2, 96)
    assert (
        got.view(2, 3, 32).amax(-1).tolist() == got.view(2, 3, 32).amin(-1).tolist() == [[1, 2, 4], [0.5, 0.25, 0.125]]
    )


def test_encode_all_finite_bfloat16(device):
    x = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    x = x[x.isfinite()]
    x = x.view(34, 32, 60).transpose(1, 2).reshape(-1, 32)  # each group spans 15 binades, in half-binade steps
    packed, scale = mxfp4.encode(x.to(device))
    codes, scale = unpack(packed.cpu()), scale.cpu()
    for row in range(0, len(x), 3):
        byte = scale[row, 0].item()
        assert byte == scale_byte(x[row].abs().max().item())
        for value, code in zip(x[row].tolist(), codes[row].tolist(), strict=True):
            assert code & 7 == nearest_even(Fraction(value) / Fraction(2) ** (byte - 127)), value
            assert code >> 3 == (math.copysign(1.0, value) < 0)


@pytest.mark.parametrize("amax", [6.0, 5.0, 4.0, 3.000001])
def test_encode_midpoints_and_their_neighbours(device, amax):
    """amax in (3, 6] pins the scale to 1."""
    at = torch.tensor([0.0, 0.25, 0.5, 0.75, 1.25, 1.75, 2.5])
    at = torch.cat([at, torch.nextafter(at, torch.tensor(0.0)), torch.nextafter(at, torch.tensor(9.0))])
    x = torch.cat([at, torch.tensor([amax, -amax, -0.0, -0.25, -0.75, -1.25, -2.5, -2.6, 2.9, 0.1, -0.3])])
    packed, scale = mxfp4.encode(x[None].to(device))
    assert scale.item() == 127
    assert (unpack(packed.cpu())[0] & 7).tolist() == [nearest_even(Fraction(v)) for v in x.tolist()]
    assert (unpack(packed.cpu())[0] >> 3).tolist() == torch.signbit(x).int().tolist()


def test_encode_upper_ties(device):
    x = torch.zeros(1, 32, device=device)
    x[0, :5] = torch.tensor([6.0, 3.5, 5.0, -3.5, -5.0])
    codes = unpack(mxfp4.encode(x)[0])
    assert codes[0, :5].tolist() == [7, 6, 6, 14, 14]


def test_encode_zero_group_nan_group_and_round_trip(device):
    x = torch.zeros(3, 64, device=device)
    x[1, 40] = math.nan
    x[2] = torch.tensor([0.5, -6.0, 3.0, 1.5], device=device).repeat(16) * 2.0**20
    packed, scale = mxfp4.encode(x)
    assert scale.tolist() == [[1, 1], [1, 255], [147, 147]]
    back = mxfp4.decode(packed, scale)
    assert torch.equal(back[[0, 2]], x[[0, 2]])
    assert back[1, :32].eq(0).all()
    assert back[1, 32:].isnan().all()
    assert mxfp4.decode(packed[:0], scale[:0]).shape == (0, 64)
