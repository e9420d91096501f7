"""Device code of rope_quant_insert."""

import triton
import triton.language as tl

from deepinfer_sm80.ops.formats.device import (
    add_rn,
    bf16_pair_to_fp32,
    fp32_to_bf16_pair,
    fp32_to_e4m3,
    mul_rn,
    sub_rn,
    ue8m0_of_amax,
    ue8m0_to_fp32,
)


@triton.jit(
    do_not_specialize=["ratio", "table_rows", "table_stride", "num_slots", "block_size", "page_units"],
    do_not_specialize_on_alignment=["positions_ptr", "table_ptr", "slots_ptr"],
)
def insert_kernel(
    latent_ptr,
    positions_ptr,
    table_ptr,
    cache_ptr,
    slots_ptr,
    ratio: tl.int32,
    table_rows: tl.int64,
    table_stride: tl.int64,
    num_slots: tl.int64,
    block_size: tl.int32,
    page_units: tl.int64,
    NOPE: tl.constexpr,
    ROPE: tl.constexpr,
    GROUP: tl.constexpr,
    SCALES: tl.constexpr,
    AMAX_FLOOR: tl.constexpr,
    PAGE_UNIT: tl.constexpr,
):
    """One program, one token. The page stride is ``page_units`` * PAGE_UNIT bytes."""
    DATA: tl.constexpr = NOPE + 2 * ROPE
    t = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + t)
    position = tl.load(positions_ptr + t)
    # written only if it closes a group, (positions[t] + 1) % ratio == 0, and its slot exists
    if (slot >= 0) & (slot < num_slots) & ((position + 1) % ratio == 0):
        page = cache_ptr + slot // block_size * page_units * PAGE_UNIT
        row = slot % block_size
        data = page + row * DATA
        latent = latent_ptr + t * (NOPE + ROPE)

        # amax_g: an integer maximum, in which infinity and then NaN are the largest. SCALES groups, the last of them
        # the rotated dims, which is not stored.
        g = tl.arange(0, SCALES)
        d = g[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        x = tl.load(latent + d).to(tl.float32)
        amax = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)
        # scale[g] = 2^ceil(log2(max(amax_g, 1e-4) / 448)), byte 254 for a group with a NaN or an infinity
        floor = tl.full([SCALES], AMAX_FLOOR, tl.float32).to(tl.int32, bitcast=True)
        scale = ue8m0_of_amax(tl.maximum(amax, floor).to(tl.float32, bitcast=True))
        scale = tl.where(amax >= 0x7F800000, 254, scale)
        # code[d] = e4m3(x[d] / scale[d // 64]): the inverse of a power of two is exact, 254 - byte its byte
        code = fp32_to_e4m3(x * ue8m0_to_fp32(254 - scale)[:, None])
        tl.store(data + d, code, mask=d < NOPE)
        # the eighth scale byte of a written record is 0
        scale = tl.where(g < NOPE // GROUP, scale, 0)
        tl.store(page + block_size.to(tl.int64) * DATA + row * SCALES + g, scale.to(tl.uint8))

        # p = floor(positions[t] / ratio) * ratio, clamped into the table's rows
        p = tl.minimum(tl.maximum(position // ratio * ratio, 0), table_rows - 1)
        pair = tl.arange(0, ROPE // 2)
        cos = tl.load(table_ptr + p * table_stride + pair)
        sin = tl.load(table_ptr + p * table_stride + ROPE // 2 + pair)
        even, odd = bf16_pair_to_fp32(tl.load((latent + NOPE).to(tl.pointer_type(tl.int32)) + pair))
        # even' = even * cos - odd * sin,  odd' = odd * cos + even * sin
        turned_even = sub_rn(mul_rn(even, cos), mul_rn(odd, sin))
        turned_odd = add_rn(mul_rn(odd, cos), mul_rn(even, sin))
        rope = (data + NOPE).to(tl.pointer_type(tl.int32))
        tl.store(rope + pair, fp32_to_bf16_pair(turned_even, turned_odd))
