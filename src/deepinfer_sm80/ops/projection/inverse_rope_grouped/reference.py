"""Undo RoPE on the attention output and lay its heads out in groups.

    even' = even * cos[p] + odd * sin[p],  odd' = odd * cos[p] - even * sin[p]      pairs of dims 448..511 of every head
    out[t, g] = heads g * H/G .. (g + 1) * H/G - 1 of token t, one after the other

o bfloat16 [T, H, 512], dim 0 may be strided (heads of a wider buffer); positions int64 or int32 [T], p = positions[t]
clamped into the table's rows (padding rows hold anything); cos_sin_cache float32 [max_pos, 64] (32 cos, then 32 sin).
Result bfloat16 [T, G, H/G * 512] with G = num_groups. Dims 0..447 are copied bit for bit. Rounding: two float32
products, each rounded, then their sum, then once to bfloat16.
Source: vLLM 0.33.0, ``fused_inv_rope_fp8_quant`` without quantisation.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from deepinfer_sm80.ops.contract import Cost, OpSpec, Tolerance

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

HEAD_DIM, NOPE_DIM, HALF = 512, 448, 32


def inverse_rope_grouped(
    o: torch.Tensor, positions: torch.Tensor, cos_sin_cache: torch.Tensor, num_groups: int
) -> torch.Tensor:
    out = o.clone(memory_format=torch.contiguous_format)
    for t in range(len(o)):
        row = cos_sin_cache[min(max(int(positions[t]), 0), len(cos_sin_cache) - 1)]
        cos, sin = row[:HALF], row[HALF:]
        even, odd = o[t, :, NOPE_DIM::2].float(), o[t, :, NOPE_DIM + 1 :: 2].float()
        out[t, :, NOPE_DIM::2] = (even * cos + odd * sin).bfloat16()
        out[t, :, NOPE_DIM + 1 :: 2] = (odd * cos - even * sin).bfloat16()
    return out.view(len(o), num_groups, o.shape[1] // num_groups * HEAD_DIM)


def cases(device: str) -> Iterator[tuple[str, dict[str, Any]]]:
    for T, H, groups, width in ((0, 64, 8, 64), (1, 64, 8, 64), (3, 8, 1, 64), (5, 16, 2, 16), (200, 5, 5, 7)):
        g = torch.Generator(device).manual_seed(T * 71 + H)
        angle = torch.rand((150, HALF), generator=g, device=device) * 6.3
        positions = torch.randint(0, 150, (T,), generator=g, device=device)
        positions[2::3] = 1 << 40  # padding rows
        positions[4::5] = -1
        wide = torch.randn((T, width, HEAD_DIM), generator=g, device=device).bfloat16()
        yield (
            f"T{T}-H{H}of{width}-G{groups}",
            {
                "o": wide[:, width - H :],
                "positions": positions,
                "cos_sin_cache": torch.cat((angle.cos(), angle.sin()), dim=-1),
                "num_groups": groups,
            },
        )


def cost(o: torch.Tensor, positions: torch.Tensor, cos_sin_cache: torch.Tensor, num_groups: int) -> Cost:
    T, H = o.shape[:2]
    return Cost(bytes=2 * o.numel() * o.element_size() + T * (8 + 8 * HALF), flops=T * H * 6 * HALF)


# A GPU may fuse a product and the sum: its float32 result then differs in the last place, which moves a value across a
# bfloat16 rounding boundary in one element of 2^15 or so, by 1 ulp.
SPEC = OpSpec(inverse_rope_grouped, cases, Tolerance(ulps=1.0, rms=2.0**-9), cost)
