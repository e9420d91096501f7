"""Launcher of indexer_k_norm_rope_store. The maths is in reference.py beside this file."""

from __future__ import annotations

import torch

from deepinfer_sm80.ops.checks import Shapes
from deepinfer_sm80.ops.indexer.vectors import quantise, rotate
from deepinfer_sm80.ops.kv_cache.layout import INDEX_RECORD_BYTES, index_key_views, num_slots

_DIM, _ROPE = 128, 64

# Rows at once: a float32 temporary is 16384 * 128 * 4 = 8 MB and about ten are alive.
_ROWS_AT_ONCE = 1 << 14


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
    s = Shapes("indexer_k_norm_rope_store")
    s.check_view(k_pre, "k_pre", ("T", _DIM), torch.bfloat16)
    s.check_view(positions, "positions", ("T",), torch.int64, torch.int32, dense=0)
    s.check(cos_sin_cache, "cos_sin_cache", ("P", _ROPE), torch.float32)
    s.check(norm_weight, "norm_weight", (_DIM,), torch.bfloat16)
    s.check_pages(kv_cache, "kv_cache", ("blocks", "block_size"), INDEX_RECORD_BYTES)
    s.check_view(slot_mapping, "slot_mapping", ("S",), torch.int64, torch.int32, dense=0)
    rows = s["S"]
    s.require(rows <= s["T"], "slot_mapping", f"of at most T={s['T']} rows", f"{rows} rows")
    s.require(compress_ratio >= 1, "compress_ratio", "1 or larger", compress_ratio)
    s.require(rows == 0 or s["P"] > 0, "cos_sin_cache", "a table with at least one position", "no rows")

    if num_slots(kv_cache) == 0:
        return
    for first in range(0, rows, _ROWS_AT_ONCE):
        last = min(first + _ROWS_AT_ONCE, rows)
        position, slot = positions[first:last], slot_mapping[first:last]
        closes = torch.remainder(position + 1, compress_ratio) == 0
        valid = closes & (slot >= 0) & (slot < num_slots(kv_cache))
        x = k_pre[first:last].to(torch.float32)
        mean = x.square().sum(-1, keepdim=True) / _DIM
        k = (x * (1.0 / torch.sqrt(mean + eps)) * norm_weight.to(torch.float32)).to(torch.bfloat16).to(torch.float32)
        group_start = torch.div(position, compress_ratio, rounding_mode="floor") * compress_ratio
        codes, scale = quantise(rotate(k[:, None], group_start, cos_sin_cache))
        _scatter(kv_cache, slot, valid, codes[:, 0], scale.view(torch.uint8))


def _scatter(
    kv_cache: torch.Tensor, slot: torch.Tensor, valid: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor
) -> None:
    """Store rows (codes [R, 128], scale bytes [R, 4]) at their slots, without a mask and without a race.

    A captured graph cannot leave rows out, and a masked row that wrote back what it had read could undo another row's
    store. So masked rows repeat the first valid row, address and content; with none valid, all rows rewrite slot 0
    with its own bytes.
    """
    source = torch.arange(slot.shape[0], device=slot.device)
    source = torch.where(valid, source, valid.to(torch.int32).argmax())
    some = valid.any()
    target = torch.where(some, slot.index_select(0, source).to(torch.int64), 0)
    block, row = target // kv_cache.shape[1], target % kv_cache.shape[1]
    for view, new in zip(index_key_views(kv_cache), (codes, scale), strict=True):
        view[block, row] = torch.where(some, new.index_select(0, source), view[0, 0])
