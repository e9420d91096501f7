"""A pipeline stage without any layer of a cache group allocates nothing for that group."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from deepinfer_sm80.vllm_plugin import overrides

_TARGET = "vllm.v1.worker.gpu.attn_utils.allocate_kv_cache"


def allocate_kv_cache(
    kv_cache_config: Any, device: Any, layout: Any, kernel_block_sizes: list[int] | None = None
) -> dict[str, Any]:
    """vLLM's allocation of the planned tensors whose layers this worker has.

    The plan of a worker keeps every group of the model. One whose layers all sit on other stages, such as the open
    pairs of the ratio-2 compressors, still names their tensors, and vLLM looks for the group of a layer it lacks.
    """
    here = {name for group in kv_cache_config.kv_cache_groups for name in group.layer_names}
    tensors = [tensor for tensor in kv_cache_config.kv_cache_tensors if tensor.layers[0] in here]
    planned = replace(kv_cache_config, kv_cache_tensors=tensors)
    found: dict[str, Any] = overrides.original(_TARGET)(planned, device, layout, kernel_block_sizes)
    return found
