"""Launcher of rope_quant_insert. The maths is in reference.py beside this file."""

from __future__ import annotations

import torch

from deepinfer_sm80.ops.checks import Shapes
from deepinfer_sm80.ops.formats import e4m3, ue8m0
from deepinfer_sm80.ops.kv_cache.layout import (
    AMAX_FLOOR,
    HEAD_DIM,
    NOPE_DIM,
    NUM_SCALES,
    QUANT_GROUP,
    RECORD_BYTES,
    ROPE_DIM,
    num_slots,
    record_views,
)
from deepinfer_sm80.ops.kv_cache.records import ROWS_AT_ONCE

_LARGEST_SCALE = 254


def rope_quant_insert(
    latent: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    compress_ratio: int,
) -> None:
    s = Shapes("rope_quant_insert")
    s.check(latent, "latent", ("tokens", HEAD_DIM), torch.bfloat16)
    s.check_view(positions, "positions", ("positions",), torch.int64, torch.int32)
    s.check_view(cos_sin_cache, "cos_sin_cache", ("max_pos", ROPE_DIM), torch.float32)
    s.check_pages(kv_cache, "kv_cache", ("blocks", "block_size"), RECORD_BYTES)
    s.check_view(slot_mapping, "slot_mapping", ("T",), torch.int64, torch.int32)
    s.require(compress_ratio >= 1, "compress_ratio", "1 or 2", compress_ratio)
    known = min(s["tokens"], s["positions"])
    s.require(s["T"] <= known, "slot_mapping", f"no longer than latent and positions ({known} rows)", s["T"])

    if s["T"] == 0 or num_slots(kv_cache) == 0:
        return
    s.require(s["max_pos"] > 0, "cos_sin_cache", "a table with at least one row", s["max_pos"])
    for first in range(0, s["T"], ROWS_AT_ONCE):
        rows = slice(first, min(first + ROWS_AT_ONCE, s["T"]))
        _insert(
            latent[rows], positions[rows].long(), cos_sin_cache, kv_cache, slot_mapping[rows].long(), compress_ratio
        )


def _insert(
    latent: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    kv_cache: torch.Tensor,
    slots: torch.Tensor,
    ratio: int,
) -> None:
    live = (slots >= 0) & (slots < num_slots(kv_cache)) & ((positions + 1) % ratio == 0)
    # A captured scatter cannot leave rows out, and two rows at one address race. So every dead row repeats the first
    # live one, address and content; with no live row at all, all of them put back the bytes slot 0 has.
    some, fallback = live.any(), live.to(torch.uint8).argmax()
    source = torch.where(live, torch.arange(live.numel(), device=live.device), fallback)
    slot = torch.where(some, slots[source], 0)
    block, row = slot // kv_cache.shape[1], slot % kv_cache.shape[1]

    position = (positions - positions % ratio).clamp(0, cos_sin_cache.shape[0] - 1)
    codes, scales = _quantise(latent[:, :NOPE_DIM])
    rope = _rotate(latent[:, NOPE_DIM:], cos_sin_cache[position])
    pages, scale_pages = record_views(kv_cache)
    data = torch.cat((codes, rope.view(torch.uint8)), dim=-1)[source]
    scales = torch.nn.functional.pad(scales, (0, 1))[source]
    pages[block, row] = torch.where(some, data, pages[0, 0])
    scale_pages[block, row] = torch.where(some, scales, scale_pages[0, 0])


def _quantise(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    groups = x.float().unflatten(-1, (NUM_SCALES, QUANT_GROUP))
    amax = groups.abs().amax(-1).clamp_min(AMAX_FLOOR)
    scales = ue8m0.encode_amax(amax, e4m3.LARGEST).masked_fill(~amax.isfinite(), _LARGEST_SCALE)
    # the inverse of a power of two is exact, and 254 - byte never meets the NaN byte
    return e4m3.encode(groups * ue8m0.decode(254 - scales)[..., None]).flatten(-2), scales


def _rotate(x: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    cos, sin = cos_sin.chunk(2, dim=-1)
    pair = x.float().unflatten(-1, (ROPE_DIM // 2, 2))
    turned = torch.stack((-pair[..., 1], pair[..., 0]), dim=-1)
    rotated: torch.Tensor = pair * cos[..., None] + turned * sin[..., None]
    return rotated.flatten(-2).to(torch.bfloat16)
