"""What the shared contract cannot say about sparse_mla_decode."""

import math

import pytest
import torch

from deepinfer_sm80 import ops
from deepinfer_sm80.errors import TensorContractError
from deepinfer_sm80.ops.contract import Tolerance
from deepinfer_sm80.ops.kv_cache.layout import record_views
from deepinfer_sm80.testing.cloning import clone_tensor
from deepinfer_sm80.testing.compare import assert_agrees
from deepinfer_sm80.testing.graphs import NoHostSync

OP = "sparse_mla_decode"
FULL = "T5-H16-W128-E512-page64"


def case(name, device):
    return dict(dict(ops.spec(OP).cases(device))[name])


def both(kwargs):
    return [ops.spec(OP).reference(**kwargs), ops.launcher(OP)(**kwargs)]


def test_agrees_with_prefill_over_the_gathered_rows(device):
    """Decode over records is prefill over their dequantised rows, both sets in one index list."""
    kwargs = case(FULL, device)
    gather = ops.spec("dequantize_and_gather_k_cache").reference
    parts, indices = [], []
    for prefix in ("swa", "extra"):
        cache, slots, lens = (kwargs[f"{prefix}_{name}"] for name in ("k_cache", "indices", "lens"))
        blocks, block_size = cache.shape[:2]
        rows = torch.zeros(1, blocks * block_size, 512, dtype=torch.bfloat16, device=device)
        table = torch.arange(blocks, dtype=torch.int32, device=device)[None]
        length = torch.tensor([blocks * block_size], dtype=torch.int32, device=device)
        gather(rows, cache, length, None, table, block_size, 0)
        inside = torch.arange(slots.shape[1], device=device) < lens[:, None]
        valid = inside & (slots >= 0) & (slots < blocks * block_size)
        indices.append(torch.where(valid, slots + sum(len(p) for p in parts), -1))
        parts.append(rows[0])
    joined = torch.cat(indices, dim=1).int()
    want = ops.spec("sparse_mla_prefill").reference(
        kwargs["q"],
        torch.cat(parts),
        joined,
        torch.full((5,), joined.shape[1], dtype=torch.int32, device=device),
        kwargs["attn_sink"],
        kwargs["softmax_scale"],
    )
    for out in both(kwargs):
        assert_agrees("out", out, want, ops.spec(OP).tolerance)
    assert torch.equal(ops.spec(OP).reference(**kwargs), want)


def test_this_launcher_is_much_closer_than_the_contract_asks(device):
    for name, kwargs in ops.spec(OP).cases(device):
        reference, launched = both(kwargs)
        assert_agrees(name, launched, reference, Tolerance(ulps=4.0, rms=2.0**-9))


def test_row_listed_in_both_sets_counts_twice(device):
    kwargs = case(FULL, device)
    for prefix in ("swa", "extra"):
        kwargs[f"{prefix}_k_cache"] = kwargs["extra_k_cache"]
        kwargs[f"{prefix}_indices"] = torch.full((5, 128), -1, dtype=torch.int32, device=device)
        kwargs[f"{prefix}_indices"][:, 77] = 9
        kwargs[f"{prefix}_lens"] = torch.full((5,), 78, dtype=torch.int32, device=device)
    kwargs["attn_sink"] = (kwargs["softmax_scale"] * kwargs["q"][0].float() @ read(kwargs["swa_k_cache"], 9)).clone()
    for out in both(kwargs):  # two entries of weight 1 and a sink of weight 1
        assert_agrees(
            "out", out[0], (read(kwargs["swa_k_cache"], 9) * 2 / 3).expand(16, -1).bfloat16(), Tolerance(2, 2**-7)
        )


def read(cache, slot):
    from deepinfer_sm80.ops.kv_cache.dequantize_and_gather_k_cache.reference import read_record

    return read_record(cache, slot).float()


@pytest.mark.parametrize("part", ["code", "scale", "rope"])
def test_nan_record_reaches_only_the_tokens_that_list_it(part, device):
    kwargs = case(FULL, device)
    cache = kwargs["swa_k_cache"] = clone_tensor(kwargs["swa_k_cache"])
    data, scales = record_views(cache)
    if part == "code":
        data[2, 5, 17] = 0xFF
    elif part == "scale":
        scales[2, 5, 6] = 255
    else:
        data[2, 5, 448:450] = 0xFF
    slot = 2 * 32 + 5
    kwargs["swa_indices"] = torch.where(kwargs["swa_indices"] == slot, 1, kwargs["swa_indices"])
    for out in both(kwargs):
        assert out.isfinite().all()
    kwargs["swa_indices"][4, 0] = slot
    kwargs["swa_lens"] = kwargs["swa_lens"].clamp(min=1)
    for out in both(kwargs):
        assert out[4].isnan().all()
        assert out[:4].isfinite().all()


def test_eighth_scale_byte_is_padding(device):
    kwargs = case(FULL, device)
    want = ops.launcher(OP)(**kwargs)
    for name in ("swa_k_cache", "extra_k_cache"):
        kwargs[name] = clone_tensor(kwargs[name])
        record_views(kwargs[name])[1][:, :, 7] = 255
    for out in both(kwargs):
        assert_agrees("out", out, want, ops.spec(OP).tolerance)


@pytest.mark.parametrize("sink", [-2.0, -math.inf])
def test_nothing_to_attend_to_is_zero(sink, device):
    kwargs = case(FULL, device)
    kwargs["attn_sink"] = torch.full((16,), sink, device=device)
    kwargs["swa_lens"] = torch.tensor([0, -1, 128, 0, 0], dtype=torch.int32, device=device)
    kwargs["swa_indices"] = torch.full_like(kwargs["swa_indices"], -1)
    kwargs["extra_indices"] = torch.full_like(kwargs["extra_indices"], 2**31 - 1)
    for out in both(kwargs):
        assert torch.equal(out, torch.zeros_like(out))


def test_empty_caches(device):
    kwargs = case(FULL, device)
    kwargs["extra_k_cache"] = kwargs["extra_k_cache"][:0]
    window_only = {k: v for k, v in kwargs.items() if not k.startswith("extra")}
    assert torch.equal(ops.launcher(OP)(**kwargs), ops.launcher(OP)(**window_only))
    window_only["swa_k_cache"] = window_only["swa_k_cache"][:0]
    for out in both(window_only):
        assert torch.equal(out, torch.zeros_like(out))


def test_strided_out_and_many_steps(device):
    kwargs = case(FULL, device)
    tokens = torch.arange(60, device=device) % 5
    for name in ("q", "swa_indices", "swa_lens", "extra_indices", "extra_lens"):
        kwargs[name] = kwargs[name][tokens]
    wide = torch.full((60, 64, 512), 7.0, dtype=torch.bfloat16, device=device)
    with NoHostSync():
        ops.launcher(OP)(**kwargs, out=wide[:, :16])
    assert (wide[:, 16:] == 7.0).all()
    for name in ("q", "swa_indices", "swa_lens", "extra_indices", "extra_lens"):
        kwargs[name] = kwargs[name][:5]
    want = ops.spec(OP).reference(**kwargs)
    for first in range(0, 60, 5):
        assert_agrees("out", wide[first : first + 5, :16], want, ops.spec(OP).tolerance)


def test_half_an_extra_set_is_refused(device):
    kwargs = case(FULL, device)
    del kwargs["extra_lens"]
    with pytest.raises(TensorContractError, match=r"extra_k_cache, extra_indices, extra_lens must be given together"):
        ops.launcher(OP)(**kwargs)


def test_another_record_width_is_refused(device):
    kwargs = case(FULL, device)
    kwargs["swa_k_cache"] = torch.zeros(6, 32, 528, dtype=torch.uint8, device=device)
    with pytest.raises(TensorContractError, match=r"swa_k_cache must be torch.uint8 of shape .*584\].* got .*528\]"):
        ops.launcher(OP)(**kwargs)
