"""Launcher of grouped_output_projection. The maths is in reference.py beside this file."""

from __future__ import annotations

import torch

from deepinfer_sm80.ops.checks import Shapes


def grouped_output_projection(
    x: torch.Tensor, weight: torch.Tensor, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """``out``: contiguous bfloat16 [T, G, R], overwritten whole and returned."""
    s = Shapes("grouped_output_projection")
    s.check(x, "x", ("T", "G", "K"), torch.bfloat16)
    s.check(weight, "weight", ("G", "R", "K"), torch.bfloat16)
    shape = (s["T"], s["G"], s["R"])
    if out is None:
        out = torch.empty(shape, dtype=torch.bfloat16, device=x.device)
    else:
        s.check(out, "out", shape, torch.bfloat16)

    if out.numel() == 0:
        return out
    torch.bmm(x.transpose(0, 1), weight.transpose(1, 2), out=out.transpose(0, 1))
    return out
