"""Launcher of engram_lookup. The definition is in reference.py beside this file."""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from deepinfer_sm80.ops.checks import Shapes
from deepinfer_sm80.ops.formats import e4m3, ue8m0

_DIM, _GROUP = 256, 32

# Table rows at once: a 4-byte temporary is 32768 * 256 * 4 = 32 MB and about four are alive.
_ROWS_AT_ONCE = 1 << 15


def engram_lookup(
    weight: torch.Tensor,
    scale: torch.Tensor,
    ids: torch.Tensor,
    head_start: int,
    local_heads: int,
    vocab_start: int,
    vocab_end: int,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """``out`` bfloat16 [T, local_heads, 256], contiguous: where to write; returned. Otherwise as the reference."""
    s = Shapes("engram_lookup")
    s.check(weight, "weight", ("N", _DIM), torch.uint8)
    s.check(scale, "scale", ("N", _DIM // _GROUP), torch.uint8)
    s.check_view(ids, "ids", ("T", "C"), torch.int64, torch.int32, dense=0)
    s.require(head_start >= 0, "head_start", "0 or larger", head_start)
    s.require(local_heads >= 0, "local_heads", "0 or larger", local_heads)
    s.require(vocab_start >= 0, "vocab_start", "0 or larger", vocab_start)
    tokens = s["T"]
    if out is None:
        out = torch.empty((tokens, local_heads, _DIM), dtype=torch.bfloat16, device=ids.device)
    s.check(out, "out", ("T", local_heads, _DIM), torch.bfloat16)

    rows_owned = min(vocab_end - vocab_start, s["N"])
    if rows_owned <= 0 or out.numel() == 0:
        return out.zero_()
    mine = ids[:, head_start : head_start + local_heads]
    mine = pad(mine, (0, local_heads - mine.shape[1]), value=-1).reshape(-1)  # heads beyond C own no row
    table = e4m3.decode(torch.arange(256, dtype=torch.uint8, device=ids.device))
    flat = out.view(-1, _DIM)
    for first in range(0, mine.shape[0], _ROWS_AT_ONCE):
        part = mine[first : first + _ROWS_AT_ONCE].to(torch.int64) - vocab_start
        owned = (part >= 0) & (part < rows_owned)
        row = torch.where(owned, part, 0)
        codes = weight.index_select(0, row).view(-1).to(torch.int32)
        values = table.index_select(0, codes).view(-1, _DIM // _GROUP, _GROUP)
        values *= ue8m0.decode(scale.index_select(0, row))[:, :, None]
        # selected, not multiplied: row 0 may hold NaN
        flat[first : first + _ROWS_AT_ONCE] = values.view(-1, _DIM).masked_fill(~owned[:, None], 0.0)
    return out
