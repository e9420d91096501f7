"""Normalise, rotate, quantise and store the index keys of tokens that close a compression group.

With r = compress_ratio, for every row t < len(slot_mapping) where 0 <= slot_mapping[t] < blocks * block_size and
(positions[t] + 1) % r == 0:

    k = bf16((x * (1 / sqrt(mean(x^2) + eps))) * norm_weight)     x = float32(k_pre[t]), all float32 before bf16
    k = bf16(k with dims 64..127 rotated at positions[t] // r * r)
    s = 2^ceil(log2(max(max |k|, 1e-4) / 448))
    page of the slot: codes = e4m3(k / s), scale = float32 s

Root and quotient are each rounded to nearest: CUDA's rsqrt is off by up to 2 ulp, which changes codes. Rotation as in
indexer_q_rope_quant: float32, products and sum rounded one by one. A NaN element gets code 0x7F and does
not count towards s. Positions outside the table are clamped into it. All other bytes of the cache stay as they are;
no two rows that are stored may name the same slot.

k_pre bfloat16 [T, 128]; positions int64 (or int32) [T]; cos_sin_cache float32 [P, 64] = 32 cos, then 32 sin;
norm_weight bfloat16 [128]; kv_cache uint8 [blocks, block_size, 132], layout in kv_cache/layout.py, page stride padded;
slot_mapping int64 (or int32) [T'], T' <= T. Returns None.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from deepinfer_sm80.ops.contract import Cost, OpSpec, Tolerance
from deepinfer_sm80.ops.formats import e4m3, ue8m0
from deepinfer_sm80.ops.kv_cache.layout import index_key_offsets, num_slots

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any


def indexer_k_norm_rope_store(
    k_pre: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    compress_ratio: int,
) -> None:
    for t, slot in enumerate(slot_mapping.tolist()):
        position = int(positions[t])
        if not 0 <= slot < num_slots(kv_cache) or (position + 1) % compress_ratio != 0:
            continue
        x = k_pre[t].float()
        k = (x * (1.0 / torch.sqrt(x.square().mean() + eps)) * norm_weight.float()).bfloat16().float()
        at = min(max(position // compress_ratio * compress_ratio, 0), cos_sin_cache.shape[0] - 1)
        cos, sin = cos_sin_cache[at, :32], cos_sin_cache[at, 32:]
        even, odd = k[64::2].clone(), k[65::2].clone()
        k[64::2] = even * cos - odd * sin
        k[65::2] = odd * cos + even * sin
        k = k.bfloat16().float()
        amax = torch.where(k.isnan(), 0.0, k.abs()).amax().clamp_min(1e-4)
        scale = ue8m0.decode(ue8m0.encode_ceil(amax / 448.0))
        data, tail = index_key_offsets(kv_cache, slot)
        start = kv_cache.storage_offset()
        kv_cache.as_strided((128,), (1,), start + data).copy_(e4m3.encode(k / scale))
        kv_cache.as_strided((4,), (1,), start + tail).copy_(scale[None].view(torch.uint8))


def cases(device: str) -> Iterator[tuple[str, dict[str, Any]]]:
    for tokens, stored, block_size, ratio in (
        (0, 0, 64, 2),
        (1, 1, 64, 2),
        (3, 3, 128, 1),
        (45, 37, 64, 2),
        (9, 9, 64, 1),
    ):
        g = torch.Generator(device).manual_seed(tokens * 131 + stored)
        blocks, page = 3, block_size * 132 + 192  # padded like vLLM's: 8640 bytes for 64 rows
        storage = torch.randint(0, 256, (blocks * page + 64,), generator=g, device=device).to(torch.uint8)
        angle = torch.rand(80, 32, generator=g, device=device) * 6.2831855
        # Multiples of 1/8 up to 4: the sum of squares is exact in float32 in every order, so bytes can be compared.
        k_pre = torch.randint(-32, 33, (tokens, 128), generator=g, device=device) / 8
        slots = torch.randperm(blocks * block_size, generator=g, device=device)[:stored]
        positions = torch.randint(0, 80, (tokens,), generator=g, device=device)
        if tokens == 1:
            positions[0] = 7
        if tokens > 8:
            slots[0], slots[2], slots[3] = -1, blocks * block_size, 1 << 40
            positions[5], positions[6] = 81 * ratio - 1, -1  # beyond the table; stale padding
            k_pre[4], positions[4] = 0.0, 9
            k_pre[7, 9], positions[7] = float("nan"), 11
        if tokens == 9:
            slots[:] = -1  # nothing to store
        yield (
            f"T{tokens}-stored{stored}-bs{block_size}-r{ratio}",
            {
                "k_pre": k_pre.bfloat16(),
                "positions": positions,
                "cos_sin_cache": torch.cat((angle.cos(), angle.sin()), -1),
                "norm_weight": (1 + torch.randn(128, generator=g, device=device) / 4).bfloat16(),
                "eps": 1e-20,
                "kv_cache": storage.as_strided((blocks, block_size, 132), (page, 132, 1), 32),
                "slot_mapping": slots,
                "compress_ratio": ratio,
            },
        )


def cost(
    k_pre: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    compress_ratio: int,
) -> Cost:
    keys = -(-slot_mapping.numel() // compress_ratio)
    return Cost(bytes=keys * (2 * 128 + 256 + 132) + 16 * slot_mapping.numel(), flops=keys * 128 * 8)


# Exact: the only sum longer than two terms is exact in the cases above. On other data two implementations may differ in
# the last bit of the mean, hence, rarely, in one code.
SPEC = OpSpec(indexer_k_norm_rope_store, cases, Tolerance.exact(), cost, outputs=(), mutates=("kv_cache",))
