"""Launcher of combine_topk_swa_indices. The maths is in reference.py beside this file."""

from __future__ import annotations

import torch

from deepinfer_sm80.ops.checks import Shapes

_ALIGNMENT = 128
_ROWS_AT_ONCE = 1 << 12  # int64 temporaries of 4096 * 640 * 8 = 21 MB


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
    used = topk if compress_ratio else 0
    starts = query_start_loc.long() - query_start_loc[:1]
    for begin in range(0, s["T"], _ROWS_AT_ONCE):
        rows = slice(begin, min(begin + _ROWS_AT_ONCE, s["T"]))
        token = torch.arange(rows.start, rows.stop, device=indices.device)
        # a token belongs to the request numbered by how many end at or before it; empty requests are stepped over
        owner = torch.searchsorted(starts[1:], token, right=True)
        request = owner.clamp(max=s["R"] - 1)
        seq_len = seq_lens[request].long()
        pos = seq_len - (starts[1:][request] - token)
        gather_start = seq_len - gather_lens[request]
        length = ((pos + 1) // compress_ratio).clamp(0, used) if compress_ratio else torch.zeros_like(pos)
        first = torch.maximum((pos - window_size + 1).clamp_min(0), gather_start)
        total = length + (pos - first + 1).clamp_min(0)
        total = torch.where(owner < s["R"], total, 0)

        column = torch.arange(width, device=indices.device)
        window = N + (first - gather_start - length)[:, None] + column
        local = torch.where(window < M, window, -1)
        if used:
            chosen = topk_indices[rows, :used].long()
            chosen = torch.where((chosen >= 0) & (chosen < N), chosen, -1)
            chosen = torch.nn.functional.pad(chosen, (0, width - used))
            local = torch.where(column < length[:, None], chosen, local)
        present = (column < total[:, None]) & (local >= 0)
        indices[rows] = torch.where(present, local + (M * request)[:, None], -1)
        lens[rows] = total
    return indices, lens
