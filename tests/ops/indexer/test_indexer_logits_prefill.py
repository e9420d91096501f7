"""What the shared contract cannot say about indexer_logits_prefill."""

import sys
from fractions import Fraction

import pytest
import torch

from deepinfer_sm80 import ops
from deepinfer_sm80.errors import TensorContractError
from deepinfer_sm80.ops.formats import e4m3
from deepinfer_sm80.testing.compare import assert_agrees

OP = "indexer_logits_prefill"
launch = ops.launcher(OP)
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
