"""All codes under all scales, the scale rule, and the encoder against brute force."""

from fractions import Fraction

import torch

from deepinfer_sm80.ops.formats import e2m1, e4m3, nvfp4

MAGNITUDES = [Fraction(n, 2) for n in (0, 1, 2, 3, 4, 6, 8, 12)]


def nearest_even(scaled):
    return min(range(8), key=lambda c: (abs(MAGNITUDES[c] - min(abs(scaled), 6)), c & 1))


def test_decode_all_codes_under_all_scales_and_bfloat16_holds_them(device):
    packed = e2m1.pack(torch.arange(16, dtype=torch.uint8, device=device)).expand(256, 8)
    scales = torch.arange(256, dtype=torch.uint8, device=device)[:, None]
    got = nvfp4.decode(packed, scales).cpu()
    finite = (scales & 0x7F)[:, 0].cpu() != 0x7F
    assert got[~finite].isnan().all()
    assert torch.equal(got[finite].bfloat16().float(), got[finite])
    factors = e4m3.decode(scales).cpu()[:, 0]
    for byte in finite.nonzero()[:, 0].tolist():
        for code in range(16):
            exact = MAGNITUDES[code & 7] * Fraction(factors[byte].item()) * (-1 if code & 8 else 1)
            assert Fraction(got[byte, code].item()) == exact


def test_encode_reaches_every_code_under_every_scale(device):
    """The value of every code, in a group whose largest is 6 scales, comes back as that code and scale."""
    scales = torch.arange(1, 0x7F, dtype=torch.uint8, device=device)[:, None]
    codes = torch.arange(16, dtype=torch.uint8, device=device).expand(len(scales), 16)
    packed, found = nvfp4.encode(nvfp4.decode(e2m1.pack(codes), scales))
    assert torch.equal(found, scales)
    assert torch.equal(e2m1.unpack(packed), codes)


def test_encode_against_brute_force(device):
    x = torch.randn(64, 48, generator=torch.Generator().manual_seed(1)) * torch.logspace(-5, 4, 64)[:, None]
    x[0], x[1, :16] = 0, torch.tensor([1e-9] * 15 + [-0.0])
    packed, scale = (part.cpu() for part in nvfp4.encode(x.to(device)))
    codes = e2m1.unpack(packed)
    for r in range(64):
        for g in range(3):
            group = x[r, 16 * g : 16 * g + 16]
            amax = torch.tensor(group.abs().max().item() / 6, dtype=torch.float32).clamp(2**-9, 448)
            factor = e4m3.decode(scale[r, g])
            assert scale[r, g] == e4m3.encode(amax)
            for d in range(16):
                want = nearest_even(Fraction(group[d].item()) / Fraction(factor.item()))
                assert codes[r, 16 * g + d] & 7 == want
                assert codes[r, 16 * g + d] >> 3 == int(torch.signbit(group[d]))
