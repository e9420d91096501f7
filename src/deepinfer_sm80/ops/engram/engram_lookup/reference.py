"""Rows of an Engram table for the hash heads and the vocabulary range this rank owns.

    out[t, j, d] = bf16(e4m3(weight[r, d]) * 2^(scale[r, d // 32] - 127))      r = ids[t, head_start + j] - vocab_start

for j < local_heads and d < 256, if the column head_start + j exists, vocab_start <= id < vocab_end and r < N; else 0.
The product is float32 (exact unless it overflows), rounded once. Scale byte 255 and the NaN codes give NaN, scale
byte 0 is 2^-127. Summed over ranks, vocabulary ranges give the whole table's rows.

weight uint8 [N, 256] and scale uint8 [N, 8], which may be device views of pinned host memory; ids int64 (or int32)
[T, C], any strides. Returns bfloat16 [T, local_heads, 256].
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from deepinfer_sm80.ops.contract import Cost, OpSpec, Tolerance
from deepinfer_sm80.ops.formats import e4m3, ue8m0

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any


def engram_lookup(
    weight: torch.Tensor,
    scale: torch.Tensor,
    ids: torch.Tensor,
    head_start: int,
    local_heads: int,
    vocab_start: int,
    vocab_end: int,
) -> torch.Tensor:
    tokens, heads = ids.shape
    out = torch.zeros((tokens, local_heads, 256), dtype=torch.bfloat16, device=weight.device)
    for t in range(tokens):
        for j in range(max(min(local_heads, heads - head_start), 0)):
            row = int(ids[t, head_start + j])
            if vocab_start <= row < vocab_end and row - vocab_start < weight.shape[0]:
                values = e4m3.decode(weight[row - vocab_start]).view(8, 32)
                out[t, j] = (values * ue8m0.decode(scale[row - vocab_start])[:, None]).flatten().bfloat16()
    return out


def cases(device: str) -> Iterator[tuple[str, dict[str, Any]]]:
    # name: tokens, rows, head_start, local_heads, vocab_start, vocab_end
    layouts = {
        "T0": (0, 40, 0, 24, 0, 40),
        "T1-all-heads": (1, 40, 0, 24, 0, 40),
        "T3-tp8": (3, 40, 21, 3, 0, 40),
        "T5-padded-heads": (5, 40, 20, 7, 0, 40),
        "T37-vocab-shard": (37, 17, 3, 3, 1 << 33, (1 << 33) + 20),
        "T2-no-rows": (2, 0, 0, 3, 0, 0),
        "T2-heads-beyond": (2, 9, 30, 2, 0, 9),
    }
    for name, (tokens, rows, head_start, local_heads, vocab_start, vocab_end) in layouts.items():
        g = torch.Generator(device).manual_seed(tokens)
        weight = torch.randint(0, 256, (rows, 256), generator=g, device=device).to(torch.uint8)
        scale = torch.randint(110, 140, (rows, 8), generator=g, device=device).to(torch.uint8)
        if rows:
            scale[3] = torch.tensor([0, 255, 254, 1, 127, 2, 126, 253], device=device)
        wide = torch.randint(-2, rows + 4, (tokens, 29), generator=g, device=device) + vocab_start
        if tokens > 2:
            wide[0, 21], wide[1, 22], wide[2, 23] = -(1 << 62), 1 << 62, vocab_start + 3
        yield (
            name,
            {
                "weight": weight,
                "scale": scale,
                "ids": wide[:, 2:26],
                "head_start": head_start,
                "local_heads": local_heads,
                "vocab_start": vocab_start,
                "vocab_end": vocab_end,
            },
        )


def cost(
    weight: torch.Tensor,
    scale: torch.Tensor,
    ids: torch.Tensor,
    head_start: int,
    local_heads: int,
    vocab_start: int,
    vocab_end: int,
) -> Cost:
    rows = ids.shape[0] * local_heads
    return Cost(bytes=rows * (256 + 8 + ids.element_size() + 512), flops=rows * 256)


SPEC = OpSpec(engram_lookup, cases, Tolerance.exact(), cost)
