"""Lengths, row numbers and page ids as the kernels read them."""

from __future__ import annotations

import torch

_INT32 = torch.iinfo(torch.int32)


def as_int32(t: torch.Tensor) -> torch.Tensor:
    """int32 values of an int32 or int64 tensor, itself where possible.

    A number beyond int32 is clamped: it stays outside every valid range instead of wrapping round into one.
    """
    return t if t.dtype == torch.int32 else t.clamp(_INT32.min, _INT32.max).to(torch.int32)
