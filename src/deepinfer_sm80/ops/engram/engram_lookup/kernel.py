"""Triton launcher of engram_lookup. The definition is in reference.py beside this file."""

from __future__ import annotations

import torch

from deepinfer_sm80.ops.checks import Shapes
from deepinfer_sm80.ops.engram.engram_lookup.tuning import ROWS, lookup
from deepinfer_sm80.ops.variants import run

_DIM, _GROUP = 256, 32
_IDS = {torch.int64: lookup("i64"), torch.int32: lookup("i32")}


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
    if out is None:
        out = torch.empty((s["T"], local_heads, _DIM), dtype=torch.bfloat16, device=ids.device)
    s.check(out, "out", ("T", local_heads, _DIM), torch.bfloat16)

    rows_owned = min(vocab_end - vocab_start, s["N"])
    if rows_owned <= 0 or out.numel() == 0:
        return out.zero_()
    results = s["T"] * local_heads
    run(
        _IDS[ids.dtype],
        (-(-results // ROWS),),
        weight,
        scale,
        ids,
        out,
        results,
        local_heads,
        head_start,
        s["C"],
        ids.stride(0),
        ids.stride(1),
        vocab_start,
        rows_owned,
    )
    return out
