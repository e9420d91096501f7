"""Launcher of sparse_mla_prefill. The maths is in reference.py beside this file."""

from __future__ import annotations

import torch

from deepinfer_sm80.ops.attention.softmax import ROWS_AT_ONCE, attend
from deepinfer_sm80.ops.checks import Shapes

_HEAD_DIM = 512


def sparse_mla_prefill(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    lens: torch.Tensor,
    attn_sink: torch.Tensor,
    softmax_scale: float,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """``out``: bfloat16 [T, H, 512], dim 0 may be strided, overwritten whole and returned."""
    s = Shapes("sparse_mla_prefill")
    s.check_view(q, "q", ("T", "H", _HEAD_DIM), torch.bfloat16, dense=2)
    s.check(kv, "kv", ("S", _HEAD_DIM), torch.bfloat16)
    s.check_view(indices, "indices", ("T", "K"), torch.int32)
    s.check(lens, "lens", ("T",), torch.int32)
    s.check(attn_sink, "attn_sink", ("H",), torch.float32)
    if out is None:
        out = torch.empty(q.shape, dtype=torch.bfloat16, device=q.device)
    else:
        s.check_view(out, "out", ("T", "H", _HEAD_DIM), torch.bfloat16, dense=2)

    if s["T"] * s["H"] == 0:
        return out
    if s["K"] * s["S"] == 0:
        return out.zero_()
    column = torch.arange(s["K"], device=q.device)
    step = max(1, ROWS_AT_ONCE // s["K"])
    for first in range(0, s["T"], step):
        tokens = slice(first, min(first + step, s["T"]))
        row = indices[tokens]
        valid = (column < lens[tokens, None]) & (row >= 0) & (row < s["S"])
        # a masked entry reads row 0 and forgets it: its weight 0 would not silence a NaN there
        keys = torch.where(valid[..., None], kv[torch.where(valid, row, 0).long()], 0)
        out[tokens] = attend(q[tokens], keys, valid, attn_sink, softmax_scale)
    return out
