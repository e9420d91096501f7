"""Triton launcher of global_topk_indices. The maths is in reference.py beside this file."""

from __future__ import annotations

import torch

from deepinfer_sm80.ops.attention.global_topk_indices.tuning import slots
from deepinfer_sm80.ops.checks import Shapes
from deepinfer_sm80.ops.variants import run

_FLAGS = (torch.bool, torch.int32, torch.int64, torch.uint8, torch.int8)
_REQUEST_IDS = {torch.int32: slots("i32"), torch.int64: slots("i64")}


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
    # vLLM's flags are bool; wider integers are narrowed first, because 256 has no low byte
    flags = is_valid_token if is_valid_token.element_size() == 1 else is_valid_token != 0
    run(
        _REQUEST_IDS[token_to_req_indices.dtype],
        (s["T"],),
        topk_indices,
        token_to_req_indices,
        block_table,
        flags.view(torch.uint8),
        indices,
        lens,
        s["W"],
        s["R"],
        s["C"],
        block_size,
        topk_indices.stride(0),
        block_table.stride(0),
        indices.stride(0),
    )
    return indices, lens
