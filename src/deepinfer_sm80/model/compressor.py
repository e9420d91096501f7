"""Compressed rows: one latent per ``ratio`` tokens, from the normed input of the layers that own a cache.

    ratio 1:  latent_p = bf16(rms(wkv . x_p, norm))
    ratio 2:  k_t = wkv . x_t, g_t = wgate . x_t (float32);  w = softmax over tokens 2c and 2c + 1 of g, per dim
              latent_c = bf16(rms(sum_t w_t * k_t, norm))
The row of latent c is rotated at position c * ratio.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from deepinfer_sm80.model import linear

if TYPE_CHECKING:
    from deepinfer_sm80.model.config import ModelConfig
    from deepinfer_sm80.model.linear import Weights
    from deepinfer_sm80.model.state import Ring
    from deepinfer_sm80.model.switches import Switches


class Compressor:
    """The compressor of layer ``layer``."""

    def __init__(self, config: ModelConfig, weights: Weights, layer: int, switches: Switches) -> None:
        prefix = f"layers.{layer}.attn.compressor"
        self.ratio, self.eps = config.compress_ratios[layer], config.rms_norm_eps
        self.pooling = switches.has("compressor_softmax")
        self.wkv, self.norm = weights.matrix(f"{prefix}.wkv"), weights.norm(f"{prefix}.norm")
        self.wgate = weights.matrix(f"{prefix}.wgate") if self.ratio > 1 else None

    def __call__(self, x: torch.Tensor, start: int, ring: Ring | None) -> torch.Tensor:
        """x bfloat16 [T, H] of the tokens at ``start`` .. start + T - 1 -> latents bfloat16 [n, 512] of the rows that
        they close: ``start`` // ratio .. (start + T) // ratio - 1. With ratio 2, ``ring`` holds the open half of a pair
        and takes in these tokens."""
        k = linear.product(x, self.wkv)
        if self.wgate is None or ring is None:
            return linear.rms_norm(k, self.norm, self.eps)
        gate = linear.product(x, self.wgate)
        if start % self.ratio:
            k, gate = (torch.cat(halves) for halves in zip(ring.read(start - 1), (k, gate), strict=True))
        ring.write(start + len(x) - len(k), k, gate)
        whole = len(k) // self.ratio * self.ratio
        shape = (-1, self.ratio, k.shape[-1])
        k, gate = k[:whole].view(shape), gate[:whole].view(shape)
        share = gate.softmax(1) if self.pooling else torch.full_like(gate, 1 / self.ratio)
        return linear.rms_norm((share * k).sum(1), self.norm, self.eps)
