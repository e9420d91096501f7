"""Triton launcher of indexer_logits_prefill. The maths is in reference.py beside this file."""

from __future__ import annotations

from functools import cache

import torch

from deepinfer_sm80.hardware import current_capability
from deepinfer_sm80.ops.checks import Shapes
from deepinfer_sm80.ops.indexer.indexer_logits_prefill.tuning import (
    DECODE,
    DECODE_BLOCK,
    DIM,
    HEADS,
    KEYS,
    TOKENS,
    Config,
    logits,
)
from deepinfer_sm80.ops.indexer.row_numbers import as_int32
from deepinfer_sm80.ops.variants import Variant, run

# Queries decoded at once: 4096 * 32 * 128 * 2 = 32 MB of bfloat16.
_ROWS_AT_ONCE = 4096


def indexer_logits_prefill(
    q_codes: torch.Tensor,
    weights: torch.Tensor,
    k_codes: torch.Tensor,
    k_scale: torch.Tensor,
    row_start: torch.Tensor,
    row_end: torch.Tensor,
    max_k: int,
) -> torch.Tensor:
    s = Shapes("indexer_logits_prefill")
    s.check(q_codes, "q_codes", ("T", HEADS, DIM), torch.uint8)
    s.check(weights, "weights", ("T", HEADS), torch.float32)
    s.check(k_codes, "k_codes", ("S", DIM), torch.uint8)
    s.check(k_scale, "k_scale", ("S",), torch.float32)
    s.check_view(row_start, "row_start", ("T",), torch.int32, torch.int64, dense=0)
    s.check_view(row_end, "row_end", ("T",), torch.int32, torch.int64, dense=0)
    s.require(max_k >= 0, "max_k", "0 or larger", max_k)
    tokens, keys = s["T"], s["S"]

    out = torch.full((tokens, max_k), float("-inf"), dtype=torch.float32, device=q_codes.device)
    if tokens == 0 or keys == 0 or max_k == 0:
        return out
    row_start, row_end = as_int32(row_start), as_int32(row_end)
    query = torch.empty((min(tokens, _ROWS_AT_ONCE), HEADS, DIM), dtype=torch.bfloat16, device=q_codes.device)
    for first in range(0, tokens, _ROWS_AT_ONCE):
        rows = slice(first, min(first + _ROWS_AT_ONCE, tokens))
        count, codes = rows.stop - first, q_codes[rows]
        run(DECODE, (-(-codes.numel() // DECODE_BLOCK),), codes, query, codes.numel() // 16)
        run(
            _scoring(out.get_device()),
            (-(-keys // KEYS), -(-count // TOKENS)),
            query,
            weights[rows],
            k_codes,
            k_scale,
            row_start[rows],
            row_end[rows],
            out[rows],
            row_start.stride(0),
            row_end.stride(0),
            count,
            keys,
            max_k,
        )
    return out


@cache
def _scoring(device_index: int) -> Variant:
    """The variant for one GPU; -1: the interpreter."""
    return logits(Config.for_capability(current_capability(device_index) if device_index >= 0 else None))
