"""Write a sublayer's output back into the residual streams, and prepare the next sublayer from the result.

    X'[t, j]    = bf16(post_mix[t, j] * x[t] + comb[t, 0, j] * residual[t, 0] + ... + comb[t, 3, j] * residual[t, 3])
    m[t]        = (X'[t] . fn^T) / sqrt(mean(X'[t]^2) + rms_eps)          X'[t] as its 4 * H values
    next_pre    = sigmoid(m[0:4] * scale[0] + base[0:4]) + hc_eps
    next_post   = 2 * sigmoid(m[4:8] * scale[1] + base[4:8])
    next_comb   = softmax over the last axis of (m[8:24] * scale[2] + base[8:24]) as [4, 4], + hc_eps, one division by
                  (column sum + hc_eps), then sinkhorn_iters - 1 times rows and columns
    u           = bf16(sum_s pre_mix[t, s] * X'[t, s])                    delayed: the sublayer before gave pre_mix
    layer_input = bf16(u / sqrt(mean(u^2) + norm_eps) * norm_weight)

The write-back is float32, every product and every sum rounded by itself, from left to right; the rest is float32 in
any order. T tokens, H hidden. x bfloat16 [T, H]; residual bfloat16 [T, 4, H]; post_mix, pre_mix float32 [T, 4]; comb
float32 [T, 4, 4], summed over its first index; fn float32 [24, 4 * H]; scale float32 [3]; base float32 [24];
norm_weight bfloat16 [H]. Returns streams bfloat16 [T, 4, H], next_post float32 [T, 4], next_comb float32 [T, 4, 4],
layer_input bfloat16 [T, H], next_pre float32 [T, 4].
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from deepinfer_sm80.ops.contract import Cost, OpSpec, Tolerance

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any


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
    mixed = post_mix[:, :, None] * x.float()[:, None]
    for i in range(4):
        mixed = mixed + comb[:, i, :, None] * residual[:, i, None].float()
    streams = mixed.bfloat16()

    X = streams.flatten(1).float()
    m = (X.double() @ fn.double().T).float() / torch.sqrt(X.square().mean(-1, keepdim=True) + rms_eps)
    next_pre = torch.sigmoid(m[:, :4] * scale[0] + base[:4]) + hc_eps
    next_post = 2 * torch.sigmoid(m[:, 4:8] * scale[1] + base[4:8])
    next_comb = (m[:, 8:] * scale[2] + base[8:]).unflatten(1, (4, 4)).softmax(-1) + hc_eps
    next_comb = next_comb / (next_comb.sum(-2, keepdim=True) + hc_eps)
    for _ in range(sinkhorn_iters - 1):
        next_comb = next_comb / (next_comb.sum(-1, keepdim=True) + hc_eps)
        next_comb = next_comb / (next_comb.sum(-2, keepdim=True) + hc_eps)

    u = (pre_mix[:, :, None] * streams.float()).sum(1).bfloat16().float()
    layer_input = u / torch.sqrt(u.square().mean(-1, keepdim=True) + norm_eps) * norm_weight.float()
    return streams, next_post, next_comb, layer_input.bfloat16(), next_pre


def cases(device: str) -> Iterator[tuple[str, dict[str, Any]]]:
    for tokens, hidden in ((0, 128), (1, 128), (3, 200), (5, 1280), (19, 1024), (2, 5120), (17, 5120), (33, 520)):
        g = torch.Generator(device).manual_seed(tokens * 8191 + hidden)

        def randn(*shape: int, g: torch.Generator = g) -> torch.Tensor:
            return torch.randn(shape, generator=g, device=device)

        yield (
            f"T{tokens}-H{hidden}",
            {
                "x": randn(tokens, hidden).bfloat16(),
                "residual": randn(tokens, 4, hidden).bfloat16(),
                "post_mix": 2 * randn(tokens, 4).sigmoid(),
                "comb": randn(tokens, 4, 4).softmax(-1),
                "fn": randn(24, 4 * hidden) * (4 * hidden) ** -0.5,
                "scale": 1 + randn(3) / 4,
                "base": randn(24),
                "pre_mix": randn(tokens, 4).sigmoid(),
                "norm_weight": (1 + randn(hidden) / 4).bfloat16(),
                "rms_eps": 1e-20,
                "hc_eps": 1e-6,
                "norm_eps": 1e-20,
                "sinkhorn_iters": 20,
            },
        )


def cost(
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
) -> Cost:
    read = (x, residual, post_mix, comb, fn, scale, base, pre_mix, norm_weight)
    written = (residual, post_mix, comb, x, pre_mix)  # of the same sizes as streams, next_post, ...
    mixing = 2 * (5 + 24 + 1) * residual.numel()  # write-back, projection, collapse
    return Cost(bytes=sum(t.nbytes for t in (*read, *written)), flops=mixing + 4 * comb.numel() * sinkhorn_iters)


# Ours keeps the write-back's order and is bit for bit; another may use fused multiply-adds: at most 1 ulp apart unless
# a value sits on a rounding boundary. A stream that rounded the other way, or TF32 operands, move a coefficient: the
# bound on it is 2^-9 of its row, on a row 2^-11. The layer's input is rounded twice.
_COEFFICIENTS = Tolerance(ulps=2.0**14, rms=2.0**-11)
SPEC = OpSpec(
    mhc_fused_post_pre_delayed,
    cases,
    Tolerance(ulps=1.0, rms=2.0**-9),
    cost,
    outputs=("streams", "next_post", "next_comb", "layer_input", "next_pre"),
    tolerances={
        "next_post": _COEFFICIENTS,
        "next_comb": _COEFFICIENTS,
        "next_pre": _COEFFICIENTS,
        "layer_input": Tolerance(ulps=2.0, rms=2.0**-8),
    },
)
