"""Triton launcher of indexer_k_norm_rope_store. The maths is in reference.py beside this file."""

from __future__ import annotations

import torch

from deepinfer_sm80.ops.checks import Shapes
from deepinfer_sm80.ops.indexer.indexer_k_norm_rope_store.tuning import DIM, ROPE, STORE
from deepinfer_sm80.ops.kv_cache.layout import INDEX_RECORD_BYTES, num_slots
from deepinfer_sm80.ops.variants import ALIGNMENT, run


def indexer_k_norm_rope_store(
    k_pre: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    compress_ratio: int,
) -> None:
    """As the reference. The page stride must be a multiple of 16 bytes, as vLLM's are."""
    s = Shapes("indexer_k_norm_rope_store")
    s.check_view(k_pre, "k_pre", ("T", DIM), torch.bfloat16)
    s.check_view(positions, "positions", ("T",), torch.int64, torch.int32, dense=0)
    s.check(cos_sin_cache, "cos_sin_cache", ("P", ROPE), torch.float32)
    s.check(norm_weight, "norm_weight", (DIM,), torch.bfloat16)
    s.check_pages(kv_cache, "kv_cache", ("blocks", "block_size"), INDEX_RECORD_BYTES)
    s.check_view(slot_mapping, "slot_mapping", ("S",), torch.int64, torch.int32, dense=0)
    rows, page = s["S"], kv_cache.stride(0)
    s.require(rows <= s["T"], "slot_mapping", f"of at most T={s['T']} rows", f"{rows} rows")
    s.require(compress_ratio >= 1, "compress_ratio", "1 or larger", compress_ratio)
    s.require(rows == 0 or s["P"] > 0, "cos_sin_cache", "a table with at least one position", "no rows")
    s.require(page % ALIGNMENT == 0 or s["blocks"] < 2, "kv_cache", "pages a multiple of 16 bytes apart", page)

    if rows == 0 or num_slots(kv_cache) == 0:
        return
    positions, slot_mapping = positions.to(torch.int64), slot_mapping.to(torch.int64)  # vLLM's dtypes already
    run(
        STORE,
        (rows,),
        k_pre,
        positions,
        cos_sin_cache,
        norm_weight,
        kv_cache,
        slot_mapping,
        k_pre.stride(0),
        positions.stride(0),
        page // ALIGNMENT,
        slot_mapping.stride(0),
        num_slots(kv_cache),
        s["block_size"],
        s["P"],
        compress_ratio,
        eps,
    )
