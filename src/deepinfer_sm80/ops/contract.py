"""What an operator promises. No torch at import time, so the command line can list operators anywhere."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Elementwise bound in units in the last place of the output dtype, plus a bound on each row's RMS error."""

    ulps: float
    rms: float

    @classmethod
    def exact(cls) -> Tolerance:
        return cls(ulps=0.0, rms=0.0)

    def interpreted(self) -> Tolerance:
        """For TRITON_INTERPRET=1 only: it truncates float32 to bfloat16 (triton 3.6), GPUs round to nearest."""
        return Tolerance(ulps=self.ulps + 1.0, rms=self.rms + 2.0**-7) if self.ulps else self


@dataclass(frozen=True, slots=True)
class Cost:
    """Least traffic and arithmetic the maths allows; benchmarks divide by it."""

    bytes: int
    flops: int


@dataclass(frozen=True, slots=True)
class OpSpec:
    """Reference, cases, tolerance and least cost of one operator.

    ``reference`` and the launcher share name, parameters and results. ``outputs`` names what is returned, in order
    (empty: the operator returns None); ``mutates`` names the parameters written in place. A parameter in ``mutates``
    is compared as a whole storage, so that bytes between the rows of a strided view count as guard bands.
    ``tolerances`` overrides ``tolerance`` for single outputs or mutated parameters.
    """

    reference: Callable[..., Any]
    cases: Callable[[str], Iterable[tuple[str, Mapping[str, Any]]]]  # device -> (id, kwargs)
    tolerance: Tolerance
    cost: Callable[..., Cost]
    outputs: tuple[str, ...] = ("out",)
    mutates: tuple[str, ...] = ()
    tolerances: Mapping[str, Tolerance] = field(default_factory=dict)

    def tolerance_of(self, name: str) -> Tolerance:
        return self.tolerances.get(name, self.tolerance)
