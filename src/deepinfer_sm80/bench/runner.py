"""A run from beginning to end: lowering, ceilings, every case of some operators, the table as it grows."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING

from deepinfer_sm80.bench import cases, flashmla, lowering, measure, report

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable

    from deepinfer_sm80.bench.builder import BenchCase
    from deepinfer_sm80.bench.gpu import Device


class Silent:
    """Watches and says nothing."""

    def begin(self, case: BenchCase) -> None:
        """Nothing to say."""

    def end(self, case: BenchCase, outcome: measure.Outcome) -> None:
        """Nothing to say."""


class Saying(Silent):
    """Hands the table of every case to ``say``, and every new reason for which an arm has no row."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.say = say
        self._said: set[tuple[str, str, str]] = set()

    def end(self, case: BenchCase, outcome: measure.Outcome) -> None:
        parts = [report.table(outcome.rows)] if outcome.rows else []
        for item in outcome.left_out:
            reason = (item["op"], item["provider"], item["reason"])
            if reason not in self._said:
                self._said.add(reason)
                parts.append(report.absences([item]))
        if parts:
            self.say("\n".join(parts))


def listed(operators: Iterable[str], quick: bool = False) -> list[BenchCase]:
    """The cases of ``operators``, one of each first, so that a run that is cut short has something of all.

    ``quick``: only those.
    """
    chosen = list(operators)
    found = [case for case in cases.all_cases() if case.op in chosen and (case.quick or not quick)]
    return sorted(found, key=lambda case: not case.quick)


def run_operators(
    operators: Iterable[str],
    device: Device,
    wanted: str | None = None,
    *,
    quick: bool = False,
    commit: str = "",
    say: Callable[[str], None],
    watch: measure.Watch | None = None,
    skip: Container[tuple[str, str]] = (),
    seconds: float = float("inf"),
) -> measure.Outcome:
    """Measure the cases of ``operators`` on ``device``; ``say`` gets a line or a table at a time.

    ``wanted``: the lowering, see ``lowering.enter``. ``quick``: one case an operator and fewer rounds. ``watch``: by
    default says every table. ``skip``: operator and name of cases that are not wanted. No case begins after
    ``seconds``. Raises BenchmarkError where the lowering cannot be had, DeviceLostError.
    """
    begun, chosen = time.monotonic(), list(operators)
    with contextlib.suppress(Exception):  # where it cannot be had, its arms will say why
        flashmla.functions()
    name = lowering.enter(wanted, device.capability)
    say(device.prepare(chosen))
    ceilings = device.ceilings()
    say(
        f"{device.name}, lowering {name}: copy {ceilings.copy / 1e9:.0f} GB/s (read and written), "
        f"bf16 dot {ceilings.dot / 1e12:.0f} TFLOP/s, both measured now\n"
    )
    rounds = measure.QUICK_ROUNDS if quick else measure.ROUNDS
    facts = report.facts(device.driver, commit)
    run = measure.Run(device, name, ceilings, facts, rounds, begun + seconds)
    left = [case for case in listed(chosen, quick) if (case.op, case.name) not in skip]
    return measure.measure_all(left, run, watch or Saying(say))
