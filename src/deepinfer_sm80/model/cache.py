"""What the caches keep: key rows as their 584-byte record holds them."""

from __future__ import annotations

import torch

from deepinfer_sm80.model import rope
from deepinfer_sm80.ops.formats import e4m3, ue8m0
from deepinfer_sm80.ops.kv_cache.layout import AMAX_FLOOR, NOPE_DIM, NUM_SCALES, QUANT_GROUP


def as_recorded(latent: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    """latent bfloat16 [T, 512], cos_sin float32 [T, 64] -> bfloat16 [T, 512], rotated and read back from a record.

    Dims 0..447 are e4m3 with a power-of-two scale per 64, dims 448..511 stay bfloat16: ``rope_quant_insert``.
    """
    rotated = rope.rotate(latent, cos_sin)
    groups = rotated[:, :NOPE_DIM].float().view(-1, NUM_SCALES, QUANT_GROUP)
    amax = groups.abs().amax(-1).clamp_min(AMAX_FLOOR)
    scale = ue8m0.decode(ue8m0.encode_amax(amax, e4m3.LARGEST))[..., None]
    values = e4m3.decode(e4m3.encode(groups / scale)) * scale
    return torch.cat((values.flatten(1).bfloat16(), rotated[:, NOPE_DIM:]), dim=-1)
