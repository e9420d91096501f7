"""What an operator is compared with. An arm that cannot be had says why.

``ours`` is the kernel of this package; ``pytorch`` and ``pytorch-graph`` our vectorised form, eager and captured;
``unfused`` the textbook chain of ``unfused.py``; ``vllm`` vLLM 0.33.0's own kernel compiled as for the lowering,
``vllm-native`` the same as the GPU would have it; ``flashmla`` the attention of vLLM's FlashMLA extension;
``geometry-2-8-128`` vLLM's fused post and pre mix of the residual streams in the geometry that it takes for few tokens
(2 columns a tile, 8 splits, 128 threads).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from deepinfer_sm80 import ops
from deepinfer_sm80.bench import adapters, flashmla
from deepinfer_sm80.bench.unfused import CHAINS

if TYPE_CHECKING:
    from collections.abc import Callable

PROVIDERS = ("ours", "pytorch", "pytorch-graph", "unfused", "vllm", "vllm-native", "flashmla", "geometry-2-8-128")


def _as_it_is(kwargs: dict[str, Any], result: Any) -> Any:
    del kwargs
    return result


@dataclass(frozen=True, slots=True)
class Arm:
    """One implementation under test. ``prepare(kwargs)`` returns the call: views and plans are made before timing.

    ``graphed``: timed as replays of a graph. ``eager_too``: its eager time is recorded in the same row.
    ``finish(kwargs, result)``: the result in the contract's form, for the gate.
    """

    provider: str
    prepare: Callable[[dict[str, Any]], Callable[[], Any]]
    graphed: bool = True
    eager_too: bool = False
    finish: Callable[[dict[str, Any], Any], Any] = _as_it_is


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A provider that does not take part, and why."""

    provider: str
    reason: str


def arms(op: str, lowering: str, native_is_ampere: bool) -> tuple[list[Arm], list[LeftOut]]:
    """The implementations of ``op`` that can run here, ours first, and those that cannot.

    ``lowering``: sm80, sm86 or native. ``native_is_ampere``: the GPU itself is of that capability.
    """
    kernel = ops.kernel(op)
    found = [Arm("ours", _plain(kernel or ops.pytorch(op)))]
    left: list[LeftOut] = []
    if kernel is not None:
        found += [Arm("pytorch", _plain(ops.pytorch(op)), graphed=False), Arm("pytorch-graph", _plain(ops.pytorch(op)))]
    if op in CHAINS:
        found.append(Arm("unfused", _plain(CHAINS[op]), eager_too=True))
    else:
        left.append(LeftOut("unfused", "no chain is defined for this operator"))
    for_ampere = lowering != "native" or native_is_ampere
    vllm = ("vllm", adapters.VLLM) if for_ampere else ("vllm-native", adapters.VLLM_NATIVE)
    others = [vllm, ("flashmla", flashmla.FLASHMLA)]
    if op in adapters.GEOMETRY:
        others.append(("geometry-2-8-128", adapters.GEOMETRY))
    for provider, known in others:
        try:
            if op in known:
                found.append(Arm(provider, known[op](), finish=adapters.FINISH.get(op, _as_it_is)))
            else:
                left.append(LeftOut(provider, "it has no kernel for this operator"))
        except Exception as error:  # an extension that cannot load raises whatever it likes
            left.append(LeftOut(provider, f"{type(error).__name__}: {error}"))
    return found, left


def _plain(function: Callable[..., Any]) -> Callable[[dict[str, Any]], Callable[[], Any]]:
    return lambda kwargs: lambda: function(**kwargs)
