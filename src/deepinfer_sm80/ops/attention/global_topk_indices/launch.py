"""Launcher of global_topk_indices. The maths is in reference.py beside this file."""

from __future__ import annotations

import torch

from deepinfer_sm80.ops.checks import Shapes

_INT32_MAX = 2**31 - 1
_ROWS_AT_ONCE = 1 << 12  # int64 temporaries of 4096 * 512 * 8 = 17 MB
_FLAGS = (torch.bool, torch.int32, torch.int64, torch.uint8, torch.int8)


def global_topk_indices(
    topk_indices: torch.Tensor,
    token_to_req_indices: torch.Tensor,
    block_table: torch.Tensor,
    block_size: int,
    is_valid_token: torch.Tensor,
    *,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``out``: (int32 [T, W], rows may be strided; int32 [T]), overwritten whole and returned."""
    s = Shapes("global_topk_indices")
    s.check_view(topk_indices, "topk_indices", ("T", "W"), torch.int32)
    s.check_view(token_to_req_indices, "token_to_req_indices", ("tokens",), torch.int32, torch.int64)
    s.require(s["tokens"] >= s["T"], "token_to_req_indices", f"at least T={s['T']} long", s["tokens"])
    s.check_view(block_table, "block_table", ("R", "C"), torch.int32)
    s.check_view(is_valid_token, "is_valid_token", ("T",), *_FLAGS)
    s.require(block_size >= 1, "block_size", "1 or more", block_size)
    if out is None:
        indices = torch.empty((s["T"], s["W"]), dtype=torch.int32, device=topk_indices.device)
        lens = torch.empty(s["T"], dtype=torch.int32, device=topk_indices.device)
    else:
        indices, lens = out
        s.check_view(indices, "out[0]", ("T", "W"), torch.int32)
        s.check(lens, "out[1]", ("T",), torch.int32)

    if s["T"] == 0:
        return indices, lens
    if s["W"] * s["R"] * s["C"] == 0:
        return indices.fill_(-1), lens.zero_()
    ordinal = torch.arange(1, s["W"] + 1, device=indices.device)
    for begin in range(0, s["T"], _ROWS_AT_ONCE):
        rows = slice(begin, min(begin + _ROWS_AT_ONCE, s["T"]))
        request = token_to_req_indices[rows].long()
        known = (is_valid_token[rows] != 0) & (request >= 0) & (request < s["R"])
        local = topk_indices[rows].long()
        column = local.clamp_min(0) // block_size
        block = block_table[request.clamp(0, s["R"] - 1)[:, None], column.clamp_max(s["C"] - 1)].long()
        slot = block * block_size + local % block_size
        valid = known[:, None] & (local >= 0) & (column < s["C"]) & (block >= 0) & (slot <= _INT32_MAX)
        indices[rows] = torch.where(valid, slot, -1)
        lens[rows] = (valid * ordinal).amax(-1)
    return indices, lens
