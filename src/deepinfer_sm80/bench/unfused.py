"""Textbook chains of PyTorch operations, fixed for each operator: contiguous inputs, no copy without need.

They are the ``unfused`` baseline. Every intermediate result goes through memory; indices are valid, as in the cases.
"""

from __future__ import annotations

from typing import Any

import torch

from deepinfer_sm80.bench.unfused_indices import (
    combine_topk_swa_indices,
    global_topk_indices,
    indexer_topk,
    select_candidate_blocks,
    stable_expert_order,
)
from deepinfer_sm80.ops.formats import e4m3, ue8m0
from deepinfer_sm80.ops.kv_cache.layout import (
    AMAX_FLOOR,
    NOPE_DIM,
    NUM_SCALES,
    QUANT_GROUP,
    ROPE_DIM,
    index_key_views,
    record_views,
)


def engram_lookup(
    weight: torch.Tensor,
    scale: torch.Tensor,
    ids: torch.Tensor,
    head_start: int,
    local_heads: int,
    vocab_start: int,
    vocab_end: int,
) -> torch.Tensor:
    del vocab_end
    rows = ids[:, head_start : head_start + local_heads] - vocab_start
    factors = ue8m0.decode(scale[rows]).repeat_interleave(weight.shape[1] // scale.shape[1], -1)
    return (e4m3.decode(weight[rows]) * factors).bfloat16()


def mhc_post(x: torch.Tensor, residual: torch.Tensor, post_mix: torch.Tensor, comb: torch.Tensor) -> torch.Tensor:
    mixed = torch.einsum("tij,tih->tjh", comb, residual.float())
    return (post_mix.unsqueeze(-1) * x.float().unsqueeze(1) + mixed).bfloat16()


def mhc_fused_post_pre_delayed(
    x: torch.Tensor,
    residual: torch.Tensor,
    post_mix: torch.Tensor,
    comb: torch.Tensor,
    fn: torch.Tensor,
    scale: torch.Tensor,
    base: torch.Tensor,
    pre_mix: torch.Tensor,
    norm_weight: torch.Tensor,
    rms_eps: float,
    hc_eps: float,
    norm_eps: float,
    sinkhorn_iters: int,
) -> tuple[torch.Tensor, ...]:
    streams = mhc_post(x, residual, post_mix, comb)
    flat = streams.flatten(1).float()
    mixes = torch.nn.functional.linear(flat, fn) * torch.rsqrt(flat.square().mean(-1, keepdim=True) + rms_eps)
    pre, post, mixed = mixes.split((4, 4, 16), -1)
    pre, post = pre * scale[0] + base[:4], post * scale[1] + base[4:8]
    mixed = (mixed * scale[2] + base[8:]).unflatten(1, (4, 4)).softmax(-1) + hc_eps
    mixed = mixed / (mixed.sum(-2, keepdim=True) + hc_eps)
    for _ in range(sinkhorn_iters - 1):
        mixed = mixed / (mixed.sum(-1, keepdim=True) + hc_eps)
        mixed = mixed / (mixed.sum(-2, keepdim=True) + hc_eps)
    u = torch.einsum("ts,tsh->th", pre_mix, streams.float()).bfloat16().float()
    normed = u * torch.rsqrt(u.square().mean(-1, keepdim=True) + norm_eps) * norm_weight.float()
    return streams, 2 * post.sigmoid(), mixed, normed.bfloat16(), pre.sigmoid() + hc_eps


def rope_quant_insert(
    latent: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    compress_ratio: int,
) -> None:
    """Every token has a slot and closes its group: a mask would make a shape depend on data."""
    rope = _rotate(latent[:, NOPE_DIM:].float(), positions, cos_sin_cache, compress_ratio).bfloat16()
    codes, scales = _quantise(latent[:, :NOPE_DIM].float().view(-1, NUM_SCALES, QUANT_GROUP))
    data, tail = record_views(kv_cache)
    block, row = slot_mapping // kv_cache.shape[1], slot_mapping % kv_cache.shape[1]
    data[block, row] = torch.cat((codes.view(-1, NOPE_DIM), rope.view(torch.uint8)), -1)
    tail[block, row] = torch.nn.functional.pad(scales, (0, 1))


def indexer_q_rope_quant(
    positions: torch.Tensor,
    q: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    weights: torch.Tensor,
    softmax_scale: float,
    head_scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    x = q.float()
    rope = _rotate(x[..., ROPE_DIM:], positions[:, None], cos_sin_cache, 1)
    codes, scales = _quantise(torch.cat((x[..., :ROPE_DIM], rope), -1).bfloat16().float())
    return codes, weights.float() * ue8m0.decode(scales) * softmax_scale * head_scale


def indexer_k_norm_rope_store(
    k_pre: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    compress_ratio: int,
) -> None:
    """Every token has a slot; one that does not close its group writes there what it finds."""
    x = k_pre.float()
    k = (x * (1.0 / torch.sqrt(x.square().mean(-1, keepdim=True) + eps)) * norm_weight.float()).bfloat16().float()
    rope = _rotate(k[:, ROPE_DIM:], positions, cos_sin_cache, compress_ratio)
    codes, scales = _quantise(torch.cat((k[:, :ROPE_DIM], rope), -1).bfloat16().float())
    data, tail = index_key_views(kv_cache)
    block, row = slot_mapping // kv_cache.shape[1], slot_mapping % kv_cache.shape[1]
    closes = ((positions + 1) % compress_ratio == 0)[:, None]
    data[block, row] = torch.where(closes, codes, data[block, row])
    tail[block, row] = torch.where(closes, ue8m0.decode(scales)[:, None].view(torch.uint8), tail[block, row])


def indexer_logits_prefill(
    q_codes: torch.Tensor,
    weights: torch.Tensor,
    k_codes: torch.Tensor,
    k_scale: torch.Tensor,
    row_start: torch.Tensor,
    row_end: torch.Tensor,
    max_k: int,
) -> torch.Tensor:
    """Every row begins at key 0. In stretches of 64 queries: their scores are 134 MB at 16,384 keys."""
    del row_start
    keys = e4m3.decode(k_codes[:max_k]).bfloat16()
    out = torch.empty((q_codes.shape[0], max_k), device=q_codes.device)
    column = torch.arange(max_k, device=q_codes.device)
    for first in range(0, q_codes.shape[0], 64):
        part = slice(first, first + 64)
        q = e4m3.decode(q_codes[part]).bfloat16()
        scores = _float32_product(q, keys.t().expand(q.shape[0], -1, -1))
        logits = (scores.relu() * weights[part, :, None]).sum(1) * k_scale[:max_k]
        out[part] = logits.masked_fill(column >= row_end[part, None], float("-inf"))
    return out


def indexer_logits_paged(
    q_codes: torch.Tensor,
    weights: torch.Tensor,
    kv_cache: torch.Tensor,
    context_lens: torch.Tensor,
    block_table: torch.Tensor,
    max_context_len: int,
) -> torch.Tensor:
    data, tail = index_key_views(kv_cache)
    pages = block_table.long()
    keys = e4m3.decode(data[pages].flatten(1, 2)[:, :max_context_len]).bfloat16()
    scale = tail[pages].view(torch.float32).flatten(1)[:, :max_context_len]
    scores = _float32_product(e4m3.decode(q_codes).bfloat16(), keys.transpose(1, 2))
    logits = (scores.relu() * weights[:, :, None]).sum(1) * scale
    column = torch.arange(max_context_len, device=q_codes.device)
    return logits.masked_fill(column >= context_lens[:, None], float("-inf"))


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


def inverse_rope_grouped(
    o: torch.Tensor, positions: torch.Tensor, cos_sin_cache: torch.Tensor, num_groups: int
) -> torch.Tensor:
    half = ROPE_DIM // 2
    back = torch.cat((cos_sin_cache[:, :half], -cos_sin_cache[:, half:]), -1)
    rope = _rotate(o[..., NOPE_DIM:].float(), positions[:, None], back, 1).bfloat16()
    return torch.cat((o[..., :NOPE_DIM], rope), -1).view(o.shape[0], num_groups, -1)


def grouped_output_projection(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """One product for each group."""
    return torch.stack([x[:, g] @ weight[g].t() for g in range(weight.shape[0])], 1)


def _rotate(x: torch.Tensor, positions: torch.Tensor, cos_sin_cache: torch.Tensor, ratio: int) -> torch.Tensor:
    """float32 [..., 64] at positions that broadcast to its leading dims."""
    row = cos_sin_cache[positions.long() // ratio * ratio]
    cos, sin = row[..., : ROPE_DIM // 2], row[..., ROPE_DIM // 2 :]
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1).flatten(-2)


def _quantise(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 [..., D] -> E4M3 codes of the same shape and UE8M0 bytes [...], one scale for each last axis."""
    amax = x.abs().amax(-1).clamp_min(AMAX_FLOOR)
    scales = ue8m0.encode_amax(amax, e4m3.LARGEST)
    return e4m3.encode(x / ue8m0.decode(scales)[..., None]), scales


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
    chain.__name__: chain
    for chain in (
        engram_lookup,
        mhc_post,
        mhc_fused_post_pre_delayed,
        rope_quant_insert,
        dequantize_and_gather_k_cache,
        indexer_k_norm_rope_store,
        indexer_q_rope_quant,
        indexer_logits_prefill,
        indexer_logits_paged,
        select_candidate_blocks,
        indexer_topk,
        global_topk_indices,
        combine_topk_swa_indices,
        sparse_mla_decode,
        sparse_mla_prefill,
        inverse_rope_grouped,
        grouped_output_projection,
        stable_expert_order,
    )
}
