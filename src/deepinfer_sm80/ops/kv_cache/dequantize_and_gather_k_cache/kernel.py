"""Triton launcher of dequantize_and_gather_k_cache. The maths is in reference.py beside this file."""

from __future__ import annotations

import torch

from deepinfer_sm80.ops.checks import Shapes
from deepinfer_sm80.ops.kv_cache.dequantize_and_gather_k_cache.tuning import PAGE_UNIT, choose, programs_per_request
from deepinfer_sm80.ops.kv_cache.layout import HEAD_DIM, RECORD_BYTES
from deepinfer_sm80.ops.variants import run


def dequantize_and_gather_k_cache(
    out: torch.Tensor,
    k_cache: torch.Tensor,
    seq_lens: torch.Tensor,
    gather_lens: torch.Tensor | None,
    block_table: torch.Tensor,
    block_size: int,
    offset: int,
) -> None:
    """As the reference; pages must be a multiple of 8 bytes apart."""
    s = Shapes("dequantize_and_gather_k_cache")
    s.check_view(out, "out", ("R", "maxT", HEAD_DIM), torch.bfloat16)
    s.check_pages(k_cache, "k_cache", ("blocks", "block_size"), RECORD_BYTES)
    s.check(seq_lens, "seq_lens", ("R",), torch.int32)
    if gather_lens is not None:
        s.check(gather_lens, "gather_lens", ("R",), torch.int32)
    s.check_view(block_table, "block_table", ("R", "C"), torch.int32)
    s.require(block_size == s["block_size"], "block_size", f"{s['block_size']}, the rows of a page", block_size)
    s.require(offset >= 0, "offset", "0 or more", offset)
    page_stride = k_cache.stride(0) if s["blocks"] > 1 else 0
    s.require(page_stride % PAGE_UNIT == 0, "k_cache", f"pages a multiple of {PAGE_UNIT} bytes apart", page_stride)

    requests, capacity = s["R"], s["maxT"] - offset
    if requests == 0 or capacity <= 0:
        return
    variant = choose(out.stride(0), out.stride(1))
    unit = variant.constants["OUT_UNIT"]
    run(
        variant,
        (requests, programs_per_request(requests, capacity)),
        out,
        k_cache,
        seq_lens,
        seq_lens if gather_lens is None else gather_lens,
        block_table,
        out.stride(0) // unit,
        out.stride(1) // unit,
        page_stride // PAGE_UNIT,
        block_table.stride(0),
        offset,
        capacity,
        s["C"],
        s["blocks"] if block_size else 0,  # pages without rows: nothing can be read
        max(block_size, 1),
    )
