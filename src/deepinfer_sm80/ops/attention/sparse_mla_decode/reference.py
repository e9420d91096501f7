"""Sparse attention of decode tokens over paged 584-byte records: the sliding window and the selected compressed rows.

    rows = the valid rows of both sets, dequantised to bfloat16 (window first)
    s[h, n] = softmax_scale * q[t, h] . rows[n]
    M[h] = max(max_n s[h, n], attn_sink[h]),    p[h, n] = exp(s[h, n] - M[h])
    out[t, h] = sum_n bf16(p[h, n]) * rows[n] / (sum_n p[h, n] + exp(attn_sink[h] - M[h]))

One softmax over the union; a token that is in both sets counts twice; the key (all 512 dims) is the value.

q bfloat16 [T, H, 512], dim 0 may be strided; swa_k_cache and extra_k_cache uint8 [blocks, block_size, 584], each with
its own block size and page stride; swa_indices int32 [T, Ws] and extra_indices int32 [T, We] are slots, row strides
arbitrary; swa_lens and extra_lens int32 [T]; attn_sink float32 [H], -inf for no sink. The extra set is absent (all
three None) in window-only layers. Entry j of a set is valid if j < lens[t] and 0 <= slot < blocks * block_size; -1 may
stand anywhere. Without a valid row the output is 0. The output of a head whose sink is +inf or NaN is undefined.

Rounding as in sparse_mla_prefill, and the dequantised row to bfloat16 (as in dequantize_and_gather_k_cache). A NaN in a
valid row (NaN code, NaN scale byte, NaN rope value) gives NaN; rows that are not valid may hold anything.
Source: vLLM 0.33.0, sparse decode of DeepSeek-V4.1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from deepinfer_sm80.ops.attention.sparse_mla_prefill.reference import (
    TOLERANCE,
    attend_token,
    random_indices,
    valid_rows,
)
from deepinfer_sm80.ops.contract import Cost, OpSpec
from deepinfer_sm80.ops.kv_cache.dequantize_and_gather_k_cache.reference import random_cache, read_record
from deepinfer_sm80.ops.kv_cache.layout import HEAD_DIM, NOPE_DIM, RECORD_BYTES, num_slots, record_offsets

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any


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
) -> torch.Tensor:
    out = torch.zeros(q.shape, dtype=torch.bfloat16, device=q.device)
    for t in range(len(q)):
        rows = read_valid(swa_k_cache, swa_indices[t], swa_lens[t])
        if extra_k_cache is not None and extra_indices is not None and extra_lens is not None:
            rows += read_valid(extra_k_cache, extra_indices[t], extra_lens[t])
        if rows:
            out[t] = attend_token(q[t], torch.stack(rows), attn_sink, softmax_scale)
    return out


def read_valid(cache: torch.Tensor, slots: torch.Tensor, length: torch.Tensor) -> list[torch.Tensor]:
    return [read_record(cache, slot) for slot in valid_rows(slots, length, num_slots(cache)).tolist()]


def cases(device: str) -> Iterator[tuple[str, dict[str, Any]]]:
    # We < 0: window-only. Block sizes 32 (window) and 128 or 64 (compressed, ratio 1 or 2)
    shapes = (
        (0, 64, 128, 512, 64),
        (1, 64, 128, 512, 128),
        (5, 16, 128, 512, 64),
        (4, 5, 128, -1, 64),
        (3, 8, 134, 70, 64),
    )
    for T, H, Ws, We, block_size in shapes:
        g = torch.Generator(device).manual_seed(T * 53 + H)

        def randn(*shape: int, g: torch.Generator = g) -> torch.Tensor:
            return torch.randn(shape, generator=g, device=device)

        sink = randn(H)
        sink[-1:] = -torch.inf  # a padding head
        swa = random_cache(g, device, 6, 32, 320)
        indices, lens = random_indices(g, device, T, Ws, num_slots(swa))
        _spoil(swa, num_slots(swa) - 1)
        kwargs = {
            "q": (randn(T, H + 3, HEAD_DIM)[:, :H] * 2).bfloat16() if T != 5 else randn(T, H, HEAD_DIM).bfloat16(),
            "swa_k_cache": swa,
            "swa_indices": indices,
            "swa_lens": lens,
            "attn_sink": sink,
            "softmax_scale": HEAD_DIM**-0.5,
        }
        if We >= 0:
            extra = random_cache(g, device, 3, block_size, 128)
            indices, lens = random_indices(g, device, T, We, num_slots(extra))
            kwargs |= {"extra_k_cache": extra, "extra_indices": indices, "extra_lens": lens}
        yield f"T{T}-H{H}-W{Ws}-E{max(We, 0)}-page{block_size}", kwargs


def _spoil(cache: torch.Tensor, slot: int) -> None:
    """Fill one record's codes with NaN: stale, never listed."""
    data, _ = record_offsets(cache, slot)
    cache.as_strided((NOPE_DIM,), (1,), cache.storage_offset() + data).fill_(0x7F)


def cost(
    q: torch.Tensor,
    swa_k_cache: torch.Tensor,
    swa_indices: torch.Tensor,
    swa_lens: torch.Tensor,
    attn_sink: torch.Tensor,
    softmax_scale: float,
    extra_k_cache: torch.Tensor | None = None,
    extra_indices: torch.Tensor | None = None,
    extra_lens: torch.Tensor | None = None,
) -> Cost:
    T, H = q.shape[:2]
    listed = int(swa_lens.clamp(0, swa_indices.shape[1]).sum())
    rows = min(listed, num_slots(swa_k_cache))
    if extra_k_cache is not None and extra_indices is not None and extra_lens is not None:
        more = int(extra_lens.clamp(0, extra_indices.shape[1]).sum())
        listed, rows = listed + more, rows + min(more, num_slots(extra_k_cache))
    moved = 4 * T * H * HEAD_DIM + rows * RECORD_BYTES + 4 * listed + attn_sink.nbytes
    return Cost(bytes=moved, flops=4 * listed * H * HEAD_DIM)


SPEC = OpSpec(sparse_mla_decode, cases, TOLERANCE, cost)  # reading a record is exact: only the softmax is inexact
