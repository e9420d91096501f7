"""Bounded replay: which rows of a prefill step vLLM computes to the end when ``swa_bounded_replay`` is on, its default.

Decoder side. The layers behind the last KV source see earlier tokens through that source's compressed rows and their
own window only, and only a step's last rows are read again. So a step of q > 128 rows may compute the last 128 alone:

    layers before the last source   every row
    the last source                 every row leaves its window row, compressed row and index key; the last 128 go on
    layers behind it                the last 128 rows; windows begin at max(p - 127, end - 128), end: of the step

    step mode                                                             trims
    eager: no graph, or more tokens than the largest captured size        if q > 128
    PIECEWISE graph, 768 padded tokens or more, replay graphs captured    if q > 128
    PIECEWISE graph otherwise, FULL graph                                 never

A request with prompt log-probabilities keeps every row. One data-parallel rank that trims makes all ranks do so, each
by its own q: pass ``StepMode()`` for them too.

Prefix hit. Window rows are not kept for reuse, compressed rows and index keys are: see ``State.hit``. Every window
begins at max(p - 127, n - 128) for a hit of n tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from deepinfer_sm80.errors import UnsupportedOptionError

if TYPE_CHECKING:
    from deepinfer_sm80.model.config import ModelConfig

TRIM_THRESHOLD = 768
GRAPHS = ("eager", "piecewise", "full")


@dataclass(frozen=True)
class StepMode:
    """How vLLM runs a step: ``graph`` out of GRAPHS; of a piecewise one its ``padded_tokens`` and whether graphs for
    trimmed steps were captured. Raises UnsupportedOptionError for another ``graph``."""

    graph: str = "eager"
    padded_tokens: int = 0
    replay_graphs: bool = True

    def __post_init__(self) -> None:
        if self.graph not in GRAPHS:
            raise UnsupportedOptionError(
                option="graph", found=repr(self.graph), allowed=f"one of {', '.join(GRAPHS)}", remedy="Name the mode."
            )

    def trims(self, rows: int, window: int) -> bool:
        """Whether a prefill step with ``rows`` rows of a request computes only the last ``window`` to the end."""
        large = self.replay_graphs and self.padded_tokens >= TRIM_THRESHOLD
        return rows > window and (self.graph == "eager" or (self.graph == "piecewise" and large))


def last_full_layer(config: ModelConfig) -> int | None:
    """The layer behind which prefill steps may be trimmed: the last KV source. None where vLLM never trims: without a
    source, or with an Engram at or behind it, which needs every row."""
    cut = max(config.kv_source_layer_ids, default=None)
    return None if cut is None or any(layer >= cut for layer in config.engram_layer_ids) else cut
