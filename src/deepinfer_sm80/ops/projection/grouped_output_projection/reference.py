"""One low-rank projection for each group of heads.

    out[t, g, r] = sum_k x[t, g, k] * weight[g, r, k]

x bfloat16 [T, G, K], weight bfloat16 [G, R, K] -> bfloat16 [T, G, R]. Accumulate in float32; round once.
DeepSeek-V4.1: K = 8 heads * 512, R = 1024, 8 groups. Source: vLLM 0.33.0, output projection with bfloat16 ``wo_a``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from deepinfer_sm80.ops.contract import Cost, OpSpec, Tolerance

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any


def grouped_output_projection(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.einsum("tgk,grk->tgr", x.float(), weight.float()).bfloat16().contiguous()


def cases(device: str) -> Iterator[tuple[str, dict[str, Any]]]:
    for T, G, K, R in ((0, 8, 512, 16), (1, 1, 4096, 1024), (3, 2, 4096, 200), (5, 8, 512, 24), (17, 2, 200, 3)):
        g = torch.Generator(device).manual_seed(T * 41 + K)
        x = torch.randn((T, G, K), generator=g, device=device).bfloat16()
        weight = (torch.randn((G, R, K), generator=g, device=device) * K**-0.5).bfloat16()
        yield f"T{T}-G{G}-K{K}-R{R}", {"x": x, "weight": weight}


def cost(x: torch.Tensor, weight: torch.Tensor) -> Cost:
    T, _, K = x.shape
    G, R = weight.shape[:2]
    return Cost(bytes=x.nbytes + weight.nbytes + 2 * T * G * R, flops=2 * T * G * R * K)


# A float32 sum of 4096 products is off by about sqrt(4096) * 2^-24 = 2^-18 of the row's RMS, far below half a bfloat16
# ulp (2^-8) even near cancellation: at most 1 ulp, in values that sit on a rounding boundary.
SPEC = OpSpec(grouped_output_projection, cases, Tolerance(ulps=1.0, rms=2.0**-9), cost)
