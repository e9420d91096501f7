"""What the shared contract cannot say about engram_lookup."""

import sys
from itertools import pairwise

import pytest
import torch

from deepinfer_sm80 import ops
from deepinfer_sm80.errors import TensorContractError
from deepinfer_sm80.ops.engram.engram_lookup.kernel import engram_lookup as kernel

OP = "engram_lookup"
launch = ops.pytorch(OP)
LAUNCHERS = pytest.mark.parametrize("launch", [launch, kernel])
room = sys.modules[launch.__module__]


def example(device, case="T37-vocab-shard"):
    return dict(dict(ops.spec(OP).cases(device))[case])


@LAUNCHERS
def test_scale_belongs_to_32_dims(launch, device):
    weight = torch.full((2, 256), 0x38, dtype=torch.uint8, device=device)  # 1.0
    weight[1] = 0xC0  # -2.0
    scale = torch.tensor([list(range(124, 132)), [127] * 8], dtype=torch.uint8, device=device)
    got = launch(weight, scale, torch.tensor([[1, 0]], device=device), 0, 2, 0, 2)
    assert got[0, 0].eq(-2.0).all()
    assert got[0, 1].view(8, 32).float().amin(1).tolist() == [2.0**k for k in range(-3, 5)]
    assert torch.equal(got[0, 1].view(8, 32).amin(1), got[0, 1].view(8, 32).amax(1))


@LAUNCHERS
def test_every_code_under_every_scale(launch, device):
    weight = torch.arange(256, dtype=torch.uint8, device=device).expand(32, 256).contiguous()
    scale = torch.arange(256, dtype=torch.uint8, device=device).view(32, 8)
    got = launch(weight, scale, torch.arange(32, device=device)[:, None], 0, 1, 0, 32)[:, 0].double().cpu()
    code, byte = torch.arange(256), scale.cpu().repeat_interleave(32, 1).double()
    tail = (code & 7) / 8 + (code >> 3 & 15 > 0)
    value = tail.double() * torch.exp2(((code >> 3) & 15).clamp_min(1).double() - 7) * torch.exp2(byte - 127)
    value = torch.where(code >= 128, -value, value)
    nan = (code & 0x7F == 0x7F) | (byte == 255)
    assert torch.equal(got.isnan(), nan)
    overflow = value.abs() > torch.finfo(torch.bfloat16).max
    tiny = value.abs() < 2.0**-126  # bfloat16 subnormals: a step of 2^-133
    assert torch.equal(got[~nan & ~overflow & ~tiny], value[~nan & ~overflow & ~tiny])
    assert (got - value)[~nan & tiny].abs().max() <= 2.0**-134
    assert torch.equal(got[~nan & overflow], value[~nan & overflow].sign() * float("inf"))


def test_vocabulary_shards_add_up(device):
    kwargs = example(device, "T1-all-heads")
    kwargs["weight"] = kwargs["weight"] & 0x77  # no NaN
    kwargs["scale"] = kwargs["scale"].clamp(110, 130)
    whole = launch(**kwargs)
    cuts = (0, 13, 14, 40)
    parts = [
        launch(
            **kwargs
            | {"weight": kwargs["weight"][a:b], "scale": kwargs["scale"][a:b], "vocab_start": a, "vocab_end": b}
        )
        for a, b in pairwise(cuts)
    ]
    assert whole.any()
    assert torch.equal(sum(parts), whole)


def test_head_shards_join(device):
    kwargs = example(device, "T3-tp8")
    whole = launch(**kwargs | {"head_start": 0, "local_heads": 24})
    parts = [launch(**kwargs | {"head_start": h, "local_heads": 3}) for h in range(0, 24, 3)]
    assert torch.equal(torch.cat(parts, 1).view(torch.int16), whole.view(torch.int16))


@LAUNCHERS
def test_rows_not_owned_are_zero_even_when_row_0_is_nan(launch, device):
    weight = torch.full((3, 256), 0x7F, dtype=torch.uint8, device=device)
    scale = torch.full((3, 8), 255, dtype=torch.uint8, device=device)
    ids = torch.tensor([[4, -1, 8, 1 << 62]], device=device)
    assert launch(weight, scale, ids, 0, 6, 5, 8).view(torch.int16).eq(0).all()
    assert launch(weight, scale, ids + 1, 0, 1, 5, 8).isnan().all()  # id 5 is owned


@LAUNCHERS
def test_range_longer_than_the_table_reads_no_further(launch, device):
    kwargs = example(device)
    kwargs["ids"] = torch.arange(15, 20, device=device)[None] + kwargs["vocab_start"]
    got = launch(**kwargs | {"head_start": 0, "local_heads": 5})
    assert got[0, :2].ne(0).any(-1).all()
    assert got[0, 2:].eq(0).all()


@LAUNCHERS
def test_table_longer_than_the_range_gives_no_rows_beyond_it(launch, device):
    """Tables are padded to equal shards; the padding rows belong to no id."""
    weight = torch.full((6, 256), 0x38, dtype=torch.uint8, device=device)
    scale = torch.full((6, 8), 127, dtype=torch.uint8, device=device)
    got = launch(weight, scale, torch.arange(8, 16, device=device)[:, None], 0, 1, 10, 13)
    assert got[:, 0, 0].tolist() == [0, 0, 1, 1, 1, 0, 0, 0]


@LAUNCHERS
def test_transposed_and_int32_ids(launch, device):
    kwargs = example(device, "T5-padded-heads")
    kwargs["ids"] = kwargs["ids"].clamp(-5, 100)
    whole = launch(**kwargs)
    turned = kwargs["ids"].t().contiguous().int().t()
    assert torch.equal(launch(**kwargs | {"ids": turned}).view(torch.int16), whole.view(torch.int16))


@LAUNCHERS
def test_out_is_filled_and_returned(launch, device):
    kwargs = example(device)
    out = torch.full((37, 3, 256), float("nan"), dtype=torch.bfloat16, device=device)
    assert launch(**kwargs, out=out) is out
    assert torch.equal(out.view(torch.int16), launch(**kwargs).view(torch.int16))


def test_rows_do_not_depend_on_the_tile_they_fall_in(device, monkeypatch):
    whole = launch(**example(device))
    monkeypatch.setattr(room, "_ROWS_AT_ONCE", 10)
    assert torch.equal(launch(**example(device)).view(torch.int16), whole.view(torch.int16))


def test_can_be_captured(device, forbid_host_sync):
    kwargs = example(device)
    with forbid_host_sync():
        launch(**kwargs)


def test_scale_of_another_table_is_refused(device):
    kwargs = example(device)
    kwargs["scale"] = kwargs["scale"][:5]
    with pytest.raises(TensorContractError, match=r"scale must be contiguous torch.uint8 of shape \[N=17, 8\]"):
        launch(**kwargs)


def test_negative_vocab_start_is_refused(device):
    """Ids of -1 mean no row; a range that began below 0 would own them."""
    with pytest.raises(TensorContractError, match="vocab_start must be 0 or larger, got -1"):
        launch(**example(device) | {"vocab_start": -1})


@pytest.mark.parametrize("name", [name for name, _ in ops.spec(OP).cases("cpu")])
def test_kernel_gives_the_same_bits(name, device, kernel_gives_the_same_bits):
    kernel_gives_the_same_bits(OP, dict(ops.spec(OP).cases(device))[name])


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_kernel_with_ids_anywhere(dtype, device, kernel_gives_the_same_bits):
    kwargs = example(device, "T5-padded-heads")
    kwargs["ids"] = kwargs["ids"].clamp(-5, 100).to(dtype).t().contiguous()[1:].t()
    kernel_gives_the_same_bits(OP, kwargs)
