"""Whether a call could be captured in a CUDA graph, told without a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn, Self
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode

if TYPE_CHECKING:
    from collections.abc import Mapping

# On a GPU these wait for the device, or take a shape from data, or read pageable host memory.
_FORBIDDEN = {
    "aten::_local_scalar_dense",
    "aten::is_nonzero",
    "aten::equal",
    "aten::nonzero",
    "aten::masked_select",
    "aten::unique_consecutive",
    "aten::_unique2",
    "aten::repeat_interleave.Tensor",
    "aten::lift_fresh",  # torch.tensor(...): a copy from the host
}


class HostSyncError(AssertionError):
    """A call did something that CUDA graph capture forbids."""


class NoHostSync(TorchDispatchMode):
    """``with NoHostSync(): launcher(...)`` raises HostSyncError at the first operation that could not be captured."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._methods = [patch.object(torch.Tensor, name, _refused(name)) for name in ("tolist", "numpy", "cpu")]

    def __enter__(self) -> Self:
        for method in self._methods:  # these never reach the dispatcher for a CPU tensor
            method.start()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)  # type: ignore[no-untyped-call]
        for method in self._methods:
            method.stop()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = func._schema.name + (f".{func._overloadname}" if func._overloadname != "default" else "")
        if name in _FORBIDDEN or func._schema.name in _FORBIDDEN:
            raise HostSyncError(f"{name} cannot be captured in a CUDA graph")
        if func._schema.name in ("aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"):
            masks = [i for i in args[1] if i is not None and i.dtype in (torch.bool, torch.uint8)]
            if masks:
                raise HostSyncError(f"{name} with a boolean mask has a shape that depends on data")
        return func(*args, **(kwargs or {}))


def _refused(name: str) -> Any:
    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise HostSyncError(f"Tensor.{name}() cannot be captured in a CUDA graph")

    return refuse
