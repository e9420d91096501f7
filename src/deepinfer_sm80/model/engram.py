"""Engram: rows of n-gram tables, projected to a key per stream and one value, gated into the streams.

rows   = 24 rows of 256 per token (engram_hash), e4m3 * 2^(scale - 127), bfloat16, concatenated to 6144
[K_0 .. K_3, V] = wkv . rows                                                    each [H], bfloat16
d_s    = sum_i X_s q_s k_s K_s * rsqrt(mean X_s^2 + eps) * rsqrt(mean K_s^2 + eps) / sqrt(H)
gate_s = sigmoid(sign(d_s) * sqrt(max(|d_s|, 1e-6)))                            float32; d = 0 counts as positive
X_s    = bf16(X_s + gate_s * V)
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from deepinfer_sm80.model import engram_hash, linear
from deepinfer_sm80.ops.formats import e4m3, ue8m0

if TYPE_CHECKING:
    from deepinfer_sm80.model.config import ModelConfig
    from deepinfer_sm80.model.linear import Weights
    from deepinfer_sm80.model.switches import Switches

_SMALLEST = 1e-6


class Engram:
    """The Engram in front of layer ``layer``."""

    def __init__(self, config: ModelConfig, weights: Weights, layer: int, pad: int, switches: Switches) -> None:
        prefix, order = f"layers.{layer}.engram", config.engram_max_ngram_size
        number = config.engram_layer_ids.index(layer)
        everything = engram_hash.bucket_primes(
            len(config.engram_layer_ids), config.engram_vocab_size, order, config.engram_n_heads
        )
        self.primes = torch.tensor(everything[number], device=weights.device)
        self.offsets = torch.tensor(engram_hash.bucket_offsets(everything[number]), device=weights.device)
        self.multipliers = engram_hash.hash_multipliers(layer, order, config.engram_compressed_vocab_size)
        self.pad, self.eps, self.rounded = pad, config.rms_norm_eps, linear.input_rounding(switches)
        self.codes = weights.tensor(f"{prefix}.embed.weight")
        self.scales = weights.tensor(f"{prefix}.embed.scale")
        self.wkv = weights.matrix(f"{prefix}.wkv")
        self.gain = weights.tensor(f"{prefix}.q_weight").float() * weights.tensor(f"{prefix}.k_weight").float()

    def __call__(self, X: torch.Tensor, history: torch.Tensor) -> torch.Tensor:
        """X bfloat16 [T, S, H]; ``history`` int64 [>= T]: compressed ids of the sequence, the last T of them X's."""
        T, S, H = X.shape
        history = history[max(len(history) - T - len(self.multipliers) + 1, 0) :]
        out = linear.project(self.rounded(self.rows(history)[len(history) - T :]), self.wkv)
        K, V = out[:, : S * H].view(T, S, H).float(), out[:, S * H :].float()
        x = X.float()
        d = (x * self.gain * K).sum(-1)
        d = d * torch.rsqrt(x.square().mean(-1) + self.eps) * torch.rsqrt(K.square().mean(-1) + self.eps) / math.sqrt(H)
        gate = linear.sigmoid(d.abs().clamp_min(_SMALLEST).sqrt().copysign(torch.where(d < 0, -1.0, 1.0)))
        return (x + gate[..., None] * V[:, None]).bfloat16()

    def rows(self, history: torch.Tensor) -> torch.Tensor:
        """bfloat16 [len(history), 24 * 256]."""
        ids = self.row_ids(history)
        values = e4m3.decode(self.codes[ids]).unflatten(-1, (-1, 32))
        scaled: torch.Tensor = values * ue8m0.decode(self.scales[ids])[..., None]
        return scaled.flatten(1).bfloat16()

    def row_ids(self, history: torch.Tensor) -> torch.Tensor:
        """int64 [len(history), 24]: ``engram_hash.ngram_rows`` of every position of a sequence that starts here."""
        rolling = torch.zeros_like(history)
        blocked = torch.zeros_like(history, dtype=torch.bool)
        heads = len(self.primes) // (len(self.multipliers) - 1)
        columns = []
        for back, multiplier in enumerate(self.multipliers):
            earlier = torch.full_like(history, -1)
            earlier[back:] = history[: max(len(history) - back, 0)]
            blocked = blocked | (earlier < 0)
            rolling = rolling ^ (torch.where(blocked, self.pad, earlier) * multiplier)
            if back:
                columns.append(rolling[:, None] % self.primes[(back - 1) * heads : back * heads])
        return torch.cat(columns, dim=-1) + self.offsets
