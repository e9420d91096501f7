"""Launcher preconditions. Raise, never assert: ``python -O`` must not remove them."""

from __future__ import annotations

import torch

from deepinfer_sm80.errors import TensorContractError


class Shapes:
    """Binds symbolic axes across one call: Shapes('op').check(x, 'x', ('T', 4, 'H'), torch.bfloat16)."""

    __slots__ = ("_axes", "_op")

    def __init__(self, op: str) -> None:
        self._op = op
        self._axes: dict[str, int] = {}

    def check(self, t: torch.Tensor, name: str, shape: tuple[str | int, ...], dtype: torch.dtype) -> None:
        actual = t.shape
        ok = len(actual) == len(shape) and t.dtype == dtype and t.is_contiguous()
        if ok:
            for want, got in zip(shape, actual, strict=True):
                bound = want if isinstance(want, int) else self._axes.setdefault(want, got)
                if bound != got:
                    ok = False
                    break
        if not ok:
            axes = ", ".join(f"{a}={self._axes[a]}" if a in self._axes else str(a) for a in shape)
            raise TensorContractError(
                op=self._op,
                name=name,
                expected=f"contiguous {dtype} of shape [{axes}]",
                got=f"{'' if t.is_contiguous() else 'non-contiguous '}{t.dtype} {list(actual)}",
            )

    def __getitem__(self, axis: str) -> int:
        return self._axes[axis]

    def check_view(
        self, t: torch.Tensor, name: str, shape: tuple[str | int, ...], *dtypes: torch.dtype, dense: int = 1
    ) -> None:
        """As ``check`` for a view of a wider buffer: any of ``dtypes``, only the last ``dense`` axes contiguous."""
        ok = len(t.shape) == len(shape) and t.dtype in dtypes and _dense_axes(t) >= dense
        for want, got in zip(shape, t.shape, strict=False):
            ok = ok and got == (want if isinstance(want, int) else self._axes.setdefault(want, got))
        if not ok:
            axes = ", ".join(f"{a}={self._axes[a]}" if a in self._axes else str(a) for a in shape)
            raise TensorContractError(
                op=self._op,
                name=name,
                expected=f"{' or '.join(map(str, dtypes))} of shape [{axes}], last {dense} axes contiguous",
                got=f"{t.dtype} {list(t.shape)} with strides {list(t.stride())}",
            )

    def check_pages(self, t: torch.Tensor, name: str, axes: tuple[str, str], record_bytes: int) -> None:
        """A paged uint8 cache [blocks, block_size, record_bytes]: pages dense inside, apart by a padded stride."""
        self.check_view(t, name, (*axes, record_bytes), torch.uint8, dense=2)
        if t.shape[0] > 1 and t.stride(0) < t.shape[1] * record_bytes:
            raise TensorContractError(
                op=self._op,
                name=name,
                expected=f"pages at least block_size * {record_bytes} = {t.shape[1] * record_bytes} bytes apart",
                got=f"a page stride of {t.stride(0)}",
            )

    def require(self, ok: bool, name: str, expected: str, got: object) -> None:
        """A precondition on a number or on several arguments at once."""
        if not ok:
            raise TensorContractError(op=self._op, name=name, expected=expected, got=got)


def _dense_axes(t: torch.Tensor) -> int:
    """How many trailing axes are contiguous; axes of length 0 or 1 may have any stride."""
    step, dense = 1, 0
    for size, stride in zip(reversed(t.shape), reversed(t.stride()), strict=True):
        if size > 1 and stride != step:
            break
        step, dense = step * max(size, 1), dense + 1
    return dense
