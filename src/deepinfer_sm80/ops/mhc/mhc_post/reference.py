"""Write a sublayer's output back into the residual streams.

    out[t, j, h] = post_mix[t, j] * x[t, h] + sum_i comb[t, i, j] * residual[t, i, h]

T tokens, S = 4 streams, H hidden. x bfloat16 [T, H]; residual bfloat16 [T, S, H]; post_mix float32 [T, S]; comb float32
[T, S, S], summed over its first index i; result bfloat16 [T, S, H]. Accumulate in float32; round once, to bfloat16.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from deepinfer_sm80.ops.contract import Cost, OpSpec, Tolerance

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any


def mhc_post(x: torch.Tensor, residual: torch.Tensor, post_mix: torch.Tensor, comb: torch.Tensor) -> torch.Tensor:
    mixed = torch.einsum("tij,tih->tjh", comb, residual.float())
    return (post_mix[:, :, None] * x.float()[:, None, :] + mixed).bfloat16()


def cases(device: str) -> Iterator[tuple[str, dict[str, Any]]]:
    for tokens, hidden in ((0, 128), (1, 128), (3, 200), (5, 1280), (2, 5120)):
        g = torch.Generator(device).manual_seed(tokens * 8191 + hidden)

        def randn(*shape: int, dtype: torch.dtype = torch.float32, g: torch.Generator = g) -> torch.Tensor:
            return torch.randn(shape, generator=g, device=device).to(dtype)

        yield (
            f"T{tokens}-H{hidden}",
            {
                "x": randn(tokens, hidden, dtype=torch.bfloat16),
                "residual": randn(tokens, 4, hidden, dtype=torch.bfloat16),
                "post_mix": randn(tokens, 4),
                "comb": randn(tokens, 4, 4),
            },
        )


def cost(x: torch.Tensor, residual: torch.Tensor, post_mix: torch.Tensor, comb: torch.Tensor) -> Cost:
    moved = (x, residual, residual, post_mix, comb)  # residual twice: read, and written as out
    return Cost(bytes=sum(t.nbytes for t in moved), flops=2 * 5 * residual.numel())


# One bf16 rounding each side: at most 1 ulp apart unless a value sits on a rounding boundary.
SPEC = OpSpec(mhc_post, cases, Tolerance(ulps=1.0, rms=2.0**-9), cost)
