"""What the shared contract cannot say about sparse_mla_decode."""

import math
import re

import pytest
import torch
import triton
import triton.language as tl

from deepinfer_sm80 import ops
from deepinfer_sm80.errors import TensorContractError
from deepinfer_sm80.ops.attention.sparse_mla_decode import device as device_code
from deepinfer_sm80.ops.attention.sparse_mla_decode import kernel, tuning
from deepinfer_sm80.ops.contract import Tolerance
from deepinfer_sm80.ops.formats import e4m3, ue8m0
from deepinfer_sm80.ops.kv_cache.layout import record_views
from deepinfer_sm80.testing.cloning import clone_arguments, clone_tensor, storage_bytes
from deepinfer_sm80.testing.compare import assert_agrees
from deepinfer_sm80.testing.graphs import NoHostSync
from deepinfer_sm80.testing.poison import poisoned_empty

OP = "sparse_mla_decode"
FULL = "T5-H16-W128-E512-page64"


def case(name, device):
    return dict(dict(ops.spec(OP).cases(device))[name])


def both(kwargs):
    return [ops.spec(OP).reference(**kwargs), ops.pytorch(OP)(**kwargs)]


def narrow_case(device):
    """FULL with shorter index lists: one tile of keys from each set, for the interpreter's sake."""
    kwargs = case(FULL, device)
    for prefix in ("swa", "extra"):
        kwargs[f"{prefix}_indices"] = kwargs[f"{prefix}_indices"][:, :30].clone()
    return kwargs


def one_token(kwargs):
    per_token = ("q", "swa_indices", "swa_lens", "extra_indices", "extra_lens")
    return {k: v[:1] if k in per_token else v for k, v in kwargs.items()}


def every(kwargs):
    return [*both(kwargs), kernel.sparse_mla_decode(**kwargs)]


def test_agrees_with_prefill_over_the_gathered_rows(device):
    """Decode over records is prefill over their dequantised rows, both sets in one index list."""
    kwargs = narrow_case(device)
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
    for out in every(kwargs):
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
        kwargs[f"{prefix}_indices"] = torch.full((5, 64), -1, dtype=torch.int32, device=device)
        kwargs[f"{prefix}_indices"][:, 47] = 9
        kwargs[f"{prefix}_lens"] = torch.full((5,), 48, dtype=torch.int32, device=device)
    kwargs["attn_sink"] = (kwargs["softmax_scale"] * kwargs["q"][0].float() @ read(kwargs["swa_k_cache"], 9)).clone()
    for out in every(kwargs):  # two entries of weight 1 and a sink of weight 1
        assert_agrees(
            "out", out[0], (read(kwargs["swa_k_cache"], 9) * 2 / 3).expand(16, -1).bfloat16(), Tolerance(2, 2**-7)
        )


def read(cache, slot):
    from deepinfer_sm80.ops.kv_cache.dequantize_and_gather_k_cache.reference import read_record

    return read_record(cache, slot).float()


@pytest.mark.parametrize("part", ["code", "scale", "rope"])
def test_nan_record_reaches_only_the_tokens_that_list_it(part, device):
    kwargs = narrow_case(device)
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
    for out in every(kwargs):
        assert out.isfinite().all()
    kwargs["swa_indices"][4, 0] = slot
    kwargs["swa_lens"] = kwargs["swa_lens"].clamp(min=1)
    for out in every(kwargs):
        assert out[4].isnan().all()
        assert out[:4].isfinite().all()


def test_eighth_scale_byte_is_padding(device):
    kwargs = narrow_case(device)
    want = ops.pytorch(OP)(**kwargs)
    for name in ("swa_k_cache", "extra_k_cache"):
        kwargs[name] = clone_tensor(kwargs[name])
        record_views(kwargs[name])[1][:, :, 7] = 255
    for out in every(kwargs):
        assert_agrees("out", out, want, ops.spec(OP).tolerance)


@pytest.mark.parametrize("sink", [-2.0, -math.inf])
def test_nothing_to_attend_to_is_zero(sink, device):
    kwargs = narrow_case(device)
    kwargs["attn_sink"] = torch.full((16,), sink, device=device)
    kwargs["swa_lens"] = torch.tensor([0, -1, 30, 0, 0], dtype=torch.int32, device=device)
    kwargs["swa_indices"] = torch.full_like(kwargs["swa_indices"], -1)
    kwargs["extra_indices"] = torch.full_like(kwargs["extra_indices"], 2**31 - 1)
    for out in every(kwargs):
        assert torch.equal(out, torch.zeros_like(out))


def test_empty_caches(device):
    kwargs = case(FULL, device)
    kwargs["extra_k_cache"] = kwargs["extra_k_cache"][:0]
    window_only = {k: v for k, v in kwargs.items() if not k.startswith("extra")}
    assert torch.equal(ops.pytorch(OP)(**kwargs), ops.pytorch(OP)(**window_only))
    window_only["swa_k_cache"] = window_only["swa_k_cache"][:0]
    for out in every(window_only):
        assert torch.equal(out, torch.zeros_like(out))


def test_strided_out_and_many_steps(device):
    kwargs = case(FULL, device)
    tokens = torch.arange(60, device=device) % 5
    for name in ("q", "swa_indices", "swa_lens", "extra_indices", "extra_lens"):
        kwargs[name] = kwargs[name][tokens]
    wide = torch.full((60, 64, 512), 7.0, dtype=torch.bfloat16, device=device)
    with NoHostSync():
        ops.pytorch(OP)(**kwargs, out=wide[:, :16])
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
        ops.pytorch(OP)(**kwargs)


def test_another_record_width_is_refused(device):
    kwargs = case(FULL, device)
    kwargs["swa_k_cache"] = torch.zeros(6, 32, 528, dtype=torch.uint8, device=device)
    with pytest.raises(TensorContractError, match=r"swa_k_cache must be torch.uint8 of shape .*584\].* got .*528\]"):
        ops.pytorch(OP)(**kwargs)


# The Triton kernel. In the interpreter, too, it rounds to bfloat16 as a GPU does: the contract's own tolerance holds.


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name == FULL else ())  # 100 tiles, some seconds in the interpreter
        for name, _ in ops.spec(OP).cases("cpu")
    ],
)
def test_kernel_agrees_with_the_reference(name, device):
    kwargs = case(name, device)
    for_kernel = clone_arguments(kwargs)
    with poisoned_empty():
        got = kernel.sparse_mla_decode(**for_kernel)
    assert_agrees(name, got, ops.spec(OP).reference(**kwargs), ops.spec(OP).tolerance)
    for argument, value in kwargs.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(storage_bytes(kwargs, argument), storage_bytes(for_kernel, argument)), argument


@pytest.mark.parametrize("splits", [1, 2, 3, 16])
def test_kernel_gives_one_softmax_however_keys_are_split(splits, monkeypatch, device):
    kwargs = case("T3-H8-W134-E70-page64", device)  # 5 + 3 tiles: 16 splits leave some without any
    kwargs["swa_lens"][0] = 134
    want = ops.spec(OP).reference(**kwargs)
    monkeypatch.setattr(kernel, "choose_splits", lambda *shapes: splits)
    wide = torch.full((3, 9, 512), 7.0, dtype=torch.bfloat16, device=device)
    with poisoned_empty():
        kernel.sparse_mla_decode(**kwargs, out=wide[:, :8])
    assert_agrees("out", wide[:, :8], want, ops.spec(OP).tolerance)
    assert (wide[:, 8:] == 7.0).all()


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("sink", [-2.0, -math.inf])
def test_kernel_leaves_zero_where_nothing_is_valid(splits, sink, monkeypatch, device):
    kwargs = case("T3-H8-W134-E70-page64", device)
    monkeypatch.setattr(kernel, "choose_splits", lambda *shapes: splits)
    kwargs["attn_sink"] = torch.full((8,), sink, device=device)
    kwargs["swa_indices"] = torch.full_like(kwargs["swa_indices"], -1)
    kwargs["extra_lens"] = torch.tensor([0, -5, 0], dtype=torch.int32, device=device)
    with poisoned_empty():
        out = kernel.sparse_mla_decode(**kwargs)
    assert torch.equal(out, torch.zeros_like(out))


def test_kernel_takes_lists_and_lengths_that_begin_anywhere(device):
    """A batch's decode rows are slices: their int32 lists and lengths start at any element."""
    kwargs = narrow_case(device)
    for name in ("q", "swa_indices", "swa_lens", "extra_indices", "extra_lens"):
        kwargs[name] = kwargs[name][1:]
    assert all(kwargs[name].data_ptr() % 16 for name in ("swa_indices", "swa_lens", "extra_indices", "extra_lens"))
    assert_agrees("out", kernel.sparse_mla_decode(**kwargs), ops.spec(OP).reference(**kwargs), ops.spec(OP).tolerance)


def test_kernel_masks_the_last_block_of_heads(device):
    kwargs = one_token(case("T3-H8-W134-E70-page64", device))
    kwargs |= {"q": kwargs["q"].repeat(1, 5, 1)[:, :39].contiguous(), "attn_sink": torch.zeros(39, device=device)}
    assert_agrees("out", kernel.sparse_mla_decode(**kwargs), ops.spec(OP).reference(**kwargs), ops.spec(OP).tolerance)


def test_kernel_reads_pages_more_than_2_to_31_bytes_apart(device):
    kwargs = one_token(case("T3-H8-W134-E70-page64", device))
    window = {k: v for k, v in kwargs.items() if not k.startswith("extra")}
    near = window["swa_k_cache"][:2]
    # virtual memory: only the two pages are ever touched
    stride = 2**31 + 16 * 1187
    far = torch.empty(stride + 32 * 584, dtype=torch.uint8, device=device).as_strided((2, 32, 584), (stride, 584, 1))
    far.copy_(near)
    window["swa_k_cache"] = near
    want = kernel.sparse_mla_decode(**window)
    window["swa_k_cache"] = far
    assert torch.equal(kernel.sparse_mla_decode(**window), want)
    assert want[0].count_nonzero() > 0


def test_kernel_launches_depend_on_shapes_alone(monkeypatch, device):
    kwargs, calls = case(FULL, device), []
    monkeypatch.setattr(kernel, "run", lambda variant, grid, *rest: calls.append((variant.key, grid)))
    with NoHostSync():
        kernel.sparse_mla_decode(**kwargs)
    assert calls == [(f"{OP}/M16-split", (5, 10)), (f"{OP}/merge", (80,))]


def test_splits_fill_the_gpu_and_no_more():
    capability, widths = (8, 0), (128, 512)
    assert tuning.choose_splits(1, 64, widths, capability) == 10  # 20 tiles of 32 keys, two a split
    assert tuning.choose_splits(24, 64, widths, capability) == 4  # 48 programs on 216 places
    assert tuning.choose_splits(109, 64, widths, capability) == 1
    assert tuning.choose_splits(1, 64, (0, 0), capability) == 1
    for tokens in range(1, 130):
        for heads in (5, 8, 16, 32, 64):
            for other in ((8, 0), (8, 6), (9, 9)):
                splits = tuning.choose_splits(tokens, heads, widths, other)
                programs = tokens * -(-heads // tuning.heads_per_tile(heads))
                assert 1 <= splits <= 16
                assert splits == 1 or programs * splits <= 216
    chosen = {v.key for v in tuning.variants()}
    assert {tuning.decode_variant(tuning.heads_per_tile(h), s).key for h in (5, 64) for s in (True, False)} <= chosen


def test_kernel_refuses_pages_it_cannot_read_in_16_bytes(device):
    kwargs = case(FULL, device)
    cache = kwargs["swa_k_cache"]
    kwargs["swa_k_cache"] = cache.as_strided(cache.shape, (cache.stride(0) - 8, 584, 1))
    with pytest.raises(TensorContractError, match=r"swa_k_cache must be strided .* by a multiple of 16 bytes, got"):
        kernel.sparse_mla_decode(**kwargs)


@triton.jit
def decode_table(codes_ptr, scales_ptr, out_ptr):
    row, d = tl.arange(0, 64), tl.arange(0, 64)
    codes = tl.load(codes_ptr + row[:, None] * 64 + d[None, :])
    scale = tl.load(scales_ptr + tl.program_id(0)).to(tl.int32)
    value = device_code.dequantise(codes, tl.broadcast_to(scale, codes.shape))
    tl.store(out_ptr + tl.program_id(0) * 4096 + row[:, None] * 64 + d[None, :], value)


def words_of_four():
    """uint8 [64, 64]: each code once at every place among four, its neighbours no NaNs, then groups with one NaN."""
    codes = torch.arange(256, dtype=torch.uint8).repeat_interleave(4).view(256, 4)
    other = (
        torch.tensor([0x00, 0x80, 0x3B, 0x7E, 0xFE, 0x01], dtype=torch.uint8).repeat(1024)[: 1024 * 4].view(4, 256, 4)
    )
    return torch.cat([torch.where(torch.arange(4) == i, codes, other[i]) for i in range(4)]).view(64, 64)


def assert_decoded(got, codes, scales):
    """bfloat16 values of ``codes`` by four, at each scale; a NaN code may take its three neighbours with it."""
    got, fours = got.view(len(scales), -1, 4).cpu(), codes.view(-1, 4).cpu()
    want = (e4m3.decode(fours) * ue8m0.decode(scales.cpu())[:, None, None]).bfloat16()
    nan = (fours & 0x7F) == 0x7F
    assert got[:, nan].isnan().all()
    clean = ~nan.any(-1)
    assert_agrees("values", got[:, clean], want[:, clean], Tolerance(1e-9, 1e-9))  # NaN (scale 255) of any payload
    assert torch.equal(got[:255, clean].view(torch.int16), want[:255, clean].view(torch.int16))  # the sign of zero, too


def test_every_code_at_every_scale(device):
    """On a GPU this is the packed assembly, in the interpreter its plain twin."""
    codes, scales = words_of_four().to(device), torch.arange(256, dtype=torch.uint8, device=device)
    out = torch.empty(256, 4096, dtype=torch.bfloat16, device=device)
    decode_table[(256,)](codes, scales, out)
    assert_decoded(out, codes, scales)


def test_packed_assembly_step_by_step():
    """The assembly's instructions, carried out here one by one on every code at every scale, without a GPU."""
    codes, scales = words_of_four(), torch.arange(256, dtype=torch.uint8)
    word = codes.view(torch.int32).long().view(1, -1) & 0xFFFFFFFF
    bits = torch.where(scales == 0, 0x0040, torch.where(scales == 255, 0x7FC0, scales.long() << 7))
    factor = (bits | bits << 16)[:, None].expand(256, word.shape[1])
    registers = {"$2": word.expand_as(factor), "$3": factor, "$4": factor}
    for line in device_code.DECODE_FOUR.value.split(";"):
        step = re.search(r"(\w+)\.[\w.]+ ([^;.]+)$", line.strip())
        if step is None or ".reg" in line:
            continue
        to, *operands = (x.strip() for x in step[2].split(","))
        values = [registers[x] if x in registers else torch.tensor(int(x, 0)) for x in operands]
        registers[to] = PTX[step[1]](*values)
    halves = torch.stack(
        [registers["$0"] & 0xFFFF, registers["$0"] >> 16, registers["$1"] & 0xFFFF, registers["$1"] >> 16]
    )
    assert_decoded(halves.permute(1, 2, 0).contiguous().to(torch.int16).view(torch.bfloat16), codes, scales)


def permute_bytes(a, b, selector):
    both = [(x >> 8 * i) & 0xFF for x in (a, b) for i in range(4)]
    return sum(both[(int(selector) >> 4 * i) & 7] << 8 * i for i in range(4))


def fused_bf16x2(a, b, c):
    def half(x, shift):
        return ((x >> shift) & 0xFFFF).to(torch.int16).view(torch.bfloat16).float()

    # a product of two bfloat16 values is exact in float32 here, and so is adding -0.0
    low, high = ((half(a, s) * half(b, s) + half(c, s)).bfloat16().view(torch.int16).long() & 0xFFFF for s in (0, 16))
    return low | high << 16


PTX = {
    "and": lambda a, b: a & b,
    "add": lambda a, b: (a + b) & 0xFFFFFFFF,
    "shr": lambda a, b: a >> b,
    "mov": lambda a: a,
    "setp": lambda a, b: a != b,
    "selp": lambda a, b, p: torch.where(p, a, b),
    "prmt": permute_bytes,
    "lop3": lambda a, b, c, table: a & b | c,  # 0xEA
    "fma": fused_bf16x2,
}
