"""Device code of indexer_k_norm_rope_store."""

import triton
import triton.language as tl

from deepinfer_sm80.ops.formats.device import fp32_to_bf16, fp32_to_e4m3, mul_rn
from deepinfer_sm80.ops.indexer.indexer_q_rope_quant.device import (
    load_angles,
    magnitude,
    rotate_pairs,
    scale_and_inverse,
)


@triton.jit(
    do_not_specialize=[
        "position_step",
        "slot_step",
        "key_row",
        "page16",
        "slots",
        "block_size",
        "table_rows",
        "ratio",
        "eps",
    ],
    do_not_specialize_on_alignment=["key_ptr", "positions_ptr", "slots_ptr"],
)
def k_norm_rope_store_kernel(
    key_ptr,
    positions_ptr,
    table_ptr,
    norm_ptr,
    cache_ptr,
    slots_ptr,
    key_row,
    position_step,
    page16,
    slot_step,
    slots,
    block_size,
    table_rows,
    ratio,
    eps,
    DIM: tl.constexpr,
    ROPE: tl.constexpr,
):
    """One row of slot_mapping a program. The page stride is ``page16`` times 16 bytes; the cache has ``slots`` rows."""
    t = tl.program_id(0).to(tl.int64)
    NOPE: tl.constexpr = DIM - ROPE
    HALF: tl.constexpr = ROPE // 2
    # where 0 <= slot_mapping[t] < blocks * block_size and (positions[t] + 1) % r == 0
    slot = tl.load(slots_ptr + t * slot_step)
    position = tl.load(positions_ptr + t * position_step)
    if (slot >= 0) & (slot < slots) & ((position + 1) % ratio == 0):
        d = tl.arange(0, NOPE)
        r = tl.arange(0, ROPE)
        row = key_ptr + t * key_row
        plain = tl.load(row + d).to(tl.float32)
        tail = tl.load(row + NOPE + r).to(tl.float32)

        # the key is bf16((x * (1 / sqrt(mean(x^2) + eps))) * norm_weight)
        mean = (tl.sum(plain * plain, axis=0) + tl.sum(tail * tail, axis=0)) * (1.0 / DIM)
        norm = tl.div_rn(1.0, tl.sqrt_rn(mean + eps))
        plain = mul_rn(plain * norm, tl.load(norm_ptr + d).to(tl.float32))
        tail = mul_rn(tail * norm, tl.load(norm_ptr + NOPE + r).to(tl.float32))
        plain = fp32_to_bf16(plain).to(tl.float32)
        even, odd = tl.split(tl.reshape(fp32_to_bf16(tail).to(tl.float32), [HALF, 2]))

        # k = bf16(k with dims 64..127 rotated at positions[t] // r * r); below zero any multiple is clamped to zero
        cos, sin = load_angles(table_ptr, position // ratio * ratio, table_rows, HALF)
        even, odd = rotate_pairs(even, odd, cos, sin)

        # s = 2^ceil(log2(max(max |k|, 1e-4) / 448))
        amax = tl.maximum(tl.max(magnitude(plain), axis=0), tl.max(tl.maximum(magnitude(even), magnitude(odd)), axis=0))
        scale, inverse = scale_and_inverse(amax)

        # page of the slot: codes = e4m3(k / s), scale = float32 s
        page = cache_ptr + slot // block_size * page16 * 16
        at = slot % block_size
        data = page + at * DIM
        tl.store(data + d, fp32_to_e4m3(plain * inverse))
        turned = tl.join(fp32_to_e4m3(even * inverse), fp32_to_e4m3(odd * inverse))
        tl.store(data + NOPE + r, tl.reshape(turned, [ROPE]))
        tl.store((page + block_size * DIM + at * 4).to(tl.pointer_type(tl.float32)), scale)
