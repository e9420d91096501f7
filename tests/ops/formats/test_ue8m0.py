"""Every byte and every boundary of the power-of-two scale."""

import math
from fractions import Fraction

import pytest
import torch

from deepinfer_sm80.ops.formats import ue8m0


def ceil_byte(x):
    """Smallest b in 0..254 with 2^(b-127) >= x, by search in exact arithmetic."""
    return next((b for b in range(255) if Fraction(2) ** (b - 127) >= x), 254)


def test_decode_all_bytes(device):
    got = ue8m0.decode(torch.arange(256, dtype=torch.uint8, device=device)).cpu().tolist()
    assert [Fraction(v) for v in got[:255]] == [Fraction(2) ** (b - 127) for b in range(255)]
    assert math.isnan(got[255])
    assert got[0] == 2.0**-127 != 0.0


def test_encode_ceil_round_trip(device):
    codes = torch.arange(255, dtype=torch.uint8, device=device)
    assert torch.equal(ue8m0.encode_ceil(ue8m0.decode(codes)), codes)


def test_encode_ceil_beside_every_power_of_two(device):
    powers = ue8m0.decode(torch.arange(255, dtype=torch.uint8))
    x = torch.cat([torch.nextafter(powers, torch.tensor(0.0)), torch.nextafter(powers, torch.tensor(math.inf))])
    assert ue8m0.encode_ceil(x.to(device)).cpu().tolist() == [ceil_byte(Fraction(v)) for v in x.tolist()]


def test_encode_ceil_positive_bfloat16(device):
    x = torch.arange(1, 0x7F80, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    got = ue8m0.encode_ceil(x.to(device)).cpu().tolist()
    for value, byte in zip(x.tolist(), got, strict=True):
        mantissa, exponent = math.frexp(value)  # value = mantissa * 2^exponent, mantissa in [0.5, 1)
        assert byte == min(max(exponent - (mantissa == 0.5) + 127, 0), 254), value


def test_encode_ceil_never_gives_the_nan_byte(device):
    x = torch.tensor([3e38, math.inf, math.nan], device=device)
    assert ue8m0.encode_ceil(x).cpu().tolist() == [254] * 3
    assert ue8m0.encode_amax(x, 1.0).cpu().tolist() == [254] * 3


@pytest.mark.parametrize("largest", [448.0, 6.0, 1.0])
def test_encode_amax_is_the_ceiling_of_the_exact_quotient(device, largest):
    exact = torch.tensor([largest * 2.0**k for k in range(-100, 100)])
    x = torch.cat(
        [
            exact,
            torch.nextafter(exact, torch.tensor(0.0)),
            torch.nextafter(exact, torch.tensor(math.inf)),
            torch.rand(500, generator=torch.Generator().manual_seed(0)) * 1000 + 1e-4,
            torch.tensor([2.0**-126, 1e-4, 3e38]),
        ]
    )
    got = ue8m0.encode_amax(x.to(device), largest).cpu().tolist()
    assert got == [ceil_byte(Fraction(v) / Fraction(largest)) for v in x.tolist()]
