"""This package's Triton kernels, compiled while vLLM reads the weights instead of under the first requests."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from vllm.logger import init_logger

from deepinfer_sm80 import ops
from deepinfer_sm80.ops.variants import all_variants
from deepinfer_sm80.ops.warmup import Warmup

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger("vllm.deepinfer_sm80")

_MOST_WORKERS = 16


def start_warmup(vllm_config: VllmConfig) -> Warmup | None:
    """Begin to compile what this process may launch; None where vLLM was told to warm nothing up."""
    if not vllm_config.kernel_config.enable_jit_warmup:
        return None
    parallel = vllm_config.parallel_config
    variants = [v for v in all_variants() if ops.launcher(v.op) is ops.kernel(v.op)]
    workers = max(1, min(_MOST_WORKERS, (os.cpu_count() or 1) // parallel.local_world_size))
    return Warmup(variants, workers, first=len(variants) * parallel.rank // parallel.world_size)


def finish_warmup(warmup: Warmup | None) -> None:
    """Wait for ``warmup`` and say how long it took."""
    if warmup is not None:
        kernels, seconds = warmup.wait()
        logger.info("DeepInfer-SM80: %d Triton kernels ready in %.1f s on %d cores.", kernels, seconds, os.cpu_count())
