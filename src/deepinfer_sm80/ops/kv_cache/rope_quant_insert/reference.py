"""Rotate a latent, quantise it and store it as one 584-byte record of a paged cache.

    ratio = compress_ratio
    p = floor(positions[t] / ratio) * ratio                   (clamped into the table's rows)
    even' = even * cos[p] - odd * sin[p],  odd' = odd * cos[p] + even * sin[p]          pairs of dims 448..511
    scale[g] = 2^ceil(log2(max(amax_g, 1e-4) / 448)),  code[d] = e4m3(x[d] / scale[d // 64])      dims 0..447

latent bfloat16 [>= T, 512]; positions int64 or int32 [>= T]; cos_sin_cache float32 [max_pos, 64] (32 cos, then 32 sin);
kv_cache uint8 [blocks, block_size, 584]; slot_mapping int64 or int32 [T]. Token t is written only if it closes a group,
(positions[t] + 1) % ratio == 0, and its slot exists, 0 <= slot < blocks * block_size; such slots are distinct. Nothing
else in the cache changes; the eighth scale byte of a written record is 0. A record to which two tokens are written is
undefined.

Rounding: RoPE in float32 (each product rounded, then the sum: no fused multiply-add), once to bfloat16. The scale is
exact, decided by exponent bits. Codes round half to even and saturate at 448. A group with a NaN or an infinity gets
scale byte 254, so that both read back as what they are.
Source: vLLM 0.33.0, ``rope_quant_insert`` for the fp8_ds_mla record.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from deepinfer_sm80.ops.contract import Cost, OpSpec, Tolerance
from deepinfer_sm80.ops.formats import e4m3, ue8m0
from deepinfer_sm80.ops.kv_cache.layout import (
    AMAX_FLOOR,
    DATA_BYTES,
    HEAD_DIM,
    NOPE_DIM,
    NUM_SCALES,
    QUANT_GROUP,
    RECORD_BYTES,
    ROPE_DIM,
    SCALE_BYTES,
    num_slots,
    record_offsets,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any


def rope_quant_insert(
    latent: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    compress_ratio: int,
) -> None:
    start = kv_cache.storage_offset()
    for t, slot in enumerate(slot_mapping.tolist()):
        position = int(positions[t])
        if not 0 <= slot < num_slots(kv_cache) or (position + 1) % compress_ratio != 0:
            continue
        p = min(max(position // compress_ratio * compress_ratio, 0), len(cos_sin_cache) - 1)
        codes, scales = quantise(latent[t, :NOPE_DIM])
        rope = rotate(latent[t, NOPE_DIM:], cos_sin_cache[p])
        data_at, scales_at = record_offsets(kv_cache, slot)
        kv_cache.as_strided((DATA_BYTES,), (1,), start + data_at).copy_(torch.cat((codes, rope.view(torch.uint8))))
        record_scales = kv_cache.as_strided((SCALE_BYTES,), (1,), start + scales_at)
        record_scales[:NUM_SCALES] = scales
        record_scales[NUM_SCALES] = 0


def quantise(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """bfloat16 [448] -> codes uint8 [448], scales uint8 [7]."""
    groups = x.float().view(NUM_SCALES, QUANT_GROUP)
    amax = groups.abs().amax(-1).clamp_min(AMAX_FLOOR)
    largest = torch.full_like(amax, e4m3.LARGEST)  # a tensor: CUDA divides by a Python number inexactly
    scales = ue8m0.encode_ceil(amax / largest)
    return e4m3.encode(groups / ue8m0.decode(scales)[:, None]).flatten(), scales


def rotate(x: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    """bfloat16 [64], float32 [64] -> bfloat16 [64]."""
    even, odd = x[0::2].float(), x[1::2].float()
    cos, sin = cos_sin[: ROPE_DIM // 2], cos_sin[ROPE_DIM // 2 :]
    return torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1).flatten().bfloat16()


def cos_sin_table(device: str, rows: int) -> torch.Tensor:
    """float32 [rows, 64] with theta = 10000, for cases and tests."""
    inverse = 10000.0 ** (-torch.arange(0, ROPE_DIM, 2, device=device) / ROPE_DIM)
    angle = torch.arange(rows, device=device)[:, None] * inverse
    return torch.cat((angle.cos(), angle.sin()), dim=-1)


def cases(device: str) -> Iterator[tuple[str, dict[str, Any]]]:
    blocks = 5
    # (tokens in the batch, slots given, ratio, block size): compressed pages hold 64 or 128 rows, the window's 32
    shapes = ((0, 0, 1, 64), (1, 1, 1, 32), (3, 2, 2, 64), (40, 33, 2, 64), (7, 7, 1, 128))
    for latents, tokens, ratio, block_size in shapes:
        g = torch.Generator(device).manual_seed(latents * 31 + block_size)
        stride = block_size * RECORD_BYTES + 48
        storage = torch.randint(0, 256, (blocks * stride,), generator=g, device=device, dtype=torch.uint8)
        spread = torch.randint(-16, 10, (latents, 8), generator=g, device=device).repeat_interleave(64, dim=1)
        latent = torch.randn((latents, HEAD_DIM), generator=g, device=device) * torch.exp2(spread.float())
        latent[1:2, :QUANT_GROUP] = 0.0  # a zero group: the floor decides its scale
        slots = torch.randperm(blocks * block_size, generator=g, device=device)[:tokens]
        slots[3::4] = -1  # padding rows
        slots[5::8] = blocks * block_size  # a slot that does not exist
        yield (
            f"L{latents}-T{tokens}-ratio{ratio}-page{block_size}",
            {
                "latent": latent.bfloat16(),
                "positions": torch.arange(101, 101 + latents, device=device),  # 120 rows in the table: T40 leaves it
                "cos_sin_cache": cos_sin_table(device, 120),
                "kv_cache": storage.as_strided((blocks, block_size, RECORD_BYTES), (stride, RECORD_BYTES, 1)),
                "slot_mapping": slots,
                "compress_ratio": ratio,
            },
        )


def cost(
    latent: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    compress_ratio: int,
) -> Cost:
    rows = slot_mapping.numel() // compress_ratio
    moved = rows * (2 * HEAD_DIM + 4 * ROPE_DIM + RECORD_BYTES) + slot_mapping.nbytes
    return Cost(bytes=moved, flops=rows * (3 * NOPE_DIM + 3 * ROPE_DIM))


SPEC = OpSpec(rope_quant_insert, cases, Tolerance.exact(), cost, outputs=(), mutates=("kv_cache",))
