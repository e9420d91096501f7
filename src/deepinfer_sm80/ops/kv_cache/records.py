"""Vectorised reading of 584-byte records, shared by the launchers that need whole rows."""

from __future__ import annotations

import torch

from deepinfer_sm80.ops.formats import e4m3, ue8m0
from deepinfer_sm80.ops.kv_cache.layout import NOPE_DIM, NUM_SCALES, QUANT_GROUP, num_slots, record_views

ROWS_AT_ONCE = 1 << 14
"""Rows decoded in one go. One float32 or int32 temporary is 16384 * 448 * 4 = 29 MB and a few are alive at a time."""


def read_records(cache: torch.Tensor, slots: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    """Rows ``slots`` (integer [...], any value) of a cache with at least one slot, as bfloat16 [..., 512].

    Rows that are not ``valid`` (bool [...]), or whose slot does not exist, are zeros whatever the cache holds.
    """
    valid = valid & (slots >= 0) & (slots < num_slots(cache))
    slot = torch.where(valid, slots, 0).to(torch.int64)
    block, row = slot // cache.shape[1], slot % cache.shape[1]
    data, scales = record_views(cache)
    record = data[block, row]
    codes = record[..., :NOPE_DIM].unflatten(-1, (NUM_SCALES, QUANT_GROUP))
    factors = ue8m0.decode(scales[block, row][..., :NUM_SCALES])
    nope = (e4m3.decode(codes) * factors[..., None]).flatten(-2).to(torch.bfloat16)
    rope = record[..., NOPE_DIM:].contiguous().view(torch.bfloat16)
    return torch.where(valid[..., None], torch.cat((nope, rope), dim=-1), 0)
