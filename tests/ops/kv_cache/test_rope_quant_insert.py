"""What the shared contract cannot say about rope_quant_insert."""

import math
from fractions import Fraction

import pytest
import torch

from deepinfer_sm80 import ops
from deepinfer_sm80.errors import TensorContractError
from deepinfer_sm80.ops.kv_cache.dequantize_and_gather_k_cache.reference import read_record
from deepinfer_sm80.ops.kv_cache.layout import record_views
from deepinfer_sm80.ops.kv_cache.rope_quant_insert.kernel import rope_quant_insert as kernel
from deepinfer_sm80.testing.cloning import clone_arguments, storage_bytes
from deepinfer_sm80.testing.graphs import NoHostSync

OP = "rope_quant_insert"
IMPLEMENTATIONS = (lambda **k: ops.spec(OP).reference(**k), lambda **k: ops.pytorch(OP)(**k), kernel)


def case(name, device):
    return clone_arguments(dict(ops.spec(OP).cases(device))[name])


@pytest.mark.parametrize("run", IMPLEMENTATIONS)
def test_scale_is_exact_for_every_bfloat16_amax(run, device):
    """One group of every positive finite bfloat16, against Fractions: no logarithm may round across a power of two."""
    amax = torch.arange(0x7F80, dtype=torch.int32).short().view(torch.bfloat16)
    if run is not IMPLEMENTATIONS[1]:
        amax = amax[torch.arange(0, len(amax), 61)]  # the reference is a loop over tokens, as is an interpreted kernel
    rows = -(-len(amax) // 7)
    latent = torch.zeros(rows, 512, dtype=torch.bfloat16)
    padded = torch.nn.functional.pad(amax, (0, rows * 7 - len(amax)))
    latent[:, :448:64] = padded.view(rows, 7)
    kwargs = {
        "latent": latent.to(device),
        "positions": torch.zeros(rows, dtype=torch.int64, device=device),
        "cos_sin_cache": torch.ones(1, 64, device=device),
        "kv_cache": torch.zeros(rows, 1, 584, dtype=torch.uint8, device=device),
        "slot_mapping": torch.arange(rows, device=device),
        "compress_ratio": 1,
    }
    run(**kwargs)
    scales = record_views(kwargs["kv_cache"])[1][:, 0]
    got = scales[:, :7].flatten()[: len(amax)].tolist()
    floor = Fraction(torch.tensor(1e-4).item())
    for value, byte in zip(amax.tolist(), got, strict=True):
        ratio = max(Fraction(value), floor) / 448
        exponent = math.frexp(float(ratio))[1] - 1  # 2^exponent <= ratio
        exponent += ratio > Fraction(2) ** exponent
        assert byte == exponent + 127, value
    assert (scales[:, 7] == 0).all()


@pytest.mark.parametrize("run", IMPLEMENTATIONS)
def test_record_reads_back_within_half_a_step(run, device):
    kwargs = case("L7-T7-ratio1-page128", device)
    run(**kwargs)
    slot = int(kwargs["slot_mapping"][0])
    row, x = read_record(kwargs["kv_cache"], slot).float(), kwargs["latent"][0].float()
    amax = x[:448].view(7, 64).abs().amax(-1)
    step = (amax / 448 * 2)[:, None]  # the scale is below twice amax / 448; half a step is 2^-4 of a value or 2^-10
    error = (row[:448] - x[:448]).view(7, 64).abs()
    assert (error <= torch.maximum(x[:448].view(7, 64).abs() * 2**-4, step * 2**-10)).all()
    angle_kept = row[448:].view(32, 2).norm(dim=-1), x[448:].view(32, 2).norm(dim=-1)
    torch.testing.assert_close(*angle_kept, rtol=2**-7, atol=0)


@pytest.mark.parametrize("run", IMPLEMENTATIONS)
@pytest.mark.parametrize("slots", [[-1, -1, -1], [320, 2**40, -(2**40)], [-1, 5, -1]])
def test_masked_rows_leave_every_other_byte(run, slots, device):
    kwargs = case("L3-T2-ratio2-page64", device)
    kwargs["slot_mapping"] = torch.tensor(slots, device=device)
    kwargs["compress_ratio"] = 1
    before = storage_bytes(kwargs, "kv_cache").clone()
    run(**kwargs)
    changed = (storage_bytes(kwargs, "kv_cache") != before).nonzero().flatten()
    if 5 in slots:
        inside = (changed >= 5 * 576) & (changed < 6 * 576) | (changed >= 64 * 576 + 40) & (changed < 64 * 576 + 48)
        assert len(changed) > 400
        assert inside.all()
        want = kwargs["latent"][1, :64].float()
        assert (read_record(kwargs["kv_cache"], 5)[:64].float() - want).abs().max() <= want.abs().max() * 2**-4
    else:
        assert len(changed) == 0


@pytest.mark.parametrize("run", IMPLEMENTATIONS)
def test_only_the_closing_token_of_a_group_writes_and_rotates_to_its_start(run, device):
    kwargs = case("L3-T2-ratio2-page64", device)
    kwargs["positions"] = torch.tensor([40, 41, 42], device=device)
    kwargs["slot_mapping"] = torch.tensor([1, 2, 3], device=device)
    before = [read_record(kwargs["kv_cache"], slot) for slot in (1, 3)]
    run(**kwargs)
    for slot, want in zip((1, 3), before, strict=True):
        assert torch.equal(read_record(kwargs["kv_cache"], slot).view(torch.uint8), want.view(torch.uint8))
    cos, sin = kwargs["cos_sin_cache"][40].chunk(2)
    even, odd = kwargs["latent"][1, 448:].float().view(32, 2).unbind(-1)
    got = read_record(kwargs["kv_cache"], 2)[448:].view(32, 2)
    assert torch.equal(got[:, 0], (even * cos - odd * sin).bfloat16())
    assert torch.equal(got[:, 1], (odd * cos + even * sin).bfloat16())


def test_non_finite_latents_read_back_as_what_they_are(device):
    kwargs = case("L7-T7-ratio1-page128", device)
    kwargs["latent"][0, 5], kwargs["latent"][0, 70], kwargs["latent"][0, 71] = float("nan"), float("inf"), -float("inf")
    twins = [clone_arguments(kwargs) for _ in IMPLEMENTATIONS]
    for run, arguments in zip(IMPLEMENTATIONS, twins, strict=True):
        run(**arguments)
        row = read_record(arguments["kv_cache"], int(arguments["slot_mapping"][0]))
        assert row[5].isnan()
        assert row[70] == float("inf")
        assert row[71] == -float("inf")
        assert row[:448].isnan().sum() == 1
    for twin in twins[1:]:
        assert torch.equal(storage_bytes(twins[0], "kv_cache"), storage_bytes(twin, "kv_cache"))


def test_int32_slots_and_no_host_sync(device):
    kwargs = case("L40-T33-ratio2-page64", device)
    twin = clone_arguments(kwargs)
    ops.pytorch(OP)(**kwargs)
    twin["slot_mapping"], twin["positions"] = twin["slot_mapping"].int(), twin["positions"].int()
    with NoHostSync():
        ops.pytorch(OP)(**twin)
    assert torch.equal(storage_bytes(kwargs, "kv_cache"), storage_bytes(twin, "kv_cache"))


def test_more_slots_than_latents_are_refused(device):
    kwargs = case("L3-T2-ratio2-page64", device)
    kwargs["slot_mapping"] = torch.zeros(4, dtype=torch.int64, device=device)
    with pytest.raises(TensorContractError, match=r"slot_mapping must be no longer than .*\(3 rows\), got 4"):
        ops.pytorch(OP)(**kwargs)


@pytest.mark.parametrize("name", [name for name, _ in ops.spec(OP).cases("cpu")])
def test_kernel_gives_the_same_bits(name, device, kernel_gives_the_same_bits):
    kernel_gives_the_same_bits(OP, dict(ops.spec(OP).cases(device))[name])


def test_kernel_takes_slices_negative_positions_and_int32(device, kernel_gives_the_same_bits):
    kwargs = case("L7-T7-ratio1-page128", device)
    kwargs |= {"compress_ratio": 2, "positions": torch.arange(-9, 0, device=device)[1:8]}
    kwargs["slot_mapping"] = torch.arange(40, 48, device=device)[1:]
    kwargs["cos_sin_cache"] = torch.randn(9, 65, device=device)[1:, 1:]
    kernel_gives_the_same_bits(OP, kwargs)
    narrow = {name: kwargs[name].int() for name in ("positions", "slot_mapping")}
    kernel_gives_the_same_bits(OP, kwargs | narrow)


def test_kernel_refuses_pages_it_cannot_address(device):
    kwargs = case("L3-T2-ratio2-page64", device)
    kwargs["kv_cache"] = torch.zeros(2, 64 * 584 + 4, dtype=torch.uint8, device=device).as_strided(
        (2, 64, 584), (64 * 584 + 4, 584, 1)
    )
    with pytest.raises(TensorContractError, match=r"kv_cache must be pages a multiple of 8 bytes apart, got 37380"):
        kernel(**kwargs)
