"""One operator, one set of arguments: the launcher beside the reference. ``demo`` and ``verify`` report from this."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from deepinfer_sm80 import ops
from deepinfer_sm80.testing.cloning import clone_arguments, storage_bytes
from deepinfer_sm80.testing.compare import assert_agrees

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from deepinfer_sm80.ops.contract import OpSpec


@dataclass(frozen=True, slots=True)
class Agreement:
    """What came of one comparison.

    ``agrees`` is False with the sentence in ``detail``; otherwise ``detail`` says how closely. ``seconds``: the
    launcher alone, the first call of a kernel included. ``values``: what the launcher returned, as a tuple.
    ``arguments``: its arguments afterwards, mutated ones holding the result; ``reference_arguments``: the reference's.
    """

    op: str
    agrees: bool
    detail: str
    seconds: float
    values: tuple[torch.Tensor, ...]
    arguments: dict[str, Any]
    reference_arguments: dict[str, Any]


def compare_with_reference(
    op: str,
    kwargs: Mapping[str, Any],
    run: Callable[..., Any] | None = None,
    written: dict[str, Any] | None = None,
) -> Agreement:
    """Run ``op`` and its reference on copies of ``kwargs`` and compare every result and mutated argument.

    ``run``: the form to compare; by default what would run on the device of ``kwargs``. ``written``: the arguments that
    hold what it wrote in place, where ``run`` has done its work before.

    Raises nothing for a disagreement: it is in the result. Errors of the operator itself pass through.
    """
    spec, on_cuda = ops.spec(op), any(isinstance(v, torch.Tensor) and v.is_cuda for v in kwargs.values())
    for_launcher, for_reference = clone_arguments(kwargs) if written is None else written, clone_arguments(kwargs)
    launch = run or (ops.launcher(op) if on_cuda else ops.pytorch(op))
    start = time.perf_counter()
    got = as_tuple(launch(**for_launcher))
    if on_cuda:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    want = as_tuple(spec.reference(**for_reference))
    named = list(zip(spec.outputs, got, want, strict=True))
    named += [(name, for_launcher[name], for_reference[name]) for name in spec.mutates]
    agrees, detail = _judge(op, spec, named, on_cuda)
    return Agreement(op, agrees, detail, seconds, got, for_launcher, for_reference)


def stray_bytes(
    op: str, before: Mapping[str, Any], after: Mapping[str, Any], reference: Mapping[str, Any]
) -> list[str]:
    """Tensors of ``before`` that ``op`` changed where it may not: inputs, and bytes outside an exact mutated view.

    ``after`` and ``reference``: the arguments as the operator and as its reference left them. The whole storage is
    compared, so bytes between the rows of a strided view are guard bands.
    """
    spec, wrong = ops.spec(op), []
    for name, value in before.items():
        if not isinstance(value, torch.Tensor):
            continue
        mutated = name in spec.mutates
        if mutated and spec.tolerance_of(name).ulps:
            continue
        if not torch.equal(storage_bytes(after, name), storage_bytes(reference if mutated else before, name)):
            wrong.append(name)
    return wrong


def as_tuple(value: Any) -> tuple[torch.Tensor, ...]:
    """What an operator returned, as a tuple: empty for None."""
    return () if value is None else value if isinstance(value, tuple) else (value,)


def _judge(
    op: str, spec: OpSpec, named: list[tuple[str, torch.Tensor, torch.Tensor]], on_cuda: bool
) -> tuple[bool, str]:
    bounds = []
    for name, got, want in named:
        bound = spec.tolerance_of(name) if on_cuda else spec.tolerance_of(name).interpreted()
        try:
            assert_agrees(f"{op}.{name}", got, want, bound)
        except AssertionError as error:
            return False, str(error)
        bounds.append(0.0 if got.equal(want) else bound.ulps)
    worst = max(bounds, default=0.0)
    return True, "bit for bit" if worst == 0 else f"within {worst:g} ulp"
