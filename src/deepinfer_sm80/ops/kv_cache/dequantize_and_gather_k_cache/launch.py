"""Launcher of dequantize_and_gather_k_cache. The maths is in reference.py beside this file."""

from __future__ import annotations

import torch

from deepinfer_sm80.ops.checks import Shapes
from deepinfer_sm80.ops.kv_cache.layout import HEAD_DIM, RECORD_BYTES
from deepinfer_sm80.ops.kv_cache.records import ROWS_AT_ONCE, read_records


def dequantize_and_gather_k_cache(
    out: torch.Tensor,
    k_cache: torch.Tensor,
    seq_lens: torch.Tensor,
    gather_lens: torch.Tensor | None,
    block_table: torch.Tensor,
    block_size: int,
    offset: int,
) -> None:
    s = Shapes("dequantize_and_gather_k_cache")
    s.check_view(out, "out", ("R", "maxT", HEAD_DIM), torch.bfloat16)
    s.check_pages(k_cache, "k_cache", ("blocks", "block_size"), RECORD_BYTES)
    s.check(seq_lens, "seq_lens", ("R",), torch.int32)
    if gather_lens is not None:
        s.check(gather_lens, "gather_lens", ("R",), torch.int32)
    s.check_view(block_table, "block_table", ("R", "C"), torch.int32)
    s.require(block_size == s["block_size"], "block_size", f"{s['block_size']}, the rows of a page", block_size)
    s.require(offset >= 0, "offset", "0 or more", offset)

    requests, capacity = s["R"], s["maxT"] - offset
    if requests == 0 or capacity <= 0:
        return
    lengths = (seq_lens if gather_lens is None else gather_lens).to(torch.int64)
    start = seq_lens.to(torch.int64) - lengths
    readable = s["blocks"] * s["block_size"] * s["C"] > 0
    # The trip count follows from shapes alone: lengths stay on the device, so that the call can be captured.
    step = max(1, ROWS_AT_ONCE // requests)
    for first in range(0, capacity, step):
        i = torch.arange(first, min(first + step, capacity), device=out.device)
        target = out[:, offset + first : offset + first + i.numel()]
        wanted = i < lengths[:, None]
        if readable:
            rows = _read(k_cache, block_table, start[:, None] + i, wanted)
        else:
            rows = torch.zeros_like(target)
        target.copy_(torch.where(wanted[..., None], rows, target))


def _read(k_cache: torch.Tensor, table: torch.Tensor, position: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    block_size, columns = k_cache.shape[1], table.shape[1]
    column = torch.div(position, block_size, rounding_mode="floor")
    mapped = wanted & (column >= 0) & (column < columns)
    block = table.gather(1, column.clamp(0, columns - 1)).to(torch.int64)
    return read_records(k_cache, block * block_size + position % block_size, mapped & (block >= 0))
