"""Every promise of one operator's contract, tried on the device that is here. ``deepinfer-sm80 verify`` reports it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from deepinfer_sm80 import ops
from deepinfer_sm80.testing.agreement import as_tuple, compare_with_reference, stray_bytes
from deepinfer_sm80.testing.cloning import clone_arguments
from deepinfer_sm80.testing.poison import poisoned_empty

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

INTERPRETED_CASES = 2
"""Cases of an operator that Triton's interpreter runs without a GPU: the smallest that hold any rows."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of one operator. ``form``: kernel or pytorch. ``captured``: True, False, or None without a GPU.

    ``detail``: how closely it agrees, or the first fault in a sentence.
    """

    op: str
    form: str
    cases: int
    captured: bool | None
    ok: bool
    detail: str
    seconds: float


def verify(op: str, device: str) -> Verdict:
    """Run ``op`` on its cases in poisoned memory beside its reference; on a GPU also captured and replayed.

    ``device`` "cuda": every case, compiled. "cpu": the kernel on INTERPRETED_CASES (TRITON_INTERPRET=1 must be set
    before), or every case where PyTorch is the implementation.
    """
    start = time.perf_counter()
    kernel, spec = ops.kernel(op), ops.spec(op)
    run = kernel or ops.pytorch(op)
    cases = list(spec.cases(device))
    if device == "cpu" and kernel is not None:
        cases = sorted((c for c in cases if _size(c[1])), key=lambda case: _size(case[1]))[:INTERPRETED_CASES]
    captured: bool | None = None
    fault, agreement = "", {"bit for bit"}
    for name, kwargs in cases:
        with poisoned_empty():
            found = compare_with_reference(op, kwargs, run)
        strays = stray_bytes(op, kwargs, found.arguments, found.reference_arguments)
        if not found.agrees or strays:
            fault = f"{name}: {found.detail if not found.agrees else 'wrote outside its results: ' + ', '.join(strays)}"
            break
        agreement.add(found.detail)
    if not fault and device == "cuda":
        fault = _replay_fault(op, run, max(cases, key=lambda case: _size(case[1]))[1])
        captured = not fault
    detail = fault or max(agreement, key=len)
    form = "kernel" if kernel is not None else "pytorch"
    return Verdict(op, form, len(cases), captured, not fault, detail, time.perf_counter() - start)


def _size(kwargs: Mapping[str, Any]) -> int:
    tensors = [v for v in kwargs.values() if isinstance(v, torch.Tensor)]
    return 0 if any(t.numel() == 0 for t in tensors) else sum(t.numel() for t in tensors)


def _replay_fault(op: str, run: Callable[..., Any], kwargs: Mapping[str, Any]) -> str:
    """Capture ``run`` on another stream, halve every length, replay, and compare: the fault, or nothing."""
    fixed, stream = clone_arguments(kwargs), torch.cuda.Stream()
    run(**clone_arguments(kwargs))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        out = as_tuple(run(**fixed))
    for name, value in fixed.items():
        if name.endswith("lens") and isinstance(value, torch.Tensor):
            value.copy_(value // 2)
    fresh = clone_arguments(fixed)
    graph.replay()
    torch.cuda.synchronize()

    def replayed(**_: Any) -> tuple[torch.Tensor, ...]:
        return out

    found = compare_with_reference(op, fresh, replayed, written=fixed)
    return "" if found.agrees else f"replayed from a graph with other lengths: {found.detail}"
