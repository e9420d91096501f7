"""The two rates that bound every kernel, measured in the run whose rows they divide: copy and bfloat16 dot."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from deepinfer_sm80.ops.variants import Variant, run

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_ROUNDS = 12


@dataclass(frozen=True, slots=True)
class Ceilings:
    """``copy``: bytes/s read plus written by one large copy. ``dot``: FLOP/s of the best tile of a bfloat16 tl.dot."""

    copy: float
    dot: float


def dot_variants() -> Iterator[Variant]:
    """The tiles that are tried: BLOCK_M, BLOCK_N, BLOCK_K, warps, stages. All fit compute capability 8.0 and 8.6."""
    for m, n, k, warps, stages in ((128, 128, 32, 4, 4), (128, 256, 32, 8, 3), (128, 128, 64, 8, 3)):
        yield Variant(
            "bench_dot",
            f"{m}x{n}x{k}",
            f"{__package__}.device:dot_kernel",
            {"a_ptr": "*bf16", "b_ptr": "*bf16", "out_ptr": "*bf16", "n": "i32"},
            {"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k},
            num_warps=warps,
            num_stages=stages,
        )


def dot(variant: Variant, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    """``out`` = a @ b^T, bfloat16 [n, n], n a multiple of 256."""
    n, tiles = a.shape[0], variant.constants["BLOCK_M"] * variant.constants["BLOCK_N"]
    run(variant, (n * n // tiles,), a, b, out, n)


def measure_ceilings(elapsed_us: Callable[[Callable[[], None]], float], device: str, copied: int, n: int) -> Ceilings:
    """Copy ``copied`` bytes and multiply [n, n] matrices, medians of some rounds after one that does not count.

    ``elapsed_us``: microseconds of a piece of work on ``device``.
    """
    g = torch.Generator(device).manual_seed(0)
    source = torch.randint(0, 256, (copied,), generator=g, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)

    def copy_once() -> None:
        target.copy_(source)

    def median(work: Callable[[], None]) -> float:
        elapsed_us(work)
        return statistics.median(elapsed_us(work) for _ in range(_ROUNDS))

    copy = 2e6 * copied / median(copy_once)

    a, b = (torch.randn((n, n), generator=g, device=device).bfloat16() for _ in range(2))
    out = torch.empty_like(a)

    def product(variant: Variant) -> Callable[[], None]:
        return lambda: dot(variant, a, b, out)

    return Ceilings(copy, max(2e6 * n**3 / median(product(variant)) for variant in dot_variants()))
