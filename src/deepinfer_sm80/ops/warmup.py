"""Compile every kernel variant for the current GPU before it serves: in parallel, into Triton's cache."""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import torch

from deepinfer_sm80.ops.variants import Variant, all_variants

if TYPE_CHECKING:
    from collections.abc import Iterable

_DTYPES = {
    "*bf16": torch.bfloat16,
    "*fp32": torch.float32,
    "*u8": torch.uint8,
    "*i8": torch.int8,
    "*i32": torch.int32,
    "*i64": torch.int64,
}
_VALUES = {"i32": 2, "i64": 2, "fp32": 0.5}


class Warmup:
    """Compilations under way in ``workers`` threads on the current device, started when made.

    ``first``: where in the list this process begins. Ranks of one machine share Triton's cache on disk; those that
    begin at different places find each other's results instead of compiling the same.
    """

    def __init__(self, variants: Iterable[Variant] | None = None, workers: int = 8, first: int = 0) -> None:
        chosen = list(all_variants() if variants is None else variants)
        first %= max(len(chosen), 1)
        self._started, self._device = time.perf_counter(), torch.cuda.current_device()
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="deepinfer-warmup")
        self._futures: list[Future[float]] = [
            self._pool.submit(self._compile, variant) for variant in chosen[first:] + chosen[:first]
        ]

    def wait(self) -> tuple[int, float]:
        """How many variants, and seconds from the start until the last was ready. Raises what a compilation raised."""
        ready = [future.result() for future in self._futures]
        self._pool.shutdown()
        return len(ready), max(ready, default=0.0)

    def _compile(self, variant: Variant) -> float:
        torch.cuda.set_device(self._device)
        compile_variant(variant)
        return time.perf_counter() - self._started


def compile_variant(variant: Variant) -> Any:
    """Compile ``variant`` as ``variants.run`` would, without launching it; Triton's compiled kernel, which it keeps."""
    arguments = [_DTYPES[kind] if kind.startswith("*") else _VALUES[kind] for kind in variant.arguments.values()]
    return variant.function().warmup(
        *arguments, **variant.constants, num_warps=variant.num_warps, num_stages=variant.num_stages, grid=(1,)
    )
