"""Triton launcher of sparse_mla_decode. The maths is in reference.py beside this file."""

from __future__ import annotations

import math

import torch

from deepinfer_sm80.ops.attention.sparse_mla_decode.tuning import (
    MERGE,
    choose_splits,
    decode_variant,
    heads_per_tile,
)
from deepinfer_sm80.ops.checks import Shapes
from deepinfer_sm80.ops.kv_cache.layout import HEAD_DIM, RECORD_BYTES, num_slots
from deepinfer_sm80.ops.variants import run


def sparse_mla_decode(
    q: torch.Tensor,
    swa_k_cache: torch.Tensor,
    swa_indices: torch.Tensor,
    swa_lens: torch.Tensor,
    attn_sink: torch.Tensor,
    softmax_scale: float,
    extra_k_cache: torch.Tensor | None = None,
    extra_indices: torch.Tensor | None = None,
    extra_lens: torch.Tensor | None = None,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """``out``: bfloat16 [T, H, 512], dim 0 may be strided, overwritten whole and returned.

    Few tokens: each one's keys are split over several programs, whose float32 sums a second kernel merges. p is rounded
    to bfloat16 against the maximum so far of its share, in base 2 with softmax_scale * log2(e) as one float32 factor.
    Raises TensorContractError, beside wrong shapes and dtypes, for a tensor that is not aligned to 16 bytes, a page
    stride that is no multiple of 16 bytes, a stride(0) of ``q`` or ``out`` that is no multiple of 8 elements.
    """
    s = Shapes("sparse_mla_decode")
    s.check_view(q, "q", ("T", "H", HEAD_DIM), torch.bfloat16, dense=2)
    s.check(attn_sink, "attn_sink", ("H",), torch.float32)
    swa = _checked(s, "swa", swa_k_cache, swa_indices, swa_lens)
    if extra_k_cache is not None and extra_indices is not None and extra_lens is not None:
        extra = _checked(s, "extra", extra_k_cache, extra_indices, extra_lens)
    else:
        given = [x is not None for x in (extra_k_cache, extra_indices, extra_lens)]
        s.require(not any(given), "extra_k_cache, extra_indices, extra_lens", "given together or not at all", given)
        extra = ((swa_k_cache, swa_indices, swa_lens), (0, 1, 0, 0, 0))  # a set without columns is never read
    if out is None:
        out = torch.empty(q.shape, dtype=torch.bfloat16, device=q.device)
    else:
        s.check_view(out, "out", ("T", "H", HEAD_DIM), torch.bfloat16, dense=2)

    tokens, heads = s["T"], s["H"]
    if tokens * heads == 0:
        return out
    q_stride, out_stride = (_units(s, name, x, tokens, 8, "elements") for name, x in (("q", q), ("out", out)))
    splits = choose_splits(tokens, heads, (swa[1][3], extra[1][3]), _capability(q.device))
    partial = state = attn_sink  # with one share the kernel writes out itself: stand-ins
    if splits > 1:
        partial = torch.empty((tokens, splits, heads, HEAD_DIM), dtype=torch.float32, device=q.device)
        state = torch.empty((tokens, splits, 2, heads), dtype=torch.float32, device=q.device)
    block_m = heads_per_tile(heads)
    run(
        decode_variant(block_m, splits > 1),
        (tokens * -(-heads // block_m), splits),
        q,
        *swa[0],
        *extra[0],
        attn_sink,
        out,
        partial,
        state,
        heads,
        q_stride,
        out_stride,
        *swa[1],
        *extra[1],
        softmax_scale * math.log2(math.e),
        splits,
    )
    if splits > 1:
        run(MERGE, (tokens * heads,), partial, state, attn_sink, out, heads, out_stride, splits)
    return out


_Set = tuple[tuple[torch.Tensor, torch.Tensor, torch.Tensor], tuple[int, int, int, int, int]]


def _checked(s: Shapes, prefix: str, cache: torch.Tensor, slots: torch.Tensor, lens: torch.Tensor) -> _Set:
    """The set's pointers, and its numbers: page stride / 16, block size, rows, columns, row stride of the list."""
    s.check_pages(cache, f"{prefix}_k_cache", (f"{prefix}_blocks", f"{prefix}_block_size"), RECORD_BYTES)
    s.check_view(slots, f"{prefix}_indices", ("T", f"{prefix}_width"), torch.int32)
    s.check(lens, f"{prefix}_lens", ("T",), torch.int32)
    page = _units(s, f"{prefix}_k_cache", cache, cache.shape[0], 16, "bytes")
    rows = min(num_slots(cache), 2**31 - 1)  # a slot is an int32
    list_stride = slots.stride(0) if s["T"] > 1 else 0
    return (cache, slots, lens), (page, max(cache.shape[1], 1), rows, slots.shape[1], list_stride)


def _units(s: Shapes, name: str, t: torch.Tensor, length: int, unit: int, of: str) -> int:
    """stride(0) in units of ``unit``, which the kernel's wide accesses need; 0 where there is no second row."""
    stride = t.stride(0) if length > 1 else 0
    s.require(stride % unit == 0, name, f"strided along its first axis by a multiple of {unit} {of}", stride)
    return stride // unit


def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (8, 0)
