"""Four residual streams: coefficients of a sublayer, collapse into its input, write-back of its output.

m    = (x . fn^T) * rsqrt(mean(x^2) + eps)            x: the 4 * H bfloat16 values of a token, float32 arithmetic
pre  = sigmoid(m[0:4] * scale[0] + base[0:4]) + hc_eps
post = 2 * sigmoid(m[4:8] * scale[1] + base[4:8])
C    = softmax over the last axis of (m[8:24] * scale[2] + base[8:24]) as [4, 4], + hc_eps,
       one division by (column sum + hc_eps), then 19 times rows and columns
input of the sublayer = bf16(sum_s pre_before[s] * X[s]),      pre_before: ``pre`` of the sublayer before
X'[j] = bf16(sum_i C[i, j] * X[i] + post[j] * y)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from deepinfer_sm80.model import linear

if TYPE_CHECKING:
    from deepinfer_sm80.model.config import ModelConfig
    from deepinfer_sm80.model.linear import Weights
    from deepinfer_sm80.model.switches import Switches


class Coefficients(NamedTuple):
    """float32: pre [T, S] for the next sublayer, post [T, S] and comb [T, S, S] for this one's output."""

    pre: torch.Tensor
    post: torch.Tensor
    comb: torch.Tensor


class Mixer:
    """The hyper-connection in front of one sublayer: ``prefix`` is ``layers.3.hc_attn`` or the like."""

    def __init__(self, config: ModelConfig, weights: Weights, prefix: str, switches: Switches) -> None:
        self.streams, self.eps, self.hc_eps = config.hc_mult, config.rms_norm_eps, config.hc_eps
        self.iterations, self.mixing = config.hc_sinkhorn_iters, switches.has("mhc_mixing")
        self.fn, self.base = weights.tensor(f"{prefix}_fn"), weights.tensor(f"{prefix}_base")
        self.scale = weights.tensor(f"{prefix}_scale")

    def __call__(self, X: torch.Tensor) -> Coefficients:
        """X bfloat16 [T, S, H]."""
        S, x = self.streams, X.flatten(1).float()
        m = mix_product(x, self.fn) * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)
        pre, post, comb = m.split((S, S, S * S), dim=-1)
        b_pre, b_post, b_comb = self.base.split((S, S, S * S))
        return Coefficients(
            linear.sigmoid(pre * self.scale[0] + b_pre) + self.hc_eps,
            2 * linear.sigmoid(post * self.scale[1] + b_post),
            self._sinkhorn((comb * self.scale[2] + b_comb).view(-1, S, S)),
        )

    def _sinkhorn(self, scores: torch.Tensor) -> torch.Tensor:
        if not self.mixing:
            return torch.eye(self.streams, device=scores.device).expand_as(scores)
        comb = scores.softmax(-1) + self.hc_eps
        comb = comb / (comb.sum(-2, keepdim=True) + self.hc_eps)
        for _ in range(self.iterations - 1):
            comb = comb / (comb.sum(-1, keepdim=True) + self.hc_eps)
            comb = comb / (comb.sum(-2, keepdim=True) + self.hc_eps)
        return comb


def mix_product(x: torch.Tensor, fn: torch.Tensor) -> torch.Tensor:
    """float32 [T, S * H] and [24, S * H] -> float32 [T, 24]. vLLM rounds the operands to TF32 where DeepGEMM runs."""
    return linear.matmul(x, fn)


def first_pre(tokens: int, streams: int, device: torch.device) -> torch.Tensor:
    """What the first sublayer finds: select stream 0, exactly."""
    pre = torch.zeros(tokens, streams, device=device)
    pre[:, 0] = 1.0
    return pre


def collapse(X: torch.Tensor, pre: torch.Tensor) -> torch.Tensor:
    """X bfloat16 [T, S, H], pre float32 [T, S] -> bfloat16 [T, H]."""
    return (pre[..., None] * X.float()).sum(1).bfloat16()


def write_back(X: torch.Tensor, y: torch.Tensor, mix: Coefficients) -> torch.Tensor:
    """X bfloat16 [T, S, H], y bfloat16 [T, H] -> the streams behind the sublayer, bfloat16 [T, S, H]."""
    mixed = mix.comb.transpose(1, 2) @ X.float()
    return (mix.post[..., None] * y.float()[:, None] + mixed).bfloat16()
