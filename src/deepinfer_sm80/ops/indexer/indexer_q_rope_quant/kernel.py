"""Triton launcher of indexer_q_rope_quant. The maths is in reference.py beside this file."""

from __future__ import annotations

import torch

from deepinfer_sm80.ops.checks import Shapes
from deepinfer_sm80.ops.indexer.indexer_q_rope_quant.tuning import DIM, HEADS, ROPE, variant
from deepinfer_sm80.ops.variants import ALIGNMENT, run


def indexer_q_rope_quant(
    positions: torch.Tensor,
    q: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    weights: torch.Tensor,
    softmax_scale: float,
    head_scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    s = Shapes("indexer_q_rope_quant")
    s.check_view(q, "q", ("T", HEADS, DIM), torch.bfloat16)
    s.check_view(positions, "positions", ("T",), torch.int64, torch.int32, dense=0)
    s.check(cos_sin_cache, "cos_sin_cache", ("P", ROPE), torch.float32)
    s.check_view(weights, "weights", ("T", HEADS), torch.bfloat16)
    tokens = s["T"]
    s.require(tokens == 0 or s["P"] > 0, "cos_sin_cache", "a table with at least one position", "no rows")

    codes = torch.empty((tokens, HEADS, DIM), dtype=torch.uint8, device=q.device)
    folded = torch.empty((tokens, HEADS), dtype=torch.float32, device=q.device)
    if tokens == 0:
        return codes, folded
    positions = positions.to(torch.int64)  # vLLM's dtype already
    unit = _unit(q)
    run(
        variant(unit),
        (tokens,),
        positions,
        q,
        cos_sin_cache,
        weights,
        codes,
        folded,
        positions.stride(0),
        q.stride(0) // unit,
        q.stride(1) // unit,
        weights.stride(0),
        s["P"],
        softmax_scale,
        head_scale,
    )
    return codes, folded


def _unit(q: torch.Tensor) -> int:
    """8 elements are 16 bytes, the widest load: where every row of q begins at a multiple of it, else 1."""
    wide = ALIGNMENT // q.element_size()
    aligned = q.data_ptr() % ALIGNMENT == 0 and q.stride(0) % wide == 0 and q.stride(1) % wide == 0
    return wide if aligned else 1
