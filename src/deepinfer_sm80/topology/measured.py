"""Times of whole layouts that were measured, beside what the planner's formulas give for them.

The rows are those of benchmarks/results/*/prove_multi_gpu/*-times.json; tests/topology/test_measured.py holds them
against the files, so that a committed row of another card has to appear here, and with it in every plan for that card.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from deepinfer_sm80.model.config import preset
from deepinfer_sm80.topology.cluster import KNOWN, LINKS, Cluster, Gpu, cluster, same_card
from deepinfer_sm80.topology.cuts import halves
from deepinfer_sm80.topology.footprint import weights
from deepinfer_sm80.topology.layout import Layout, Setting
from deepinfer_sm80.topology.roofline import PROMPT, estimate

if TYPE_CHECKING:
    from collections.abc import Sequence

CHUNK = 2048  # tokens of the measured prompt
FIGURES = {"NVIDIA H200": "H200:141GB:4800GB/s:989TFLOPS"}  # of the cards below that the planner does not know


@dataclasses.dataclass(frozen=True, slots=True)
class Measured:
    """A layout of ``checkpoint`` (a preset) alone on its GPUs: milliseconds of a decode step of one request, and of a
    prompt of 2,048 tokens. ``lowering``: the GPU that the kernels were compiled as for; ``way``: of the all-reduce."""

    gpu: str
    lowering: str
    checkpoint: str
    tp: int
    pp: int
    ep: int
    way: str
    decode_ms: float
    prefill_ms: float
    commit: str

    @property
    def layout(self) -> Layout:
        config = preset(self.checkpoint)
        split = (config.num_hidden_layers,) if self.pp == 1 else halves(config)
        return Layout(split, (self.tp,) * self.pp, ep=self.ep)

    @property
    def name(self) -> str:
        """The layout, and how it reduces where that is not vLLM's default."""
        return self.layout.name + (f", {self.way}" if self.way else "")

    def card(self) -> Gpu | None:
        """The planner's Ampere card of that name; None: it is another."""
        return next((gpu for gpu in KNOWN if same_card(self.gpu, gpu)), None)

    def estimated(self) -> tuple[float, float]:
        """The same two times by the planner's formulas; the chunk is one of a 64K prompt."""
        group = Cluster(self.card() or cluster(f"1x{FIGURES[self.gpu]}").gpu, self.tp * self.pp, link=LINKS["nvlink"])
        setting = Setting(context=CHUNK, streams=1, speculation=0)
        found = estimate(weights(preset(self.checkpoint)), self.layout, setting, group, PROMPT)
        return found.decode_ms, 1e3 * setting.batched_tokens / found.replay_off


ROWS = (
    Measured("NVIDIA H200", "sm80", "layer", 1, 1, 1, "", 2.954, 53.03, "d5cbaa5"),
    Measured("NVIDIA H200", "sm80", "layer", 2, 1, 1, "", 4.79, 70.33, "db5a061"),
    Measured("NVIDIA H200", "sm80", "layer", 2, 1, 2, "", 3.154, 50.51, "a431987"),
    Measured("NVIDIA H200", "sm80", "layer", 2, 1, 1, "NCCL's ring", 5.069, 51.72, "d5cbaa5"),
    Measured("NVIDIA H200", "sm80", "layer", 1, 2, 1, "", 5.62, 66.5, "d5cbaa5"),
)


def of(gpu: Gpu, rows: Sequence[Measured] = ROWS) -> tuple[bool, Sequence[Measured]]:
    """Whether ``gpu`` was measured, and the rows to show for it: its own, else all."""
    own = [row for row in rows if same_card(row.gpu, gpu)]
    return bool(own), own or rows


def none_of(gpu: Gpu, rows: Sequence[Measured] = ROWS) -> str:
    """That nothing was measured on ``gpu``, a clause."""
    other = "" if any(row.card() for row in rows) else " or any other Ampere GPU"
    return f"no layout was measured on {gpu.name}{other}"


def lines(gpu: Gpu, rows: Sequence[Measured] = ROWS) -> list[str]:
    """What was measured on ``gpu``, or that nothing was and how far the formulas are off where something was."""
    here, shown = of(gpu, rows)
    told = [f"Measured on {gpu.name}" if here else f"Measured: {none_of(gpu, rows)}. Elsewhere"]
    told[0] += " (estimated by these formulas / measured, ms; a decode step of one request, a 2,048-token prompt):"
    for row in shown:
        decode, prefill = row.estimated()
        told.append(
            f"  {row.gpu}, {row.checkpoint} checkpoint, {row.name}: {decode:.2f} / {row.decode_ms:.2f}, "
            f"{prefill:.0f} / {row.prefill_ms:.0f}"
        )
    return told


def as_json(gpu: Gpu, rows: Sequence[Measured] = ROWS) -> dict[str, Any]:
    """The same for JSON."""
    here, shown = of(gpu, rows)
    entries = []
    for row in shown:
        decode, prefill = (round(value, 3) for value in row.estimated())
        entries.append(dataclasses.asdict(row) | {"estimated_decode_ms": decode, "estimated_prefill_ms": prefill})
    return {"on_these_gpus": here, "rows": entries}
