"""Gather the last rows of each request from a paged 584-byte record cache into a dense bfloat16 workspace.

    n = gather_lens[r]  (seq_lens[r] if gather_lens is None),   start = seq_lens[r] - n
    out[r, offset + i] = row(block_table[r, (start + i) // block_size], (start + i) % block_size)      0 <= i < n
    row[d] = bf16(e4m3(code[d]) * 2^(scale[d // 64] - 127)) for d < 448, else the stored bfloat16, bit for bit

out [R, maxT, 512] bfloat16, rows may be strided; k_cache uint8 [blocks, block_size, 584], page stride ``stride(0)``;
seq_lens, gather_lens int32 [R]; block_table int32 [R, C], row stride arbitrary. One rounding, float32 to bfloat16; it
is exact unless the product is a bfloat16 subnormal (a scale below 2^-117).

Rows of ``out`` outside [offset, offset + n) keep what they hold, and rows that do not fit (offset + i >= maxT) are not
written. A row whose block cannot be read (negative position, column >= C, block id outside the cache) is zeros. NaN
codes and a NaN scale byte give NaN.
Source: vLLM 0.33.0, ``dequantize_and_gather_k_cache`` for the fp8_ds_mla record.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from deepinfer_sm80.ops.contract import Cost, OpSpec, Tolerance
from deepinfer_sm80.ops.formats import e4m3, ue8m0
from deepinfer_sm80.ops.kv_cache.layout import (
    DATA_BYTES,
    HEAD_DIM,
    NOPE_DIM,
    NUM_SCALES,
    QUANT_GROUP,
    RECORD_BYTES,
    SCALE_BYTES,
    record_offsets,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

PAD_FILL = 0xFF  # NaN as code, as scale and as bfloat16: a wrong page stride cannot stay unseen


def dequantize_and_gather_k_cache(
    out: torch.Tensor,
    k_cache: torch.Tensor,
    seq_lens: torch.Tensor,
    gather_lens: torch.Tensor | None,
    block_table: torch.Tensor,
    block_size: int,
    offset: int,
) -> None:
    table = block_table.tolist()
    lengths = seq_lens if gather_lens is None else gather_lens
    for r, (seq_len, n) in enumerate(zip(seq_lens.tolist(), lengths.tolist(), strict=True)):
        for i in range(min(n, out.shape[1] - offset)):
            column, row = divmod(seq_len - n + i, block_size)
            block = table[r][column] if 0 <= column < len(table[r]) else -1
            out[r, offset + i] = read_record(k_cache, block * block_size + row) if 0 <= block < len(k_cache) else 0.0


def read_record(k_cache: torch.Tensor, slot: int) -> torch.Tensor:
    """One existing row as bfloat16 [512]."""
    data, scales = record_offsets(k_cache, slot)
    start = k_cache.storage_offset()
    record = k_cache.as_strided((DATA_BYTES,), (1,), start + data)
    exponents = k_cache.as_strided((NUM_SCALES,), (1,), start + scales)
    nope = e4m3.decode(record[:NOPE_DIM]) * ue8m0.decode(exponents).repeat_interleave(QUANT_GROUP)
    return torch.cat((nope.bfloat16(), record[NOPE_DIM:].clone().view(torch.bfloat16)))


def random_cache(g: torch.Generator, device: str, blocks: int, block_size: int, padding: int) -> torch.Tensor:
    """uint8 [blocks, block_size, 584] of finite records whose values are about one, pages ``padding`` bytes apart."""
    stride = block_size * RECORD_BYTES + padding
    storage = torch.full((blocks * stride,), PAD_FILL, dtype=torch.uint8, device=device)
    cache = storage.as_strided((blocks, block_size, RECORD_BYTES), (stride, RECORD_BYTES, 1))
    rows = blocks * block_size
    codes = e4m3.encode(torch.randn((rows, NOPE_DIM), generator=g, device=device) * 64)
    rope = torch.randn((rows, HEAD_DIM - NOPE_DIM), generator=g, device=device).bfloat16().view(torch.uint8)
    scales = torch.randint(120, 123, (rows, SCALE_BYTES), generator=g, device=device, dtype=torch.uint8)
    scales[:, NUM_SCALES] = 0
    for slot in range(rows):
        data_at, scales_at = record_offsets(cache, slot)
        storage[data_at : data_at + DATA_BYTES] = torch.cat((codes[slot], rope[slot]))
        storage[scales_at : scales_at + SCALE_BYTES] = scales[slot]
    return cache


def cases(device: str) -> Iterator[tuple[str, dict[str, Any]]]:
    # requests: (seq_len, gather_len); rows longer than the workspace, empty rows and a negative length included
    shapes = {
        "R0": ([], None, 32, 0, 64),
        "R1-one-token": ([(1, 1)], None, 32, 0, 1),
        "R3-ratio2-page64": ([(97, 97), (0, 0), (64, 64)], None, 64, 0, 100),
        "R4-window-page32": ([(200, 130), (33, 33), (5, 3), (0, 0)], "gather", 32, 7, 139),
        "R2-does-not-fit": ([(60, 60), (10, -4)], "gather", 32, 11, 40),
    }
    for name, (requests, gather, block_size, offset, max_rows) in shapes.items():
        g = torch.Generator(device).manual_seed(len(name) * 977 + max_rows)
        R, columns = len(requests), 7
        cache = random_cache(g, device, 9, block_size, 5 * 8)
        table = torch.randint(0, 9, (R, columns + 2), generator=g, device=device, dtype=torch.int32)
        if R > 1:
            table[0, 1], table[1, 0] = -1, 9  # unreadable blocks
        lens = torch.tensor(requests, dtype=torch.int32, device=device).reshape(R, 2)
        wide = torch.randn((R, max_rows, 520), generator=g, device=device).bfloat16()  # 8 guard dims behind each row
        yield (
            name,
            {
                "out": wide[:, :, :HEAD_DIM],
                "k_cache": cache,
                "seq_lens": lens[:, 0].contiguous(),
                "gather_lens": lens[:, 1].contiguous() if gather else None,
                "block_table": table[:, :columns],
                "block_size": block_size,
                "offset": offset,
            },
        )


def cost(
    out: torch.Tensor,
    k_cache: torch.Tensor,
    seq_lens: torch.Tensor,
    gather_lens: torch.Tensor | None,
    block_table: torch.Tensor,
    block_size: int,
    offset: int,
) -> Cost:
    lengths = seq_lens if gather_lens is None else gather_lens
    rows = int(lengths.clamp(0, max(out.shape[1] - offset, 0)).sum())
    return Cost(bytes=rows * (RECORD_BYTES + 2 * HEAD_DIM), flops=rows * NOPE_DIM)


SPEC = OpSpec(dequantize_and_gather_k_cache, cases, Tolerance.exact(), cost, outputs=(), mutates=("out",))
