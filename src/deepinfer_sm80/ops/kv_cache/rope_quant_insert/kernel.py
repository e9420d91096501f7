"""Triton launcher of rope_quant_insert. The maths is in reference.py beside this file."""

from __future__ import annotations

import torch

from deepinfer_sm80.ops.checks import Shapes
from deepinfer_sm80.ops.kv_cache.layout import HEAD_DIM, RECORD_BYTES, ROPE_DIM, num_slots
from deepinfer_sm80.ops.kv_cache.rope_quant_insert.tuning import INSERT, PAGE_UNIT
from deepinfer_sm80.ops.variants import run


def rope_quant_insert(
    latent: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    compress_ratio: int,
) -> None:
    """As the reference; pages must be a multiple of 8 bytes apart."""
    s = Shapes("rope_quant_insert")
    s.check(latent, "latent", ("tokens", HEAD_DIM), torch.bfloat16)
    s.check_view(positions, "positions", ("positions",), torch.int64, torch.int32)
    s.check_view(cos_sin_cache, "cos_sin_cache", ("max_pos", ROPE_DIM), torch.float32)
    s.check_pages(kv_cache, "kv_cache", ("blocks", "block_size"), RECORD_BYTES)
    s.check_view(slot_mapping, "slot_mapping", ("T",), torch.int64, torch.int32)
    s.require(compress_ratio >= 1, "compress_ratio", "1 or 2", compress_ratio)
    known = min(s["tokens"], s["positions"])
    s.require(s["T"] <= known, "slot_mapping", f"no longer than latent and positions ({known} rows)", s["T"])
    page_stride = kv_cache.stride(0) if s["blocks"] > 1 else 0
    s.require(page_stride % PAGE_UNIT == 0, "kv_cache", f"pages a multiple of {PAGE_UNIT} bytes apart", page_stride)

    if s["T"] == 0 or num_slots(kv_cache) == 0:
        return
    s.require(s["max_pos"] > 0, "cos_sin_cache", "a table with at least one row", s["max_pos"])
    run(
        INSERT,
        (s["T"],),
        latent,
        positions.long(),
        cos_sin_cache,
        kv_cache,
        slot_mapping.long(),
        compress_ratio,
        s["max_pos"],
        cos_sin_cache.stride(0),
        num_slots(kv_cache),
        s["block_size"],
        page_stride // PAGE_UNIT,
    )
