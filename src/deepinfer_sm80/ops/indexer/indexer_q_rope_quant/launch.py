"""Launcher of indexer_q_rope_quant. The maths is in reference.py beside this file."""

from __future__ import annotations

import torch

from deepinfer_sm80.ops.checks import Shapes
from deepinfer_sm80.ops.indexer.vectors import quantise, rotate

_HEADS, _DIM, _ROPE = 32, 128, 64

# Tokens at once: a float32 temporary is 512 * 32 * 128 * 4 = 8 MB and about ten are alive.
_TOKENS_AT_ONCE = 512


def indexer_q_rope_quant(
    positions: torch.Tensor,
    q: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    weights: torch.Tensor,
    softmax_scale: float,
    head_scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    s = Shapes("indexer_q_rope_quant")
    s.check_view(q, "q", ("T", _HEADS, _DIM), torch.bfloat16)
    s.check_view(positions, "positions", ("T",), torch.int64, torch.int32, dense=0)
    s.check(cos_sin_cache, "cos_sin_cache", ("P", _ROPE), torch.float32)
    s.check_view(weights, "weights", ("T", _HEADS), torch.bfloat16)
    tokens = s["T"]
    s.require(tokens == 0 or s["P"] > 0, "cos_sin_cache", "a table with at least one position", "no rows")

    codes = torch.empty((tokens, _HEADS, _DIM), dtype=torch.uint8, device=q.device)
    folded = torch.empty((tokens, _HEADS), dtype=torch.float32, device=q.device)
    for first in range(0, tokens, _TOKENS_AT_ONCE):
        rows = slice(first, first + _TOKENS_AT_ONCE)
        rotated = rotate(q[rows].to(torch.float32), positions[rows], cos_sin_cache)
        codes[rows], scale = quantise(rotated)
        folded[rows] = weights[rows].to(torch.float32) * scale * softmax_scale * head_scale
    return codes, folded
