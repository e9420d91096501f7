"""Rotary tables and rotations of DeepSeek-V4.1: interleaved pairs in the last 64 dims of a head.

    plain (layers without a compressed cache):  inv_i = theta^(-2i/64)                     theta = rope_theta
    YaRN (all others):  inv_i = m_i * a_i + (1 - m_i) * a_i / factor,  a_i = theta^(-2i/64)  theta = compress_rope_theta
        m_i = 1 - clamp((i - low) / (high - low), 0, 1),   i = 0 .. 31
        low  = floor(dim(beta_fast)),  high = ceil(dim(beta_slow)),  dim(b) = 64 ln(original / 2 pi b) / (2 ln theta)

No attention temperature. Angles, sines and cosines are float32, as vLLM makes them: at position 16,000 an angle is then
off by up to 5e-4, so a float64 table would be another model.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from deepinfer_sm80.model.config import ModelConfig


def inverse_frequencies(config: ModelConfig, compressed: bool) -> torch.Tensor:
    """float32 [32] for layers with (``compressed``) or without a compressed cache."""
    dim = config.qk_rope_head_dim
    theta = config.compress_rope_theta if compressed else config.rope_theta
    periods = theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    if not compressed:
        return 1.0 / periods
    low, high = yarn_range(config)
    kept = 1 - ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return 1.0 / (config.rope_scaling.factor * periods) * (1 - kept) + 1.0 / periods * kept


def yarn_range(config: ModelConfig) -> tuple[int, int]:
    """First pair that YaRN slows down and first pair that it slows down fully: (15, 25) for the released values."""
    scaling, dim = config.rope_scaling, config.qk_rope_head_dim

    def pair(rotations: float) -> float:
        turns = scaling.original_max_position_embeddings / (rotations * 2 * math.pi)
        return dim * math.log(turns) / (2 * math.log(config.compress_rope_theta))

    return max(math.floor(pair(scaling.beta_fast)), 0), min(math.ceil(pair(scaling.beta_slow)), dim - 1)


def table(config: ModelConfig, compressed: bool, rows: int) -> torch.Tensor:
    """float32 [rows, 64]: 32 cosines, then 32 sines, of positions 0 .. rows - 1."""
    angle = torch.arange(rows, dtype=torch.float32)[:, None] * inverse_frequencies(config, compressed)
    return torch.cat((angle.cos(), angle.sin()), dim=-1)


def rotate(x: torch.Tensor, cos_sin: torch.Tensor, inverse: bool = False) -> torch.Tensor:
    """Rotates the last 64 dims of ``x`` [T, ..., D] by ``cos_sin`` float32 [T, 64], or back; result bfloat16.

    Float32, products and sums rounded one by one, then once to bfloat16. The other dims are only rounded to bfloat16.
    """
    half = cos_sin.shape[-1] // 2
    shape = (len(x), *(1,) * (x.dim() - 2), half)
    cos, sin = cos_sin[:, :half].view(shape), cos_sin[:, half:].view(shape)
    if inverse:
        sin = -sin
    tail = x[..., -2 * half :].float()
    even, odd = tail[..., 0::2], tail[..., 1::2]
    turned = torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1).flatten(-2)
    return torch.cat((x[..., : -2 * half].bfloat16(), turned.bfloat16()), dim=-1)
