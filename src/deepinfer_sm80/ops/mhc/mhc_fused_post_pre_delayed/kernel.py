"""Triton launcher of mhc_fused_post_pre_delayed. The maths is in reference.py beside this file."""

from __future__ import annotations

import torch

from deepinfer_sm80.ops.mhc.mhc_fused_post_pre_delayed.launch import checked
from deepinfer_sm80.ops.mhc.mhc_fused_post_pre_delayed.tuning import DOT_TOKENS, LARGEST, PAD, epilogue, plan
from deepinfer_sm80.ops.variants import run


def mhc_fused_post_pre_delayed(
    x: torch.Tensor,
    residual: torch.Tensor,
    post_mix: torch.Tensor,
    comb: torch.Tensor,
    fn: torch.Tensor,
    scale: torch.Tensor,
    base: torch.Tensor,
    pre_mix: torch.Tensor,
    norm_weight: torch.Tensor,
    rms_eps: float,
    hc_eps: float,
    norm_eps: float,
    sinkhorn_iters: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """As the reference; H at most 8192. Two launches: the write-back with partial sums, then one program a token."""
    s = checked(x, residual, post_mix, comb, fn, scale, base, pre_mix, norm_weight, sinkhorn_iters)
    tokens, hidden = s["T"], s["H"]
    s.require(hidden <= LARGEST, "x", f"of at most {LARGEST} columns", hidden)

    streams, layer_input = torch.empty_like(residual), torch.empty_like(x)
    next_post, next_pre, next_comb = torch.empty_like(post_mix), torch.empty_like(pre_mix), torch.empty_like(comb)
    if tokens == 0:
        return streams, next_post, next_comb, layer_input, next_pre
    variant, width, parts = plan(tokens, hidden)
    partial = torch.empty(parts, tokens, PAD, dtype=torch.float32, device=x.device)
    rows = tokens if tokens < DOT_TOKENS else -(-tokens // DOT_TOKENS)
    run(variant, (rows, parts), x, residual, post_mix, comb, fn, streams, partial, tokens, hidden, width)
    run(
        epilogue(hidden),
        (tokens,),
        partial,
        streams,
        scale,
        base,
        pre_mix,
        norm_weight,
        next_post,
        next_comb,
        layer_input,
        next_pre,
        tokens,
        hidden,
        parts,
        sinkhorn_iters,
        rms_eps,
        hc_eps,
        norm_eps,
    )
    return streams, next_post, next_comb, layer_input, next_pre
