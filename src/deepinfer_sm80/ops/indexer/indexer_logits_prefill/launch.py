"""Launcher of indexer_logits_prefill. The maths is in reference.py beside this file."""

from __future__ import annotations

import torch

from deepinfer_sm80.ops.checks import Shapes
from deepinfer_sm80.ops.indexer.vectors import decode_table, look_up

_HEADS, _DIM = 32, 128

# Query rows and keys of one tile: 64 * 32 * 8192 * 4 = 64 MB of scores.
_ROWS_AT_ONCE = 64
_KEYS_AT_ONCE = 8192
# Row-times-column budget of a row chunk: 64 MB of logits, 128 MB of gather indices.
_LOGITS_AT_ONCE = 1 << 24


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
    s.check(q_codes, "q_codes", ("T", _HEADS, _DIM), torch.uint8)
    s.check(weights, "weights", ("T", _HEADS), torch.float32)
    s.check(k_codes, "k_codes", ("S", _DIM), torch.uint8)
    s.check(k_scale, "k_scale", ("S",), torch.float32)
    s.check_view(row_start, "row_start", ("T",), torch.int32, torch.int64, dense=0)
    s.check_view(row_end, "row_end", ("T",), torch.int32, torch.int64, dense=0)
    s.require(max_k >= 0, "max_k", "0 or larger", max_k)
    tokens, keys = s["T"], s["S"]

    out = torch.full((tokens, max_k), float("-inf"), dtype=torch.float32, device=q_codes.device)
    if tokens == 0 or keys == 0 or max_k == 0:
        return out
    table = decode_table(q_codes.device)
    column = torch.arange(max_k, device=q_codes.device)
    rows_at_once = max(1, min(_ROWS_AT_ONCE, _LOGITS_AT_ONCE // max(keys, max_k)))
    for first in range(0, tokens, rows_at_once):
        rows = slice(first, first + rows_at_once)
        logits = _against_all_keys(look_up(table, q_codes[rows]), weights[rows], k_codes, k_scale, table)
        # row t of the answer begins at its own key row_start[t]
        key = row_start[rows, None].to(torch.int64) + column
        inside = (key >= 0) & (key < keys) & (key < row_end[rows, None])
        picked = logits.gather(1, key.clamp(0, keys - 1))
        out[rows] = picked.masked_fill(~inside, float("-inf"))
    return out


def _against_all_keys(
    q: torch.Tensor, weights: torch.Tensor, k_codes: torch.Tensor, k_scale: torch.Tensor, table: torch.Tensor
) -> torch.Tensor:
    """float32 [R, S]: the logits of R queries (float32 [R, 32, 128]) for every key, valid or not.

    The E4M3 values also fit TF32, so the products are exact whatever matmul precision the process has chosen; the head
    sum is elementwise because float32 weights would not be.
    """
    rows, keys = q.shape[0], k_codes.shape[0]
    logits = torch.empty((rows, keys), dtype=torch.float32, device=q.device)
    for first in range(0, keys, _KEYS_AT_ONCE):
        part = slice(first, first + _KEYS_AT_ONCE)
        k = look_up(table, k_codes[part])
        score = torch.matmul(q.view(rows * _HEADS, _DIM), k.t()).view(rows, _HEADS, -1)
        logits[:, part] = score.relu_().mul_(weights[:, :, None]).sum(1) * k_scale[part]
    return logits
