"""Copies of operator arguments that keep strides, offsets and the bytes between rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping


def clone_tensor(t: torch.Tensor) -> torch.Tensor:
    """A tensor of the same size, stride and offset over a copy of the whole storage."""
    copy = torch.empty(0, dtype=t.dtype, device=t.device)
    return copy.set_(t.untyped_storage().clone(), t.storage_offset(), t.size(), t.stride())


def clone_arguments(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    return {name: clone_tensor(v) if isinstance(v, torch.Tensor) else v for name, v in kwargs.items()}


def storage_bytes(kwargs: Mapping[str, Any], name: str) -> torch.Tensor:
    """The whole storage behind an argument as uint8, so that a comparison sees the bytes between its rows."""
    storage = kwargs[name].untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=kwargs[name].device).set_(storage, 0, (storage.nbytes(),), (1,))
