"""Triton launcher of inverse_rope_grouped. The maths is in reference.py beside this file."""

from __future__ import annotations

import torch

from deepinfer_sm80.ops.checks import Shapes
from deepinfer_sm80.ops.projection.inverse_rope_grouped.tuning import UNIT, UNROTATE
from deepinfer_sm80.ops.variants import run

_HEAD_DIM, _ROPE_DIM = 512, 64


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
    if o.stride(0) % UNIT:
        o = o.contiguous()  # no slice of heads is laid out so
    run(
        UNROTATE,
        (s["T"], -(-s["H"] // UNROTATE.constants["HEADS"])),
        o,
        positions.long(),
        cos_sin_cache,
        out,
        s["H"],
        o.stride(0) // UNIT,
        s["max_pos"],
        cos_sin_cache.stride(0),
    )
    return out
