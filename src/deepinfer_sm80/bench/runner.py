"""A run from beginning to end: lowering, ceilings, every case of some operators, the table as it grows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deepinfer_sm80.bench import cases, lowering, measure, report

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from deepinfer_sm80.bench.gpu import Device


def run_operators(
    operators: Iterable[str],
    device: Device,
    wanted: str | None = None,
    *,
    quick: bool = False,
    commit: str = "",
    say: Callable[[str], None],
) -> measure.Outcome:
    """Measure the cases of ``operators`` on ``device``; ``say`` gets a line or a table at a time.

    ``wanted``: the lowering, see ``lowering.enter``. ``quick``: one case an operator and fewer rounds. Raises
    BenchmarkError where the lowering cannot be had.
    """
    chosen = list(operators)
    name = lowering.enter(wanted, device.capability)
    ceilings = device.ceilings()
    say(
        f"{device.name}, lowering {name}: copy {ceilings.copy / 1e9:.0f} GB/s (read and written), "
        f"bf16 dot {ceilings.dot / 1e12:.0f} TFLOP/s, both measured now\n"
    )
    rounds = measure.QUICK_ROUNDS if quick else measure.ROUNDS
    run = measure.Run(device, name, ceilings, report.facts(device.driver, commit), rounds)
    listed = [case for case in cases.all_cases() if case.op in chosen and (case.quick or not quick)]
    return measure.measure_all(listed, run, lambda outcome: say(report.table(outcome.rows)) if outcome.rows else None)
