"""One run: every case, its arms in turn on the same cold tensors, a row for each arm that agrees with the reference."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch

from deepinfer_sm80 import ops
from deepinfer_sm80.bench import gate, projected, providers, statistics
from deepinfer_sm80.bench.lowering import CAPABILITIES
from deepinfer_sm80.ops import variants
from deepinfer_sm80.testing.cloning import clone_arguments

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from deepinfer_sm80.bench.builder import BenchCase
    from deepinfer_sm80.bench.ceilings import Ceilings
    from deepinfer_sm80.bench.gpu import Device, Timed
    from deepinfer_sm80.bench.providers import Arm
    from deepinfer_sm80.bench.rows import Row
    from deepinfer_sm80.ops.contract import Cost

ROUNDS, QUICK_ROUNDS, LEAST_ROUNDS = 40, 8, 5
SECONDS = 0.3
"""Of measured time for one arm of a case; slow baselines have fewer rounds."""

EAGER_CALLS = 20
"""Of an eager round: some copies, the first and the last among them. A chain of PyTorch takes milliseconds a call."""


PROJECTED = ("ours", "vllm")
"""Providers whose code is an Ampere GPU's in its lowering; the others run libraries of the GPU that is there."""


@dataclass(frozen=True, slots=True)
class Run:
    """What all rows of one run have in common. ``facts``: commit, torch, triton, driver and time for the rows.

    ``deadline``: of ``time.monotonic``; no case begins after it.
    """

    device: Device
    lowering: str
    ceilings: Ceilings
    facts: dict[str, str]
    rounds: int = ROUNDS
    deadline: float = float("inf")

    @property
    def native_is_ampere(self) -> bool:
        return self.device.capability == CAPABILITIES.get(self.lowering)


@dataclass(slots=True)
class Outcome:
    """Rows of some cases, and the arms without one: op, case, provider and the reason."""

    rows: list[Row] = field(default_factory=list)
    left_out: list[dict[str, str]] = field(default_factory=list)

    def leave_out(self, case: BenchCase, provider: str, reason: str) -> None:
        self.left_out.append({"op": case.op, "case": case.name, "provider": provider, "reason": reason})


@dataclass(slots=True)
class _Lane:
    """One arm that is ready to be timed. ``ready``: its calls, which own what was made when they were prepared; a graph
    holds addresses alone, and would read whatever lies there later."""

    arm: Arm
    ready: Sequence[Callable[[], Any]]
    timed: Timed
    eager: Timed | None
    occupancy: str
    calls: int
    eager_calls: int
    samples: list[float] = field(default_factory=list)
    eager_samples: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Copies:
    """The arguments of every copy of a case, and how often all of them are called in one graph."""

    arguments: list[dict[str, Any]]
    shared: dict[str, torch.Tensor]
    calls: int
    cost: Cost
    cold: bool


class Watch(Protocol):
    """Is told what happens as it happens."""

    def begin(self, case: BenchCase) -> None:
        """``case`` is about to be measured."""
        ...

    def end(self, case: BenchCase, outcome: Outcome) -> None:
        """Its rows, and the arms without one."""
        ...


class DeviceLostError(RuntimeError):
    """The device takes no more work in this process. ``outcome``: what there is until then."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__("the device takes no more work in this process")
        self.outcome = outcome


def measure(case: BenchCase, run: Run, arms: Sequence[Arm] | None = None) -> Outcome:
    """Time every arm of ``case`` and check it afterwards on the tensors that were timed.

    ``arms``: by default those of ``providers.arms``. An arm that raises, or disagrees, is left out with the reason.
    """
    outcome = Outcome()
    if arms is None:
        arms, missing = providers.arms(case.op, run.lowering, run.native_is_ampere)
        for absent in missing:
            outcome.leave_out(case, absent.provider, absent.reason)
    copies = _copies(case, run.device)
    lanes = []
    for arm in arms:
        try:
            lanes.append(_lane(arm, copies, run))
        except Exception as error:  # whatever a baseline raises must not end the run of the others
            outcome.leave_out(case, arm.provider, sentence(error))
    _time(lanes, run.rounds)
    expected = _expected(case, copies, run.device)
    for lane in lanes:
        try:
            fault = _fault(case, lane, copies, expected, run.device)
        except Exception as error:  # out of memory, or the device's own
            fault = f"could not be compared: {error}"
        if fault:
            outcome.leave_out(case, lane.arm.provider, fault)
        else:
            outcome.rows.append(_row(case, lane, copies, run))
    return outcome


def measure_all(cases: Iterable[BenchCase], run: Run, watch: Watch) -> Outcome:
    """``measure`` of every case. A case that fails, or for which no time is left, is left out for ``ours``.

    Raises DeviceLostError, after ``watch`` was told of the case, where the device takes no more work.
    """
    total = Outcome()
    for case in cases:
        watch.begin(case)
        outcome = Outcome()
        if time.monotonic() > run.deadline:
            outcome.leave_out(case, "ours", "no time was left")
        else:
            try:
                outcome = measure(case, run)
            except Exception as error:  # the other cases are worth their time
                outcome.leave_out(case, "ours", sentence(error))
        total.rows += outcome.rows
        total.left_out += outcome.left_out
        watch.end(case, outcome)
        if not run.device.alive():
            raise DeviceLostError(total)
    return total


def sentence(error: BaseException) -> str:
    """Kind and first lines of an error; CUDA's go on with advice."""
    return f"{type(error).__name__}: {' '.join(str(error).split(chr(10))[:3])[:600]}"


def _copies(case: BenchCase, device: Device) -> _Copies:
    first = case.arguments(device.kind, 0)
    cost = ops.spec(case.op).cost(**first)
    large = 3 * device.l2_bytes
    shared = {name: first[name] for name in case.pools if name in first and _bytes(first[name]) >= large}
    tensors = {n: v for n, v in first.items() if isinstance(v, torch.Tensor) and n not in shared}
    own = sum(map(_bytes, tensors.values())) + cost.bytes  # the result is no larger than the traffic
    clones = statistics.clones_needed(cost.bytes, device.l2_bytes, device.free_bytes() // own)
    rest = [case.arguments(device.kind, seed, shared) for seed in range(1, clones)]
    calls = statistics.calls_in_graph(clones)
    # the device sweeps the cache before each graph: what is used once in it is cold
    cold = clones == calls or clones * cost.bytes >= large
    return _Copies([first, *rest], shared, calls, cost, cold)


def _lane(arm: Arm, copies: _Copies, run: Run) -> _Lane:
    ready = [arm.prepare(kwargs) for kwargs in copies.arguments]
    calls = [ready[i % len(ready)] for i in range(copies.calls)]
    keys = _launched(calls[0])
    occupancy = "native"
    if run.lowering in CAPABILITIES and not run.native_is_ampere and keys:
        try:
            occupancy = run.device.limit_occupancy(sorted(keys), CAPABILITIES[run.lowering])
        except Exception as error:  # private parts of Triton: a time with its own occupancy is worth more than none
            occupancy = f"native, {sentence(error)}"
    some = calls[: EAGER_CALLS - 1] + calls[-1:] if len(calls) > EAGER_CALLS else calls
    timed = run.device.capture(calls) if arm.graphed else run.device.eager(some)
    eager = run.device.eager(some) if arm.eager_too else None
    return _Lane(arm, ready, timed, eager, occupancy, len(calls) if arm.graphed else len(some), len(some))


def _time(lanes: Sequence[_Lane], rounds: int) -> None:
    """Fill the samples: one round to warm up, then every arm as often as SECONDS allow, LEAST_ROUNDS to ``rounds``.

    Every second round runs backwards, so that a drift meets all arms alike.
    """

    def once(lane: _Lane) -> float:
        spent = lane.timed.elapsed_us()
        lane.samples.append(spent / lane.calls)
        if lane.eager is not None and sum(lane.eager_samples) * lane.eager_calls <= SECONDS * 1e6:
            eager = lane.eager.elapsed_us()
            lane.eager_samples.append(eager / lane.eager_calls)
            spent += eager
        return spent

    own = []
    for lane in lanes:
        warm = once(lane)
        own.append(min(rounds, max(LEAST_ROUNDS, int(SECONDS * 1e6 / warm) if warm else rounds)))
    for lane in lanes:
        lane.samples.clear()
        lane.eager_samples.clear()
    forth = list(zip(lanes, own, strict=True))
    for r in range(max(own, default=0)):
        for lane, count in forth if r % 2 == 0 else reversed(forth):
            if statistics.takes_part(r, max(own), count):
                once(lane)


def _launched(call: Callable[[], Any]) -> set[str]:
    """Keys of our variants that one call launches."""
    before = set(variants.launched)
    variants.launched.clear()
    try:
        call()
        return set(variants.launched)
    finally:
        variants.launched.update(before)


def _expected(case: BenchCase, copies: _Copies, device: Device) -> dict[int, gate.Expected]:
    """By number, what the first and the last copy must give: those whose results a lane keeps."""
    found = {}
    for i in sorted({0, len(copies.arguments) - 1}):
        pristine = case.arguments(device.kind, i, copies.shared)
        written = clone_arguments({name: pristine[name] for name in ops.spec(case.op).mutates})
        arguments = {**pristine, **written}
        whole = gate.named_results(case.op, arguments, ops.pytorch(case.op)(**arguments))
        found[i] = gate.expected(case.op, pristine, whole)
    return found


def _fault(case: BenchCase, lane: _Lane, copies: _Copies, expected: Mapping[int, gate.Expected], device: Device) -> str:
    """What the gate says after one more round of the arm alone, over arguments set back to their first state."""
    for i in expected:
        for name in ops.spec(case.op).mutates:  # another arm has written the same values there
            fresh = case.arguments(device.kind, i, copies.shared)[name]
            copies.arguments[i][name].untyped_storage().copy_(fresh.untyped_storage())
    lane.timed.elapsed_us()
    for (i, want), result in zip(expected.items(), lane.timed.results, strict=False):
        finished = lane.arm.finish(copies.arguments[i], result)
        fault = gate.disagreement(case.op, want, copies.arguments[i], finished)
        if fault:
            return f"disagrees: copy {i}: {fault}"
    return ""


def _row(case: BenchCase, lane: _Lane, copies: _Copies, run: Run) -> Row:
    samples = lane.samples
    p20, p50, p80 = (statistics.quantile(samples, q) for q in (0.2, 0.5, 0.8))
    least = statistics.least_us(copies.cost, run.ceilings.copy, run.ceilings.dot)
    row: Row = {
        "op": case.op,
        "case": case.name,
        "provider": lane.arm.provider,
        "lowering": run.lowering,
        "gpu": run.device.name,
        "p20_us": round(p20, 3),
        "p50_us": round(p50, 3),
        "p80_us": round(p80, 3),
        "bytes": copies.cost.bytes,
        "flops": copies.cost.flops,
        "roofline_share": round(least / p50, 4),
        "gate": True,
        **run.facts,
        "family": ops.OPS[case.op],
        "sms": run.device.sms,
        "graphed": lane.arm.graphed,
        "launches": lane.timed.launches,
        "occupancy": lane.occupancy,
        "calls": lane.calls,
        "copies": len(copies.arguments),
        "rounds": len(samples),
        "cold": copies.cold,
        "copy_bytes_per_s": run.ceilings.copy,
        "dot_flops_per_s": run.ceilings.dot,
    }
    if run.lowering in CAPABILITIES and not run.native_is_ampere and lane.arm.provider in PROJECTED:
        row["projected_us"] = projected.projected_us(copies.cost, p50, run.ceilings.copy, run.ceilings.dot)
    if lane.eager_samples:
        row["eager_p50_us"] = round(statistics.quantile(lane.eager_samples, 0.5), 3)
    return row


def _bytes(t: torch.Tensor) -> int:
    return int(t.untyped_storage().nbytes())
