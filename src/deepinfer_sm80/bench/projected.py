"""What a time measured on another GPU would be on an Ampere GPU: a projection, never a measurement.

The call is taken to reach the same share of max(bytes, flops) there. For calls of a few microseconds, which wait for
launches and latency more than for memory, that overstates the time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from deepinfer_sm80.bench.statistics import least_us

if TYPE_CHECKING:
    from deepinfer_sm80.ops.contract import Cost

GPUS = {
    "A100 80GB": (0.9 * 2.039e12, 0.8 * 312e12),
    "RTX 3090": (0.9 * 936e9, 0.8 * 71e12),
}
"""Bytes/s and bfloat16 FLOP/s that a large copy and a large dot are assumed to reach: 0.9 and 0.8 of NVIDIA's data
sheets (A100 80GB SXM; GeForce RTX 3090 with float32 accumulation, half of its float16 rate)."""


def projected_us(cost: Cost, p50_us: float, copy_rate: float, dot_rate: float) -> dict[str, float]:
    """Microseconds by GPU. ``copy_rate``, ``dot_rate``: the ceilings of the run in which ``p50_us`` was measured."""
    share = least_us(cost, copy_rate, dot_rate) / p50_us
    return {gpu: round(least_us(cost, *rates) / share, 2) for gpu, rates in GPUS.items()} if share else {}
