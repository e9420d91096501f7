"""Index scores of decode queries against the paged index-key cache.

    logit[t, c] = k_scale[p] * sum_h weights[t, h] * relu(sum_d q[t, h, d] * k[p, d])

p is row c % block_size of page block_table[t, c // block_size]. Columns c >= context_lens[t], columns beyond the
table's C * block_size and columns whose page id is not in 0..blocks-1 are -inf. q and k are the exactly decoded E4M3
values; dots, head sum and product with k_scale in float32. NaN codes and NaN scales in valid columns give NaN logits.

q_codes uint8 [T, 32, 128]; weights float32 [T, 32]; kv_cache uint8 [blocks, block_size, 132], layout in
kv_cache/layout.py, page stride padded; context_lens int32 (or int64) [T]; block_table int32 (or int64) [T, C] with any
row stride. Returns float32 [T, max_context_len].
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from deepinfer_sm80.ops.contract import Cost, OpSpec, Tolerance
from deepinfer_sm80.ops.formats import e4m3
from deepinfer_sm80.ops.kv_cache.layout import index_key_offsets

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any


def indexer_logits_paged(
    q_codes: torch.Tensor,
    weights: torch.Tensor,
    kv_cache: torch.Tensor,
    context_lens: torch.Tensor,
    block_table: torch.Tensor,
    max_context_len: int,
) -> torch.Tensor:
    blocks, block_size = kv_cache.shape[:2]
    out = torch.full((q_codes.shape[0], max_context_len), float("-inf"), device=q_codes.device)
    for t, length in enumerate(context_lens.tolist()):
        q = e4m3.decode(q_codes[t])
        for column, page in enumerate(block_table[t].tolist()):
            first, last = column * block_size, min((column + 1) * block_size, length, max_context_len)
            if first >= last or not 0 <= page < blocks:
                continue
            data, tail = index_key_offsets(kv_cache, page * block_size)
            start = kv_cache.storage_offset()
            codes = kv_cache.as_strided((last - first, 128), (128, 1), start + data)
            scale = kv_cache.as_strided((last - first, 4), (4, 1), start + tail).clone().view(torch.float32)[:, 0]
            score = torch.einsum("hd,sd->sh", q, e4m3.decode(codes)).relu()
            out[t, first:last] = scale * (weights[t] * score).sum(-1)
    return out


def cases(device: str) -> Iterator[tuple[str, dict[str, Any]]]:
    # name: block_size, table columns, max_context_len, lengths
    layouts: dict[str, tuple[int, int, int, list[int]]] = {
        "T0": (64, 2, 70, []),
        "T1-one-key": (64, 1, 1, [1]),
        "T3-bs64-no-columns": (64, 0, 5, [3, 0, 1]),
        "T5-bs64": (64, 4, 300, [0, 1, 63, 200, 1 << 30]),
        "T4-bs128-odd": (128, 3, 333, [129, -1, 333, 128]),
        "T2-narrow": (64, 5, 65, [320, 66]),
    }
    for name, (block_size, columns, max_context_len, lengths) in layouts.items():
        g = torch.Generator(device).manual_seed(len(name) + columns)
        blocks, page, tokens = 7, block_size * 132 + 192, len(lengths)
        storage = torch.randint(0, 256, (blocks * page + 64,), generator=g, device=device).to(torch.uint8)
        cache = storage.as_strided((blocks, block_size, 132), (page, 132, 1), 32)
        for b in range(blocks):
            codes = e4m3.encode(torch.randn(block_size * 128, generator=g, device=device) * 60)
            scale = torch.exp2(torch.randint(-12, -4, (block_size,), generator=g, device=device).float())
            content = torch.cat((codes, scale.view(torch.uint8)))
            storage[32 + b * page : 32 + b * page + block_size * 132] = content
        table = torch.randint(0, blocks, (tokens, columns + 3), generator=g, device=device).to(torch.int32)
        table[:, columns:] = 1 << 30  # a view of a wider table
        if name == "T5-bs64":
            table[3, 1], table[4, 0], table[4, 2], table[0] = -1, blocks, -(1 << 31), (1 << 31) - 1
            storage[32 + int(table[3, 0]) * page + 9] = 0x7F
        yield (
            name,
            {
                "q_codes": e4m3.encode(torch.randn(tokens, 32, 128, generator=g, device=device) * 60),
                "weights": torch.randn(tokens, 32, generator=g, device=device),
                "kv_cache": cache,
                "context_lens": torch.tensor(lengths, dtype=torch.int32, device=device),
                "block_table": table[:, :columns],
                "max_context_len": max_context_len,
            },
        )


def cost(
    q_codes: torch.Tensor,
    weights: torch.Tensor,
    kv_cache: torch.Tensor,
    context_lens: torch.Tensor,
    block_table: torch.Tensor,
    max_context_len: int,
) -> Cost:
    pairs = int(context_lens.clamp(0, min(max_context_len, block_table.shape[1] * kv_cache.shape[1])).sum())
    moved = q_codes.nbytes + weights.nbytes + 132 * pairs + 4 * q_codes.shape[0] * max_context_len
    return Cost(bytes=moved, flops=pairs * 32 * (2 * 128 + 3))


# The sums of indexer_logits_prefill; its reference derives the bound.
SPEC = OpSpec(indexer_logits_paged, cases, Tolerance(ulps=1024.0, rms=2.0**-19), cost)
