"""Every code against exact fractions, every bfloat16 against brute-force nearest-even, and the boundaries."""

import itertools
import math
from fractions import Fraction

import pytest
import torch

from deepinfer_sm80.ops.formats import e4m3


def value_of(code):
    """The format's definition in exact arithmetic; None for NaN."""
    exponent, mantissa = code >> 3 & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return None
    tail = Fraction(mantissa, 8)
    size = tail / 2**6 if exponent == 0 else (1 + tail) * Fraction(2) ** (exponent - 7)
    return -size if code & 0x80 else size


def nearest_even(x):
    """Scan all finite magnitudes; ties go to the even code, overflow to 448."""
    size = Fraction(abs(x)) if math.isfinite(x) else Fraction(10**40)
    code = min(range(0x7F), key=lambda c: (abs(value_of(c) - size), c & 1))
    return code | (0x80 if math.copysign(1.0, x) < 0 else 0)


def all_bfloat16():
    return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()


def test_decode_all_codes(device):
    got = e4m3.decode(torch.arange(256, dtype=torch.uint8, device=device)).cpu()
    for code in range(256):
        want = value_of(code)
        if want is None:
            assert math.isnan(got[code])
        else:
            assert Fraction(got[code].item()) == want, hex(code)
            assert math.copysign(1.0, got[code].item()) == (-1.0 if code & 0x80 else 1.0), hex(code)


def test_round_trip_of_all_codes(device):
    codes = torch.arange(256, dtype=torch.uint8, device=device)
    again = e4m3.encode(e4m3.decode(codes)).cpu().tolist()
    assert again == [0x7F if code & 0x7F == 0x7F else code for code in range(256)]


def test_encode_all_bfloat16(device):
    x = all_bfloat16()
    got = e4m3.encode(x.to(device)).cpu().tolist()
    memo = {}
    for value, code in zip(x.tolist(), got, strict=True):
        if math.isnan(value):
            assert code == 0x7F
            continue
        # outside this window every magnitude saturates or vanishes; keeps the brute force to seconds
        inside = max(min(abs(value), 1000.0), 2.0**-12) if value else 0.0
        if inside not in memo:
            memo[inside] = nearest_even(inside)
        assert code == memo[inside] | (0x80 if math.copysign(1.0, value) < 0 else 0), value
    assert len(memo) > 2000


def test_encode_around_every_midpoint(device):
    """The float32 neighbours of all 126 midpoints and of all codes: a bfloat16 sweep cannot see these."""
    grid = [value_of(code) for code in range(0x7F)]
    points = [float(v) for v in grid] + [float((a + b) / 2) for a, b in itertools.pairwise(grid)] + [464.0]
    at = torch.tensor(points)
    x = torch.cat([at, torch.nextafter(at, torch.tensor(0.0)), torch.nextafter(at, torch.tensor(1e9))])
    x = torch.cat([x, -x])
    got = e4m3.encode(x.to(device)).cpu().tolist()
    assert got == [nearest_even(v) for v in x.tolist()]


@pytest.mark.parametrize(
    ("value", "code"),
    [
        (0.0, 0x00),
        (-0.0, 0x80),
        (2.0**-9, 0x01),
        (2.0**-10, 0x00),
        (3 * 2.0**-10, 0x02),
        (2.0**-6 - 2.0**-11, 0x08),
        (15.5, 0x58),
        (448.0, 0x7E),
        (463.9, 0x7E),
        (1e30, 0x7E),
        (math.inf, 0x7E),
        (-math.inf, 0xFE),
        (math.nan, 0x7F),
        (2.0**-149, 0x00),
        (-(2.0**-149), 0x80),
    ],
)
def test_encode_boundaries(device, value, code):
    assert e4m3.encode(torch.tensor([value], device=device)).item() == code


def test_negative_nan_and_payloads_become_one_code(device):
    bits = torch.tensor([0x7F800001, 0x7FFFFFFF, -1, -(2**23) + 1], dtype=torch.int32, device=device)
    assert e4m3.encode(bits.view(torch.float32)).cpu().tolist() == [0x7F] * 4


def test_shapes_and_strides_are_kept(device):
    x = torch.randn(6, 10, device=device)[::2, ::3]
    codes = e4m3.encode(x)
    assert codes.shape == x.shape
    assert codes.dtype == torch.uint8
    assert torch.equal(e4m3.decode(codes.t()), e4m3.decode(codes).t())
    assert e4m3.decode(codes[:0]).shape == (0, 4)
