"""Launcher of inverse_rope_grouped. The maths is in reference.py beside this file."""

from __future__ import annotations

import torch

from deepinfer_sm80.ops.checks import Shapes

_HEAD_DIM, _NOPE_DIM, _ROPE_DIM = 512, 448, 64
_HEADS_AT_ONCE = 1 << 17  # float32 temporaries of 131072 * 64 * 4 = 34 MB


def inverse_rope_grouped(
    o: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    num_groups: int,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """``out``: contiguous bfloat16 [T, num_groups, H / num_groups * 512], overwritten whole and returned."""
    s = Shapes("inverse_rope_grouped")
    s.check_view(o, "o", ("T", "H", _HEAD_DIM), torch.bfloat16, dense=2)
    s.check_view(positions, "positions", ("T",), torch.int64, torch.int32)
    s.check_view(cos_sin_cache, "cos_sin_cache", ("max_pos", _ROPE_DIM), torch.float32)
    divides = num_groups > 0 and s["H"] % num_groups == 0
    s.require(divides, "num_groups", f"a divisor of the {s['H']} heads", num_groups)
    shape = (s["T"], num_groups, s["H"] // num_groups * _HEAD_DIM)
    if out is None:
        out = torch.empty(shape, dtype=torch.bfloat16, device=o.device)
    else:
        s.check(out, "out", shape, torch.bfloat16)

    if out.numel() == 0:
        return out
    s.require(s["max_pos"] > 0, "cos_sin_cache", "a table with at least one row", s["max_pos"])
    heads = out.view(s["T"], s["H"], _HEAD_DIM)
    heads[..., :_NOPE_DIM] = o[..., :_NOPE_DIM]
    step = max(1, _HEADS_AT_ONCE // s["H"])
    for first in range(0, s["T"], step):
        rows = slice(first, min(first + step, s["T"]))
        # rotation by -angle: (even, odd) * cos + (odd, -even) * sin
        cos, sin = cos_sin_cache[positions[rows].clamp(0, s["max_pos"] - 1).long()][:, None, :, None].chunk(2, dim=2)
        pair = o[rows, :, _NOPE_DIM:].float().unflatten(-1, (_ROPE_DIM // 2, 2))
        turned = torch.stack((pair[..., 1], -pair[..., 0]), dim=-1)
        heads[rows, :, _NOPE_DIM:] = (pair * cos + turned * sin).flatten(-2).to(torch.bfloat16)
    return out
