"""Compressed-cache writer: vLLM's call, our operator."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deepinfer_sm80 import ops

if TYPE_CHECKING:
    import torch


def rope_quant_insert(
    latent: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    compress_ratio: int,
    fp8_scale: torch.Tensor | None = None,
) -> None:
    """Write latents [T, 512] bf16 into the 584-byte records of ``kv_cache`` [blocks, block size, 584] uint8.

    vLLM's contract (``fused_compress_quant_cache.rope_quant_insert``); ``fp8_scale`` belongs to its plain-row caches,
    which the plugin's attention class never asks for.
    """
    del fp8_scale
    ops.rope_quant_insert(latent, positions, cos_sin_cache, kv_cache, slot_mapping, compress_ratio)
