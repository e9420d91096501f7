"""Groups, the scale rule and the floor; E4M3 and UE8M0 have tests of their own."""

import pytest
import torch

from deepinfer_sm80.ops.formats import e4m3, mxfp8


@pytest.mark.parametrize("group", [32, 64])
def test_a_scale_is_the_least_power_of_two_that_fits_its_group(device, group):
    x = torch.randn(50, 192, generator=torch.Generator().manual_seed(group)) * torch.logspace(-7, 5, 50)[:, None]
    codes, scale = (part.cpu() for part in mxfp8.encode(x.to(device), group))
    assert scale.shape == (50, 192 // group)
    amax = x.view(50, -1, group).abs().amax(-1).clamp_min(1e-4)
    factor = torch.exp2(scale.double() - 127)
    assert (amax <= 448 * factor).all()
    assert (amax > 224 * factor).all()
    expected = e4m3.encode((x.view(50, -1, group) / factor[..., None].float()).flatten(1))
    assert torch.equal(codes, expected)


def test_what_was_decoded_encodes_to_itself(device):
    x = torch.randn(20, 64, generator=torch.Generator().manual_seed(0)).to(device)
    once = mxfp8.decode(*mxfp8.encode(x))
    assert torch.equal(mxfp8.decode(*mxfp8.encode(once)), once)
    assert (once - x).abs().max() <= 2**-4 * x.abs().max()


def test_zero_rows_and_zero_values(device):
    codes, scale = mxfp8.encode(torch.zeros(0, 64, device=device))
    assert mxfp8.decode(codes, scale).shape == (0, 64)
    codes, scale = mxfp8.encode(torch.zeros(1, 32, device=device))
    assert scale.item() == 127 - 22  # 2^-22 >= 1e-4 / 448 > 2^-23
    assert not codes.any()
