"""Launcher of sparse_mla_decode. The maths is in reference.py beside this file."""

from __future__ import annotations

import torch

from deepinfer_sm80.ops.attention.softmax import ROWS_AT_ONCE, attend
from deepinfer_sm80.ops.checks import Shapes
from deepinfer_sm80.ops.kv_cache.layout import HEAD_DIM, RECORD_BYTES, num_slots
from deepinfer_sm80.ops.kv_cache.records import read_records

_RowSet = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # cache, slots [T, W], lens [T]


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
    """``out``: bfloat16 [T, H, 512], dim 0 may be strided, overwritten whole and returned."""
    s = Shapes("sparse_mla_decode")
    s.check_view(q, "q", ("T", "H", HEAD_DIM), torch.bfloat16, dense=2)
    s.check(attn_sink, "attn_sink", ("H",), torch.float32)
    sets = [_checked(s, "swa", swa_k_cache, swa_indices, swa_lens)]
    if extra_k_cache is not None and extra_indices is not None and extra_lens is not None:
        sets.append(_checked(s, "extra", extra_k_cache, extra_indices, extra_lens))
    else:
        given = [x is not None for x in (extra_k_cache, extra_indices, extra_lens)]
        s.require(not any(given), "extra_k_cache, extra_indices, extra_lens", "given together or not at all", given)
    if out is None:
        out = torch.empty(q.shape, dtype=torch.bfloat16, device=q.device)
    else:
        s.check_view(out, "out", ("T", "H", HEAD_DIM), torch.bfloat16, dense=2)

    if s["T"] * s["H"] == 0:
        return out
    sets = [(cache, slots, lens) for cache, slots, lens in sets if num_slots(cache) * slots.shape[1] > 0]
    if not sets:
        return out.zero_()
    step = max(1, ROWS_AT_ONCE // sum(slots.shape[1] for _, slots, _ in sets))
    for first in range(0, s["T"], step):
        tokens = slice(first, min(first + step, s["T"]))
        read = [_read(cache, slots[tokens], lens[tokens]) for cache, slots, lens in sets]
        keys, valid = (torch.cat(parts, dim=1) for parts in zip(*read, strict=True))
        out[tokens] = attend(q[tokens], keys, valid, attn_sink, softmax_scale)
    return out


def _checked(s: Shapes, prefix: str, cache: torch.Tensor, slots: torch.Tensor, lens: torch.Tensor) -> _RowSet:
    cache_name = f"{prefix}_k_cache"
    s.check_pages(cache, cache_name, (f"{prefix}_blocks", f"{prefix}_block_size"), RECORD_BYTES)
    s.check_view(slots, f"{prefix}_indices", ("T", f"{prefix}_width"), torch.int32)
    s.check(lens, f"{prefix}_lens", ("T",), torch.int32)
    return cache, slots, lens


def _read(cache: torch.Tensor, slots: torch.Tensor, lens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows bfloat16 [t, W, 512], zeros where not valid, and which are valid, bool [t, W]."""
    inside = torch.arange(slots.shape[1], device=slots.device) < lens[:, None]
    valid = inside & (slots >= 0) & (slots < num_slots(cache))
    return read_records(cache, slots, valid), valid
