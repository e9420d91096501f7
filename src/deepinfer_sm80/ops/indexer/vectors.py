"""Rotation and quantisation of 128-wide index vectors, shared by the launchers of the query and of the key."""

from __future__ import annotations

import torch

from deepinfer_sm80.ops.formats import e4m3, ue8m0
from deepinfer_sm80.ops.kv_cache.layout import AMAX_FLOOR, INDEX_DIM, ROPE_DIM


def decode_table(device: torch.device) -> torch.Tensor:
    """float32 [256]: the value of every E4M3 code. Computed on the device: a host copy could not be captured."""
    return e4m3.decode(torch.arange(256, dtype=torch.uint8, device=device))


def look_up(table: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """float32 values of uint8 codes of any shape through ``decode_table``: one gather instead of ten passes."""
    return table.index_select(0, codes.reshape(-1).to(torch.int32)).view(codes.shape)


def rotate(x: torch.Tensor, positions: torch.Tensor, cos_sin_cache: torch.Tensor) -> torch.Tensor:
    """float32 [T, N, 128] with dims 64..127 rotated by the row's position, rounded to bfloat16, as float32.

    Every pair (e, o) becomes (e*cos + o*(-sin), o*cos + e*sin). Products and sum are rounded one by one, which equals
    the reference bit for bit. Positions outside the table (padding rows) are clamped.
    """
    table = cos_sin_cache.index_select(0, positions.clamp(0, cos_sin_cache.shape[0] - 1))
    cos, sin = table.view(-1, 1, 2, ROPE_DIM // 2).unbind(2)
    cos = torch.stack((cos, cos), dim=-1).flatten(-2)
    sin = torch.stack((-sin, sin), dim=-1).flatten(-2)
    tail = x[..., INDEX_DIM - ROPE_DIM :]
    swapped = torch.stack((tail[..., 1::2], tail[..., 0::2]), dim=-1).flatten(-2)
    whole = torch.cat((x[..., : INDEX_DIM - ROPE_DIM], tail * cos + swapped * sin), dim=-1)
    return whole.to(torch.bfloat16).to(torch.float32)


def quantise(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 [..., 128] -> (E4M3 codes uint8 [..., 128], power-of-two scale float32 [...]).

    NaN elements become code 0x7F and do not count towards the scale.
    """
    amax = x.abs().masked_fill(x.isnan(), 0.0).amax(-1).clamp_min(AMAX_FLOOR)
    scale = ue8m0.decode(ue8m0.encode_amax(amax, e4m3.LARGEST))
    return e4m3.encode(x / scale[..., None]), scale
