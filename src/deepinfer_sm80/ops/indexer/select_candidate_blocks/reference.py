"""The blocks of columns worth scoring in later layers: the topk_blocks best of every row.

    n           = clamp(row_lens[t], 0, S)
    score[t, b] = max of logits[t, c] over b * block_size <= c < min((b + 1) * block_size, n)

NaN counts as -inf. The block of the newest column, (n - 1) // block_size, is always kept; then blocks by descending
score, the lowest block first between equal scores; blocks of score -inf are dropped. Written in ascending order, then
-1.

logits float32 [T, S]; row_lens int32 (or int64) [T]. Returns int32 [T, topk_blocks].
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from deepinfer_sm80.ops.contract import Cost, OpSpec, Tolerance

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any


def select_candidate_blocks(
    logits: torch.Tensor, row_lens: torch.Tensor, topk_blocks: int, block_size: int
) -> torch.Tensor:
    rows = []
    for t, length in enumerate(row_lens.tolist()):
        row = logits[t, : max(length, 0)].tolist()
        clean = [v if v == v else float("-inf") for v in row]
        score = {c // block_size: max(clean[c : c + block_size]) for c in range(0, len(clean), block_size)}
        newest = (len(row) - 1) // block_size
        ranked = sorted((b != newest, -v, b) for b, v in score.items() if v > float("-inf") or b == newest)
        best = sorted(b for _, _, b in ranked[:topk_blocks])
        rows.append(best + [-1] * (topk_blocks - len(best)))
    return torch.tensor(rows, dtype=torch.int32, device=logits.device).view(len(rows), topk_blocks)


def cases(device: str) -> Iterator[tuple[str, dict[str, Any]]]:
    # name: S, topk_blocks, lengths
    layouts: dict[str, tuple[int, int, list[int]]] = {
        "T0": (50, 4, []),
        "T2-S0": (0, 4, [0, 9]),
        "T1-S1": (1, 4, [1]),
        "T9-S203-k5": (203, 5, [0, 1, 7, 8, 9, 41, 203, 1 << 30, -3]),
        "T2-S16500-k2048": (16500, 2048, [16497, 16384]),
    }
    for name, (width, topk_blocks, lengths) in layouts.items():
        g = torch.Generator(device).manual_seed(width)
        logits = torch.randn(len(lengths), width + 5, generator=g, device=device)[:, :width]
        if width > 200:
            logits[:, 3::29], logits[:, 7::31] = 3.5, 3.5  # ties at the cut
            logits[:, 2::13], logits[:, 16:24], logits[:, 50] = float("nan"), float("-inf"), float("inf")
            logits[0] = float("inf")  # the newest block must survive equals
        yield (
            name,
            {
                "logits": logits,
                "row_lens": torch.tensor(lengths, dtype=torch.int32, device=device),
                "topk_blocks": topk_blocks,
                "block_size": 8,
            },
        )


def cost(logits: torch.Tensor, row_lens: torch.Tensor, topk_blocks: int, block_size: int) -> Cost:
    read = int(row_lens.clamp(0, logits.shape[1]).sum())
    return Cost(bytes=4 * read + row_lens.nbytes + 4 * logits.shape[0] * topk_blocks, flops=read)


SPEC = OpSpec(select_candidate_blocks, cases, Tolerance.exact(), cost)
