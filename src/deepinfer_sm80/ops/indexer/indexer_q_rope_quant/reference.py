"""Rotate and quantise the index queries; fold their scales into the head weights.

    x[t, h, :]   = bf16(q[t, h, :] with dims 64..127 rotated at positions[t])
    s[t, h]      = 2^ceil(log2(max(max_d |x[t, h, d]|, 1e-4) / 448))
    q_codes      = e4m3(x / s)
    weights[t,h] = ((float32(weights[t, h]) * s[t, h]) * softmax_scale) * head_scale

Rotation of a pair (e, o) = dims (64 + 2i, 65 + 2i), float32, each product and sum rounded (no fused multiply-add):
e' = e*cos[i] - o*sin[i], o' = o*cos[i] + e*sin[i]. Both scalars of the fold are rounded to float32 first. A NaN element
gets code 0x7F and does not count towards s. Positions outside the table (padding rows) are clamped into it.
The codes and the weight of a head with an infinity in q are undefined.

positions int64 (or int32) [T]; q bfloat16 [T, 32, 128]; cos_sin_cache float32 [P, 64] = 32 cos, then 32 sin;
weights bfloat16 [T, 32]. Returns q_codes uint8 [T, 32, 128] and weights float32 [T, 32].
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from deepinfer_sm80.ops.contract import Cost, OpSpec, Tolerance
from deepinfer_sm80.ops.formats import e4m3, ue8m0

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any


def indexer_q_rope_quant(
    positions: torch.Tensor,
    q: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    weights: torch.Tensor,
    softmax_scale: float,
    head_scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    row = cos_sin_cache[positions.clamp(0, cos_sin_cache.shape[0] - 1).long()][:, None]
    cos, sin = row[..., :32], row[..., 32:]
    x = q.float()
    even, odd = x[..., 64::2].clone(), x[..., 65::2].clone()
    x[..., 64::2] = even * cos - odd * sin
    x[..., 65::2] = odd * cos + even * sin
    x = x.bfloat16().float()
    amax = torch.where(x.isnan(), 0.0, x.abs()).amax(-1).clamp_min(1e-4)
    scale = ue8m0.decode(ue8m0.encode_ceil(amax / 448.0))
    return e4m3.encode(x / scale[..., None]), weights.float() * scale * softmax_scale * head_scale


def cases(device: str) -> Iterator[tuple[str, dict[str, Any]]]:
    for tokens in (0, 1, 3, 37):
        g = torch.Generator(device).manual_seed(tokens)
        angle = torch.rand(200, 32, generator=g, device=device) * 6.2831855
        q = torch.randn(tokens, 32, 128, generator=g, device=device)
        q *= torch.logspace(-6, 3, 32, device=device)[:, None]  # heads from below the floor to the thousands
        positions = torch.randint(0, 200, (tokens,), generator=g, device=device)
        if tokens > 2:
            q[0, 3] = 0.0
            q[1, 31] *= 1e30
            q[2, 30, 100] = float("nan")
            positions[1], positions[2] = -1, 1 << 40  # stale padding rows
        yield (
            f"T{tokens}",
            {
                "positions": positions,
                "q": q.bfloat16(),
                "cos_sin_cache": torch.cat((angle.cos(), angle.sin()), -1),
                "weights": torch.randn(tokens, 32, generator=g, device=device).bfloat16(),
                "softmax_scale": 128**-0.5,
                "head_scale": 32**-0.5,
            },
        )


def cost(
    positions: torch.Tensor,
    q: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    weights: torch.Tensor,
    softmax_scale: float,
    head_scale: float,
) -> Cost:
    read = q.nbytes + weights.nbytes + positions.nbytes + positions.numel() * 256
    return Cost(bytes=read + q.numel() + 4 * weights.numel(), flops=4 * q.numel())


# Every rounding is stated above and no sum is longer than two terms, so implementations agree bit for bit.
SPEC = OpSpec(indexer_q_rope_quant, cases, Tolerance.exact(), cost, outputs=("q_codes", "weights"))
