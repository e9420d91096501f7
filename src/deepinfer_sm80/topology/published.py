"""What other people published for this model on 64-GB Ampere cards, and the one setting it is compared under."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from deepinfer_sm80.topology.footprint import GIB
from deepinfer_sm80.topology.layout import Layout, Setting, memory

if TYPE_CHECKING:
    from deepinfer_sm80.topology.footprint import Weights
    from deepinfer_sm80.topology.layout import Memory

# One setting for every point. Batches in flight: one per stage, because 4,648,480 is int(39,814 blocks / 8,981 blocks
# per request x 1,048,576), and 8,981 = 8,192 + 4 x (196 + 1) + 1 is what 3 x 2,048 tokens in flight reserve. Not a
# proof: other whole numbers give the same figure, of which 4 x 1,536 tokens in flight is one.
SETTING = Setting(async_scheduling=False)
USABLE = 63.4  # GiB of a 64-GB card


@dataclasses.dataclass(frozen=True, slots=True)
class Capacity:
    """A published capacity in tokens, ``low`` to ``high``. ``context``: as published, or ours where nothing is said.

    ``readings``: what else the publication could mean, as changes of the layout and of the setting; ``rest``: what
    explains the deviation.
    """

    what: str
    layout: Layout
    low: int
    high: int
    context: int
    rest: str
    readings: tuple[tuple[str, Layout, dict[str, int]], ...] = ()

    def nearest(self, tokens: int) -> int:
        """The number of the published range that is nearest to ``tokens``."""
        return min(max(tokens, self.low), self.high)

    def deviation(self, tokens: int) -> float:
        """Relative distance of ``tokens`` from the published range, 0 inside it."""
        return tokens / self.nearest(tokens) - 1


_PP6 = Layout((7, 7, 7, 7, 7, 5), (1,) * 6)
_PP6_EVEN = Layout((6, 7, 7, 7, 7, 6), (1,) * 6)
_ASYMMETRIC = Layout((14, 26), (2, 4))
_PP8 = Layout((5,) * 8, (1,) * 8)
CAPACITIES: tuple[Capacity, ...] = (
    Capacity(
        "six 64-GB GPUs, TP2 x PP3, 14,14,12, speculation 5",
        Layout((14, 14, 12), (2, 2, 2)),
        4_648_480,
        4_648_480,
        1_048_576,
        "what the run's graphs, CUDA context and NCCL took: 0.18 GiB more than the 1.15 taken for all",
    ),
    Capacity(
        "six 64-GB GPUs, PP6",
        _PP6,
        4_500_000,
        4_700_000,
        1_048_576,
        "the split, not stated: this is the best one; and 0.14 GiB of activations for the 64 heads of TP1",
        (("vLLM's even split 6,7,7,7,7,6", _PP6_EVEN, {}), ("the same, no speculation", _PP6_EVEN, {"speculation": 0})),
    ),
    Capacity(
        'six 64-GB GPUs, TP2 then TP4 ("about 6M")',
        _ASYMMETRIC,
        6_000_000,
        6_000_000,
        1_048_576,
        "speculation and context, not stated: the draft takes 2.5 GiB of a TP4 rank and makes a block 152,064 B, eight "
        "windows, instead of 138,240 B; the rows that prefill gathers take 4 GiB at 1M and 1 GiB at 256K",
        (
            ("no speculation", _ASYMMETRIC, {"speculation": 0}),
            ("context 131,072", _ASYMMETRIC, {"context": 131_072}),
            ("context 262,144", _ASYMMETRIC, {"context": 262_144}),
        ),
    ),
    Capacity(
        "eight 64-GB GPUs, PP8 at 0.95",
        _PP8,
        6_170_000,
        6_170_000,
        131_072,
        "context and speculation, not stated: 131,072 because the run's prompts were 105K, 5 as in the first run",
        (("context 1,048,576", _PP8, {"context": 1_048_576}), ("no speculation", _PP8, {"speculation": 0})),
    ),
)


# Other assumptions, each applied to every point: what it changes of ``SETTING``.
VARIANTS: tuple[tuple[str, dict[str, int | float | bool]], ...] = (
    ("the setting above", {}),
    ("asynchronous scheduling: PP + 1 batches in flight", {"async_scheduling": True}),
    ("8,192 tokens per batch", {"batched_tokens": 8192}),
    ("no speculation", {"speculation": 0}),
    ("experts rounded to 128, as vLLM alone does", {"stock_rounding": True}),
    ("nothing for graphs, CUDA context and NCCL", {"graphs": 0.0, "context_and_nccl": 0.0}),
    ("utilisation 0.92, vLLM's default", {"utilisation": 0.92}),
    ("context 262,144", {"context": 262_144}),
    ("context 131,072", {"context": 131_072}),
)


def compare(found: Weights, point: Capacity, **changes: float | bool) -> int:
    """Tokens that the planner gives for ``point`` under ``SETTING`` with ``changes``."""
    return _planned(found, point, changes).tokens


def gib_to_go(found: Weights, point: Capacity) -> float:
    """GiB that the rank with the fewest blocks would have to have more, for its cache, to give what was published."""
    kept = _planned(found, point, {})
    stage, blocks = kept.short_stage, -(-point.nearest(kept.tokens) * kept.per_request // point.context)
    return (blocks * kept.block_bytes[stage] - kept.kv_bytes[stage]) / GIB


def _planned(found: Weights, point: Capacity, changes: dict[str, float | bool]) -> Memory:
    setting = dataclasses.replace(SETTING, **{"context": point.context, **changes})  # type: ignore[arg-type]
    return memory(found, point.layout, setting, USABLE)


def other_readings(found: Weights, point: Capacity) -> list[tuple[str, int]]:
    """The same for what else the publication could mean."""
    out = []
    for name, layout, changes in point.readings:
        setting = dataclasses.replace(SETTING, **{"context": point.context, **changes})  # type: ignore[arg-type]
        out.append((name, memory(found, layout, setting, USABLE).tokens))
    return out


# Six GA100 64 GB, TP2 x PP3, 14,14,12, speculation 5, 1,048,576 tokens of context, kernels of this kind.
PREFILL_64K = 4_507.0
PREFILL_16K = 4_037.0
ONE_STREAM = 160.8  # output tokens/s
