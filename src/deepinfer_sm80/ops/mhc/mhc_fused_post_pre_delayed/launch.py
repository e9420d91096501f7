"""mhc_fused_post_pre_delayed in PyTorch. The maths is in reference.py beside this file."""

from __future__ import annotations

import torch

from deepinfer_sm80.ops.checks import Shapes

_STREAMS, _MIXES = 4, 24  # 4 pre, 4 post, 16 of the combination


def checked(
    x: torch.Tensor,
    residual: torch.Tensor,
    post_mix: torch.Tensor,
    comb: torch.Tensor,
    fn: torch.Tensor,
    scale: torch.Tensor,
    base: torch.Tensor,
    pre_mix: torch.Tensor,
    norm_weight: torch.Tensor,
    sinkhorn_iters: int,
) -> Shapes:
    """The axes T and H. Raises TensorContractError naming the argument that is wrong."""
    s = Shapes("mhc_fused_post_pre_delayed")
    s.check(x, "x", ("T", "H"), torch.bfloat16)
    s.check(residual, "residual", ("T", _STREAMS, "H"), torch.bfloat16)
    s.check(post_mix, "post_mix", ("T", _STREAMS), torch.float32)
    s.check(comb, "comb", ("T", _STREAMS, _STREAMS), torch.float32)
    s.check(fn, "fn", (_MIXES, _STREAMS * s["H"]), torch.float32)
    s.check(scale, "scale", (3,), torch.float32)
    s.check(base, "base", (_MIXES,), torch.float32)
    s.check(pre_mix, "pre_mix", ("T", _STREAMS), torch.float32)
    s.check(norm_weight, "norm_weight", ("H",), torch.bfloat16)
    s.require(s["H"] > 0, "x", "with at least one column", "none")
    s.require(sinkhorn_iters >= 1, "sinkhorn_iters", "1 or larger", sinkhorn_iters)
    return s


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
    checked(x, residual, post_mix, comb, fn, scale, base, pre_mix, norm_weight, sinkhorn_iters)

    mixed = post_mix[:, :, None] * x.float()[:, None]
    for i in range(residual.shape[1]):
        mixed = mixed + comb[:, i, :, None] * residual[:, i, None].float()
    streams = mixed.bfloat16()

    X = streams.flatten(1).float()
    m = (X @ fn.T) * torch.rsqrt(X.square().mean(-1, keepdim=True) + rms_eps)
    next_pre = torch.sigmoid(m[:, :4] * scale[0] + base[:4]) + hc_eps
    next_post = 2 * torch.sigmoid(m[:, 4:8] * scale[1] + base[4:8])
    next_comb = (m[:, 8:] * scale[2] + base[8:]).unflatten(1, (4, 4)).softmax(-1) + hc_eps
    next_comb = next_comb / (next_comb.sum(-2, keepdim=True) + hc_eps)
    for _ in range(sinkhorn_iters - 1):
        next_comb = next_comb / (next_comb.sum(-1, keepdim=True) + hc_eps)
        next_comb = next_comb / (next_comb.sum(-2, keepdim=True) + hc_eps)

    u = (pre_mix[:, :, None] * streams.float()).sum(1).bfloat16().float()
    layer_input = u * torch.rsqrt(u.square().mean(-1, keepdim=True) + norm_eps) * norm_weight.float()
    return streams, next_post, next_comb, layer_input.bfloat16(), next_pre
