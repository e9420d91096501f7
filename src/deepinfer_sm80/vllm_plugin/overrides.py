"""Every name of vLLM that the plugin replaces, in one list: where, by what, why, and when it can go.

Subclassing and public registries come first (``model.py``, ``attention.py``, ``indexer.py``); these are the functions
vLLM 0.33.0 gives no other seam for. ``apply_overrides`` runs when the model module is imported, so only processes that
build DeepSeek-V4.1 are touched.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from deepinfer_sm80.errors import OverrideTargetError
from deepinfer_sm80.vllm_plugin.window import SUPPORTED_VLLM


@dataclass(frozen=True, slots=True)
class Override:
    """``module`` and ``name`` (dotted for a method) in vLLM, replaced by ``replacement`` (``module:name``)."""

    module: str
    name: str
    parameters: tuple[str, ...]
    replacement: str
    reason: str
    remove_when: str

    @property
    def target(self) -> str:
        return f"{self.module}.{self.name}"


_HERE = "deepinfer_sm80.vllm_plugin"
OVERRIDES: tuple[Override, ...] = (
    Override(
        "vllm.models.deepseek_v41.nvidia.model",
        "_select_dsv4_attn_cls",
        ("vllm_config",),
        f"{_HERE}.attention:select_attention_class",
        "picks the attention class of every layer; falls through to FlashMLA on 8.x",
        "vLLM lets a plugin choose DeepSeek-V4.1's attention class",
    ),
    Override(
        "vllm.models.deepseek_v41.compressor",
        "rope_quant_insert",
        ("latent", "positions", "cos_sin_cache", "kv_cache", "slot_mapping", "compress_ratio", "fp8_scale"),
        f"{_HERE}.compressor:rope_quant_insert",
        "its Triton kernel names a native FP8 type, which does not compile below 8.9",
        "vLLM's kernel compiles for 8.0",
    ),
    Override(
        "vllm.models.deepseek_v41.common.engram",
        "ParallelEngramEmbedding.lookup",
        ("self", "indices", "out", "background"),
        f"{_HERE}.engram:lookup",
        "passes an FP8-typed table to a Triton kernel, which does not compile below 8.9",
        "vLLM's kernel compiles for 8.0",
    ),
    Override(
        "vllm.v1.attention.backends.mla.indexer",
        "_use_flattening",
        ("vllm_config",),
        f"{_HERE}.indexer:always_flatten",
        "decode rows of the indexer arrive one token each, as our paged logits take them",
        "the indexer metadata builder of DeepSeek-V4.1 can be chosen by a plugin",
    ),
    Override(
        "vllm.v1.attention.backends.mla.indexer",
        "has_deep_gemm",
        (),
        f"{_HERE}.indexer:no_deep_gemm",
        "the metadata builder asks DeepGEMM for a schedule because the package is there, whatever the GPU",
        "the builder asks is_deep_gemm_supported() instead",
    ),
    Override(
        "vllm.model_executor.layers.fused_moe.experts.marlin_moe",
        "moe_align_block_size",
        (
            "topk_ids",
            "block_size",
            "num_experts",
            "expert_map",
            "pad_sorted_ids",
            "ignore_invalid_experts",
            "return_scatter_idx",
        ),
        f"{_HERE}.experts:moe_align_block_size",
        "an expert's rows come in the order of atomic counters, so a repeated run rounds differently",
        "vLLM's alignment kernel keeps token order within an expert",
    ),
    Override(
        "vllm.v1.worker.gpu.attn_utils",
        "allocate_kv_cache",
        ("kv_cache_config", "device", "layout", "kernel_block_sizes"),
        f"{_HERE}.cache_groups:allocate_kv_cache",
        "a pipeline stage without a layer of some cache group stops at start-up: the group's tensors name other stages",
        "vLLM projects a group without local layers to no tensors",
    ),
    *(
        Override(
            "vllm.v1.worker.gpu.pp_utils",
            f"PPHandler.{name}",
            parameters,
            f"{_HERE}.sampled_tokens:{name}",
            "orders the broadcast of sampled tokens by a stream that is no longer the one in use without PyNccl",
            "PPHandler asks for the current stream when it needs it",
        )
        for name, parameters in (
            ("receive", ("self", "input_batch", "recv_drafts")),
            ("broadcast", ("self", "sampled_token_ids", "num_sampled", "num_rejected", "input_batch")),
            ("broadcast_drafts", ("self", "draft_tokens")),
            ("get_prev_sampled_outputs", ("self",)),
        )
    ),
)

_originals: dict[str, Any] = {}


def apply_overrides() -> None:
    """Replace every name in ``OVERRIDES``; repeated calls change nothing.

    Raises OverrideTargetError when a name is missing or its parameters differ, and what the import of a replacement
    raises; nothing is replaced then.
    """
    if _originals:
        return
    found = [(override, *_resolve(override), _replacement(override)) for override in OVERRIDES]
    for override, owner, original, replacement in found:
        setattr(owner, override.name.rpartition(".")[2], replacement)
        _originals[override.target] = original


def original(target: str) -> Any:
    """What vLLM had under ``target`` before ``apply_overrides``."""
    return _originals[target]


def _replacement(override: Override) -> Any:
    module, _, name = override.replacement.partition(":")
    return getattr(import_module(module), name)


def _resolve(override: Override) -> tuple[Any, Any]:
    owner: Any = import_module(override.module)
    *path, leaf = override.name.split(".")
    for part in path:
        owner = getattr(owner, part, None)
    original = getattr(owner, leaf, None)
    if not callable(original):
        raise OverrideTargetError(
            target=override.target,
            expected=", ".join(override.parameters),
            found="no such name",
            supported=SUPPORTED_VLLM,
        )
    parameters = tuple(inspect.signature(original).parameters)
    if parameters != override.parameters:
        raise OverrideTargetError(
            target=override.target,
            expected=", ".join(override.parameters),
            found=f"({', '.join(parameters)})",
            supported=SUPPORTED_VLLM,
        )
    return owner, original
