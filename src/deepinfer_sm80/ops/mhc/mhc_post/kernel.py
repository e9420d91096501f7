"""Triton launcher of mhc_post. The maths is in reference.py beside this file."""

from __future__ import annotations

import torch

from deepinfer_sm80.ops.checks import Shapes
from deepinfer_sm80.ops.mhc.mhc_post.tuning import choose
from deepinfer_sm80.ops.variants import run

_STREAMS = 4


def mhc_post(x: torch.Tensor, residual: torch.Tensor, post_mix: torch.Tensor, comb: torch.Tensor) -> torch.Tensor:
    s = Shapes("mhc_post")
    s.check(x, "x", ("T", "H"), torch.bfloat16)
    s.check(residual, "residual", ("T", _STREAMS, "H"), torch.bfloat16)
    s.check(post_mix, "post_mix", ("T", _STREAMS), torch.float32)
    s.check(comb, "comb", ("T", _STREAMS, _STREAMS), torch.float32)

    out = torch.empty_like(residual)
    if s["T"] == 0:
        return out
    variant = choose(s["H"])
    grid = (s["T"], -(-s["H"] // variant.constants["BLOCK_H"]))
    run(variant, grid, x, residual, post_mix, comb, out, s["H"])
    return out
