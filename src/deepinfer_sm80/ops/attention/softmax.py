"""Batched attention over gathered rows, shared by the two sparse launchers until a kernel takes their place."""

from __future__ import annotations

import torch

ROWS_AT_ONCE = 1 << 14
"""Gathered rows alive at once: 16384 * 512 float32 = 34 MB, beside a few temporaries of the same size."""


def attend(
    q: torch.Tensor, keys: torch.Tensor, valid: torch.Tensor, attn_sink: torch.Tensor, softmax_scale: float
) -> torch.Tensor:
    """q bfloat16 [t, H, 512] over keys bfloat16 [t, K, 512], K > 0, zeros wherever valid (bool [t, K]) is false.

    Returns bfloat16 [t, H, 512]. Operands are bfloat16 values widened to float32: their products are exact in float32,
    and would be in TF32.
    """
    rows = keys.float()
    scores = torch.bmm(q.float(), rows.transpose(1, 2)).mul_(softmax_scale)
    scores.masked_fill_(~valid[:, None, :], -torch.inf)
    sink = attn_sink[None, :, None]
    largest = torch.maximum(scores.amax(-1, keepdim=True), sink)
    # nothing valid and no sink: -inf - -inf would be NaN
    largest = largest.masked_fill(largest == -torch.inf, 0.0)
    p = scores.sub_(largest).exp_()
    total = p.sum(-1, keepdim=True) + (sink - largest).exp()
    values = torch.bmm(p.bfloat16().float(), rows)
    return torch.where(total == 0, 0.0, values / total).to(torch.bfloat16)
