"""The weights of a checkpoint as bfloat16 matrices, and the products with them.

A stored value is a 4- or 8-bit code times a power of two: its bfloat16 is exact, unless the exponent leaves bfloat16's
range, and a product with bfloat16 activations is what weight-only kernels compute: float32 accumulation, one rounding.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch
from torch.nn.functional import pad

from deepinfer_sm80.ops.formats import fp8_block, mxfp4, mxfp8

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from deepinfer_sm80.model.switches import Switches

_ROWS = 32


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


def matmul(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """[T, K] and [N, K] of one dtype -> [T, N], 32 rows at a time, the last ones filled up with zeros.

    The shape of a product decides the order of its sums, that of one row's above all. With one shape for all, a row's
    result does not depend on the rows beside it, so that chunks and single tokens give the bits of a whole prompt.
    """
    blocks = pad(x, (0, 0, 0, -len(x) % _ROWS)).split(_ROWS)
    return torch.cat([block @ weight.T for block in blocks])[: len(x)]


def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x bfloat16 [T, K], weight bfloat16 [N, K] -> float32 [T, N]: exact products, float32 sums."""
    return matmul(x.float(), weight.float())


def project(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``product`` rounded once to bfloat16. PyTorch's bfloat16 product is that: it sums in float32 on every device."""
    return matmul(x, weight)


def input_rounding(switches: Switches) -> Callable[[torch.Tensor], torch.Tensor]:
    """What the input of an FP8 or FP4 matrix goes through, bfloat16 [..., K] -> bfloat16 [..., K]."""
    return as_mxfp8 if switches.activation_quant else unchanged


def as_mxfp8(x: torch.Tensor) -> torch.Tensor:
    """bfloat16 [..., K] -> bfloat16 [..., K]: e4m3 with a power of two per 32, read back."""
    return mxfp8.decode(*mxfp8.encode(x)).bfloat16()


def unchanged(x: torch.Tensor) -> torch.Tensor:
    """x itself."""
    return x


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """float32 of any shape -> float32, by way of float64: PyTorch computes a tensor's last elements, those that do not
    fill a vector register, with another exponential, which may differ by an ulp."""
    return torch.sigmoid(x.double()).float()


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x bfloat16 or float32 [..., D], weight float32 [D] -> bfloat16: float32 throughout, one rounding."""
    x = x.float()
    return (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight).bfloat16()
