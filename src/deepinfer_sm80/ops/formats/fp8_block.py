"""FP8 weights in 32x32 blocks: E4M3 codes [N, K] with one UE8M0 scale a block, [ceil(N/32), ceil(K/32)].

    W[n, k] = e4m3(weight[n, k]) * 2^(scale[n // 32, k // 32] - 127)

The format of DeepSeek-V4.1's dense projections.
"""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from deepinfer_sm80.ops.formats import e4m3, ue8m0

BLOCK = 32
AMAX_FLOOR = 1e-4


def decode(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """weight uint8 [N, K], scale uint8 [ceil(N/32), ceil(K/32)] -> float32 [N, K]; exact unless it underflows."""
    return e4m3.decode(weight) * _spread(ue8m0.decode(scale), weight)


def encode(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 or bfloat16 [N, K] -> (weight uint8 [N, K], scale uint8 [ceil(N/32), ceil(K/32)]).

    Scale of a block: 2^ceil(log2(max(amax, 1e-4) / 448)); codes round half to even.
    """
    x = x.to(torch.float32)
    rows, columns = x.shape
    tall, wide = -(-rows // BLOCK), -(-columns // BLOCK)
    padded = pad(x, (0, wide * BLOCK - columns, 0, tall * BLOCK - rows))
    blocks = padded.view(tall, BLOCK, wide, BLOCK)
    amax = blocks.abs().amax((1, 3)).clamp_min(AMAX_FLOOR)
    scale = ue8m0.encode_amax(amax, e4m3.LARGEST)
    return e4m3.encode(x / _spread(ue8m0.decode(scale), x)), scale


def _spread(scale: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    tall, wide = scale.shape
    full = scale[:, None, :, None].expand(tall, BLOCK, wide, BLOCK).reshape(tall * BLOCK, wide * BLOCK)
    return full[: like.shape[0], : like.shape[1]]
