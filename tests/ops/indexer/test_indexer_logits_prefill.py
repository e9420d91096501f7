"""What the shared contract cannot say about indexer_logits_prefill."""

import sys
from dataclasses import replace
from fractions import Fraction

import pytest
import torch

from deepinfer_sm80 import ops
from deepinfer_sm80.errors import TensorContractError
from deepinfer_sm80.ops.formats import e4m3
from deepinfer_sm80.ops.indexer.indexer_logits_prefill import kernel as kernel_room
from deepinfer_sm80.ops.indexer.indexer_logits_prefill import tuning
from deepinfer_sm80.testing.compare import assert_agrees

OP = "indexer_logits_prefill"
launch = ops.pytorch(OP)
room = sys.modules[launch.__module__]


def example(device, case="T6-two-requests"):
    return dict(dict(ops.spec(OP).cases(device))[case])


def test_one_logit_in_exact_arithmetic(device):
    kwargs = example(device)
    got = launch(**kwargs)[4, 3].item()  # request 2, its fourth key
    q = [[Fraction(v) for v in head] for head in e4m3.decode(kwargs["q_codes"][4]).tolist()]
    k = [Fraction(v) for v in e4m3.decode(kwargs["k_codes"][73]).tolist()]
    dots = [max(sum(a * b for a, b in zip(head, k, strict=True)), Fraction(0)) for head in q]
    terms = [Fraction(w) * dot for w, dot in zip(kwargs["weights"][4].tolist(), dots, strict=True)]
    exact = Fraction(kwargs["k_scale"][73].item()) * sum(terms)
    magnitude = Fraction(kwargs["k_scale"][73].item()) * sum(map(abs, terms))
    assert abs(Fraction(got) - exact) <= magnitude / 2**20


def test_negative_dots_do_not_count(device):
    codes = torch.full((1, 32, 128), 0x38, dtype=torch.uint8, device=device)  # 1.0
    k_codes = torch.full((2, 128), 0x38, dtype=torch.uint8, device=device)
    k_codes[1] = 0xB8  # -1.0
    got = launch(
        codes,
        torch.full((1, 32), -0.5, device=device),
        k_codes,
        torch.tensor([2.0, 4.0], device=device),
        torch.tensor([0], dtype=torch.int32, device=device),
        torch.tensor([2], dtype=torch.int32, device=device),
        2,
    )
    assert got.tolist() == [[-0.5 * 32 * 128 * 2.0, 0.0]]


def test_nan_keys_spoil_only_the_columns_that_name_them(device):
    kwargs = example(device)
    got = launch(**kwargs)
    bad = {(t, c) for t, c in got.isnan().nonzero().tolist()}
    assert bad == {(t, 5) for t in range(3)} | {(t, c) for t in range(3, 6) for c in (90 - 70, 150 - 70)}


@pytest.mark.parametrize(("rows", "keys", "logits"), [(1, 7, 1 << 24), (4, 64, 1 << 24), (64, 1 << 13, 200)])
def test_tiles_join_without_a_seam(device, monkeypatch, rows, keys, logits):
    whole = launch(**example(device))
    monkeypatch.setattr(room, "_ROWS_AT_ONCE", rows)
    monkeypatch.setattr(room, "_KEYS_AT_ONCE", keys)
    monkeypatch.setattr(room, "_LOGITS_AT_ONCE", logits)
    assert_agrees(OP, launch(**example(device)), whole, ops.spec(OP).tolerance)


def test_can_be_captured(device, forbid_host_sync):
    kwargs = example(device)
    with forbid_host_sync():
        launch(**kwargs)


def test_scales_of_other_keys_are_refused(device):
    kwargs = example(device) | {"k_scale": torch.ones(199, device=device)}
    with pytest.raises(TensorContractError, match=r"k_scale must be contiguous torch.float32 of shape \[S=200\]"):
        launch(**kwargs)


def test_negative_width_is_refused(device):
    with pytest.raises(TensorContractError, match="max_k must be 0 or larger, got -1"):
        launch(**(example(device) | {"max_k": -1}))


@pytest.mark.parametrize("name", [name for name, _ in ops.spec(OP).cases("cpu")])
def test_kernel_agrees(name, device, kernel_agrees):
    kernel_agrees(OP, example(device, name))


@pytest.mark.parametrize("capability", [(8, 0), (8, 6)])
def test_kernel_tiles_join_without_a_seam(capability, device, monkeypatch, kernel_agrees):
    """More queries than one block, an odd number of them, more keys than one tile, decoded queries in two parts."""
    g = torch.Generator().manual_seed(8)
    tokens, keys = 13, 150
    kwargs = {
        "q_codes": e4m3.encode(torch.randn(tokens, 32, 128, generator=g) * 60).to(device),
        "weights": torch.randn(tokens, 32, generator=g).to(device),
        "k_codes": e4m3.encode(torch.randn(keys, 128, generator=g) * 60).to(device),
        "k_scale": torch.rand(keys, generator=g).to(device),
        "row_start": torch.tensor([0] * 6 + [40] * 7, dtype=torch.int32, device=device),
        "row_end": torch.arange(tokens, device=device).int() + 138,
        "max_k": 131,
    }
    kwargs["q_codes"][12, 31, 127] = 0xFF
    scoring = tuning.logits(tuning.Config.for_capability(capability))
    scoring = replace(scoring, constants={**scoring.constants, "TOKENS": 4})
    monkeypatch.setattr(kernel_room, "TOKENS", 4)
    monkeypatch.setattr(kernel_room, "_ROWS_AT_ONCE", 8)
    monkeypatch.setattr(kernel_room, "_scoring", lambda index: scoring)
    kernel_agrees(OP, kwargs)


def test_kernel_clamps_wide_row_numbers(device, kernel_agrees):
    kwargs = example(device, "T5-padding")
    kwargs["row_end"] = kwargs["row_end"].long()
    kwargs["row_end"][0], kwargs["row_end"][1] = (1 << 32) + 5, -(1 << 40)
    kernel_agrees(OP, kwargs)


def test_kernel_needs_no_host_sync(device, kernel_without_host_sync):
    kernel_without_host_sync(OP, example(device))


def test_kernel_refuses_what_the_launcher_refuses(device):
    with pytest.raises(TensorContractError, match="max_k must be 0 or larger, got -1"):
        kernel_room.indexer_logits_prefill(**(example(device) | {"max_k": -1}))
