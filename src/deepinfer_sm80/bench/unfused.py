"""Textbook chains of PyTorch operations, fixed for each operator: contiguous inputs, no copy without need.

They are the ``unfused`` baseline. Every intermediate result goes through memory; indices are valid, as in the cases.
"""

from __future__ import annotations

from typing import Any

import torch

from deepinfer_sm80.ops.formats import e4m3, ue8m0
from deepinfer_sm80.ops.kv_cache.layout import NOPE_DIM, NUM_SCALES, QUANT_GROUP, record_views


def mhc_post(x: torch.Tensor, residual: torch.Tensor, post_mix: torch.Tensor, comb: torch.Tensor) -> torch.Tensor:
    mixed = torch.einsum("tij,tih->tjh", comb, residual.float())
    return (post_mix.unsqueeze(-1) * x.float().unsqueeze(1) + mixed).bfloat16()


def sparse_mla_prefill(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    lens: torch.Tensor,
    attn_sink: torch.Tensor,
    softmax_scale: float,
) -> torch.Tensor:
    """In stretches of 256 tokens: their gathered rows are 168 MB."""
    out = torch.empty_like(q)
    for first in range(0, q.shape[0], 256):
        part = slice(first, first + 256)
        rows = kv[indices[part].long()]
        out[part] = _attend(q[part], rows, lens[part], attn_sink, softmax_scale)
    return out


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
    """Both sets are full, so that one length is their sum."""
    rows, lens = _records(swa_k_cache, swa_indices), swa_lens
    if extra_k_cache is not None and extra_indices is not None and extra_lens is not None:
        rows = torch.cat((rows, _records(extra_k_cache, extra_indices)), 1)
        lens = lens + extra_lens
    return _attend(q, rows, lens, attn_sink, softmax_scale)


def dequantize_and_gather_k_cache(
    out: torch.Tensor,
    k_cache: torch.Tensor,
    seq_lens: torch.Tensor,
    gather_lens: torch.Tensor | None,
    block_table: torch.Tensor,
    block_size: int,
    offset: int,
) -> None:
    """Requests fill ``out`` from ``offset`` on, as in the cases."""
    del seq_lens, gather_lens
    position = torch.arange(out.shape[1] - offset, device=out.device)
    slots = block_table[:, position // block_size].long() * block_size + position % block_size
    out[:, offset:] = _records(k_cache, slots)


def indexer_topk(logits: torch.Tensor, row_lens: torch.Tensor, topk: int) -> torch.Tensor:
    """Between equal logits torch may choose another column: then there is no row."""
    column = torch.arange(logits.shape[1], device=logits.device)
    scores = logits.masked_fill(column >= row_lens[:, None], float("-inf"))
    return scores.topk(topk, dim=-1).indices.sort(dim=-1).values.int()


def _attend(
    q: torch.Tensor, rows: torch.Tensor, lens: torch.Tensor, attn_sink: torch.Tensor, softmax_scale: float
) -> torch.Tensor:
    """q bfloat16 [T, H, 512], rows bfloat16 [T, K, 512], lens [T] -> bfloat16 [T, H, 512]."""
    scores = softmax_scale * _float32_product(q, rows.transpose(1, 2))
    outside = torch.arange(rows.shape[1], device=q.device) >= lens[:, None]
    scores = scores.masked_fill(outside[:, None], float("-inf"))
    sink = attn_sink[None, :, None].expand(q.shape[0], -1, 1)
    weights = torch.cat((scores, sink), -1).softmax(-1)[..., :-1]
    return torch.bmm(weights.bfloat16(), rows)


def _float32_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """bfloat16 factors, float32 result: scores rounded to bfloat16 would not pass the gate."""
    if a.is_cuda:
        return torch.bmm(a, b, out_dtype=torch.float32)
    return torch.bmm(a.float(), b.float())


def _records(cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Rows ``slots`` [R, N] as bfloat16 [R, N, 512]."""
    data, scales = record_views(cache)
    block, row = slots.long() // cache.shape[1], slots.long() % cache.shape[1]
    record = data[block, row]
    factors = ue8m0.decode(scales[block, row][..., :NUM_SCALES]).repeat_interleave(QUANT_GROUP, -1)
    nope = (e4m3.decode(record[..., :NOPE_DIM]) * factors).bfloat16()
    return torch.cat((nope, record[..., NOPE_DIM:].contiguous().view(torch.bfloat16)), -1)


CHAINS: dict[str, Any] = {
    "mhc_post": mhc_post,
    "sparse_mla_prefill": sparse_mla_prefill,
    "sparse_mla_decode": sparse_mla_decode,
    "dequantize_and_gather_k_cache": dequantize_and_gather_k_cache,
    "indexer_topk": indexer_topk,
}
