"""The weights of a checkpoint as bfloat16 matrices, and the products with them.

A stored value is a 4- or 8-bit code times a power of two: its bfloat16 is exact, unless the exponent leaves bfloat16's
range, and a product with bfloat16 activations is what weight-only kernels compute: float32 accumulation, one rounding.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

from deepinfer_sm80.ops.formats import fp8_block, mxfp4

if TYPE_CHECKING:
    from collections.abc import Mapping


class Source(Protocol):
    """Where tensors come from: ``checkpoint.Reader``, or anything with its two members."""

    @property
    def headers(self) -> Mapping[str, tuple[str, tuple[int, ...]]]: ...

    def load(self, name: str) -> torch.Tensor: ...


class Weights:
    """Tensors of a checkpoint by their released names, on one device."""

    def __init__(self, source: Source, device: torch.device) -> None:
        self.source, self.device = source, device

    def matrix(self, name: str) -> torch.Tensor:
        """``name``.weight as bfloat16 [N, K], dequantised if it is stored as FP8 blocks or MXFP4."""
        weight = self.tensor(f"{name}.weight")
        kind = self.source.headers[f"{name}.weight"][0]
        if kind == "F8_E4M3":
            return fp8_block.decode(weight, self.tensor(f"{name}.scale")).bfloat16()
        return mxfp4.decode(weight, self.tensor(f"{name}.scale")).bfloat16() if kind == "I8" else weight

    def tensor(self, name: str) -> torch.Tensor:
        """The stored tensor: bfloat16, float32 or uint8 codes."""
        return self.source.load(name).to(self.device)

    def norm(self, name: str) -> torch.Tensor:
        """``name``.weight of a norm as float32."""
        return self.tensor(f"{name}.weight").float()


def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x bfloat16 [..., K], weight bfloat16 [N, K] -> float32 [..., N]: exact products, float32 sums."""
    return x.float() @ weight.float().T


def project(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``product`` rounded once to bfloat16. PyTorch's bfloat16 product is that: it sums in float32 on every device."""
    return x @ weight.T


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x bfloat16 or float32 [..., D], weight float32 [D] -> bfloat16: float32 throughout, one rounding."""
    x = x.float()
    return (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight).bfloat16()
