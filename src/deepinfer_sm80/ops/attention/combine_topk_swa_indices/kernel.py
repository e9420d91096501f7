"""Triton launcher of combine_topk_swa_indices. The maths is in reference.py beside this file."""

from __future__ import annotations

import torch

from deepinfer_sm80.ops.attention.combine_topk_swa_indices.tuning import COMBINE
from deepinfer_sm80.ops.checks import Shapes
from deepinfer_sm80.ops.variants import run

_ALIGNMENT = 128


def combine_topk_swa_indices(
    topk_indices: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    gather_lens: torch.Tensor,
    window_size: int,
    compress_ratio: int,
    topk: int,
    M: int,
    N: int,
    *,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``out``: (int32 [T, width], rows may be strided; int32 [T]), overwritten whole and returned."""
    s = Shapes("combine_topk_swa_indices")
    s.check_view(topk_indices, "topk_indices", ("T", "W"), torch.int32)
    s.check(seq_lens, "seq_lens", ("R",), torch.int32)
    s.check(gather_lens, "gather_lens", ("R",), torch.int32)
    s.check(query_start_loc, "query_start_loc", (s["R"] + 1,), torch.int32)
    s.require(window_size >= 0 and compress_ratio >= 0, "window_size and compress_ratio", "0 or more", "less")
    columns = s["W"] if compress_ratio else topk
    s.require(0 <= topk <= columns, "topk", f"0..{columns}, the width of topk_indices", topk)
    width = -(-(topk + window_size) // _ALIGNMENT) * _ALIGNMENT
    if out is None:
        indices = torch.empty((s["T"], width), dtype=torch.int32, device=topk_indices.device)
        lens = torch.empty(s["T"], dtype=torch.int32, device=topk_indices.device)
    else:
        indices, lens = out
        s.check_view(indices, "out[0]", ("T", width), torch.int32)
        s.check(lens, "out[1]", ("T",), torch.int32)

    if s["T"] == 0:
        return indices, lens
    if s["R"] == 0:
        return indices.fill_(-1), lens.zero_()
    run(
        COMBINE,
        (s["T"],),
        topk_indices,
        query_start_loc,
        seq_lens,
        gather_lens,
        indices,
        lens,
        s["R"],
        topk_indices.stride(0),
        indices.stride(0),
        width,
        window_size,
        max(compress_ratio, 1),
        topk if compress_ratio else 0,
        M,
        N,
    )
    return indices, lens
