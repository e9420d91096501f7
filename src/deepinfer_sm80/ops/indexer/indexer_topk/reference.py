"""The columns of the topk largest logits of every row.

Eligible: columns c < min(max(row_lens[t], 0), S) whose logit is neither -inf nor NaN and, with candidate_blocks, whose
block c // candidate_block_size is in the row's list (entries outside 0..ceil(S / candidate_block_size)-1 are ignored).
Of these the topk largest; between equal logits (-0.0 equals 0.0) the lowest column wins. Written in ascending column
order, then -1. Exact and the same on every rank.

logits float32 [T, S]; row_lens int32 (or int64) [T]; candidate_blocks int32 [T, NB] or None. Returns int32 [T, topk].
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from deepinfer_sm80.ops.contract import Cost, OpSpec, Tolerance

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any


def indexer_topk(
    logits: torch.Tensor,
    row_lens: torch.Tensor,
    topk: int,
    candidate_blocks: torch.Tensor | None = None,
    candidate_block_size: int = 0,
) -> torch.Tensor:
    rows = []
    for t, length in enumerate(row_lens.tolist()):
        row = logits[t, : max(length, 0)].tolist()
        eligible = [c for c, v in enumerate(row) if v > float("-inf")]
        if candidate_blocks is not None:
            kept = set(candidate_blocks[t].tolist())
            eligible = [c for c in eligible if c // candidate_block_size in kept]
        best = sorted(c for _, c in sorted((-row[c], c) for c in eligible)[:topk])
        rows.append(best + [-1] * (topk - len(best)))
    return torch.tensor(rows, dtype=torch.int32, device=logits.device).view(len(rows), topk)


def cases(device: str) -> Iterator[tuple[str, dict[str, Any]]]:
    # name: S, topk, lengths
    layouts: dict[str, tuple[int, int, list[int]]] = {
        "T0": (700, 512, []),
        "T2-S0": (0, 512, [3, 0]),
        "T1-S1": (1, 512, [1]),
        "T8-S1100": (1100, 512, [0, 1, 511, 512, 513, 1025, 1 << 30, -5]),
        "T3-S203-k7": (203, 7, [203, 6, 8]),
    }
    for name, (width, topk, lengths) in layouts.items():
        g = torch.Generator(device).manual_seed(width)
        logits = torch.randn(len(lengths), width + 5, generator=g, device=device)[:, :width]  # rows of a wider buffer
        if width > 200:
            logits[:, 3::7] = 0.25  # ties that straddle the cut
            logits[:, 5::11], logits[:, 6::11] = -0.0, 0.0
            logits[:, 2::13], logits[:, 4::17], logits[:, 100] = float("-inf"), float("nan"), float("inf")
        lens = torch.tensor(lengths, dtype=torch.int32, device=device)
        yield name, {"logits": logits, "row_lens": lens, "topk": topk}
        blocks = torch.randint(-1, width // 8 + 3, (len(lengths), 90), generator=g, device=device).to(torch.int32)
        if len(lengths) > 2:
            blocks[1], blocks[2, :2] = -1, torch.tensor([1 << 30, -(1 << 31)], device=device)
        yield (
            f"{name}-candidates",
            {
                "logits": logits,
                "row_lens": lens,
                "topk": topk,
                "candidate_blocks": blocks,
                "candidate_block_size": 8,
            },
        )


def cost(
    logits: torch.Tensor,
    row_lens: torch.Tensor,
    topk: int,
    candidate_blocks: torch.Tensor | None = None,
    candidate_block_size: int = 0,
) -> Cost:
    read = 4 * int(row_lens.clamp(0, logits.shape[1]).sum())
    if candidate_blocks is not None:
        read = min(read, 4 * candidate_blocks.numel() * candidate_block_size) + candidate_blocks.nbytes
    return Cost(bytes=read + row_lens.nbytes + 4 * logits.shape[0] * topk, flops=0)


SPEC = OpSpec(indexer_topk, cases, Tolerance.exact(), cost)
