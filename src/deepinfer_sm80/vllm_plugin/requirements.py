"""What a configuration must be to be served: checked when the model is built, refused by the flag's name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from deepinfer_sm80.errors import UnsupportedOptionError
from deepinfer_sm80.vllm_plugin.weights import model_config

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm.config import VllmConfig

_BACKENDS = (None, "FLASHMLA_SPARSE", "FLASHMLA_SPARSE_DSV4", "FLASHMLA_SPARSE_DSV41")


@dataclass(frozen=True, slots=True)
class Requirement:
    """One option: how to read it, which values are served, and the remedy for any other.

    ``of_draft``: False where the draft's own copy of the configuration says nothing about it.
    """

    option: str
    read: Callable[[VllmConfig], Any]
    allowed: tuple[Any, ...]
    remedy: str
    of_draft: bool = True


def _backend(config: VllmConfig) -> str | None:
    backend = config.attention_config.backend
    return None if backend is None else str(backend.name)


def _filters_experts(config: VllmConfig) -> bool:
    parallel = config.parallel_config
    return bool(parallel.enable_expert_parallel and parallel.enable_ep_weight_filter)


def _filters_draft_experts(config: VllmConfig) -> bool:
    speculation = config.speculative_config
    return _filters_experts(config) and speculation is not None and speculation.method == "dspark"


def _graphs(config: VllmConfig) -> str:
    mode = config.compilation_config.cudagraph_mode
    return "NONE" if mode is None else str(mode.name)


def _engram_table(config: VllmConfig) -> str:
    parallel, engram = config.parallel_config, config.engram_config
    split = engram is not None and not engram.cpu_offload and parallel.data_parallel_size > 1
    return "false with TP 1 and data parallelism" if split and parallel.tensor_parallel_size == 1 else "true"


def _dequantised_at_load(config: VllmConfig) -> int:
    del config
    from vllm import envs

    return int(bool(envs.VLLM_MXFP8_EMULATION_DEQUANT_AT_LOAD))


REQUIREMENTS: tuple[Requirement, ...] = (
    Requirement(
        "--tensor-parallel-size",
        lambda c: c.parallel_config.tensor_parallel_size,
        (1, 2, 4, 8),
        "64 heads, 8 output groups and 24 Engram columns divide by these.",
    ),
    Requirement(
        "--prefill-context-parallel-size",
        lambda c: c.parallel_config.prefill_context_parallel_size,
        (1,),
        "Use tensor or pipeline parallelism.",
    ),
    Requirement(
        "--decode-context-parallel-size",
        lambda c: c.parallel_config.decode_context_parallel_size,
        (1,),
        "Use tensor or pipeline parallelism.",
    ),
    Requirement("--attention-backend", _backend, _BACKENDS, "Drop the option: the plugin brings its own backend."),
    Requirement(
        "--kv-cache-dtype",
        lambda c: c.cache_config.cache_dtype,
        ("auto", "fp8", "fp8_ds_mla"),
        "The plugin's kernels read the 584-byte fp8_ds_mla record.",
    ),
    Requirement(
        "--attention-config indexer_sparse_logits",
        lambda c: bool(c.attention_config.indexer_sparse_logits),
        (False,),
        "It needs the MXFP4 index cache of newer GPUs.",
    ),
    Requirement(
        "VLLM_USE_V2_MODEL_RUNNER",
        lambda c: bool(c.use_v2_model_runner),
        (True,),
        "Unset the variable: DeepSeek-V4.1 is served by vLLM's second model runner.",
    ),
    Requirement(
        "--compilation-config cudagraph_mode",
        _graphs,
        ("NONE", "PIECEWISE", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"),
        "Prefill is driven by the host: a graph of a mixed batch would replay decode only.",
    ),
    Requirement(
        "--moe-backend",
        lambda c: c.kernel_config.moe_backend,
        ("auto", "marlin"),
        "Marlin is vLLM's backend for MXFP4 experts on compute capability 8.x, and what auto chooses.",
    ),
    Requirement(
        "--enable-ep-weight-filter",
        _filters_draft_experts,
        (False,),
        "vLLM filters the experts of a DSpark draft by the target's number of experts, so that some would never be "
        "loaded. Drop the option or the speculation.",
    ),
    Requirement(
        "--expert-placement-strategy",
        lambda c: c.parallel_config.expert_placement_strategy if _filters_experts(c) else "linear",
        ("linear",),
        "vLLM places these experts linearly whatever it says, and --enable-ep-weight-filter goes by it. Drop either.",
    ),
    Requirement(
        "--engram-config cpu_offload",
        _engram_table,
        ("true",),
        "vLLM would split the table over peer GPUs. Keep the default, or use tensor parallelism.",
        of_draft=False,
    ),
    Requirement(
        "VLLM_MXFP8_EMULATION_DEQUANT_AT_LOAD",
        _dequantised_at_load,
        (1,),
        "Unset the variable: the output projection reads wo_a as bfloat16.",
    ),
    Requirement(
        "--mm-encoder-only",
        lambda c: bool(getattr(c.model_config.multimodal_config, "mm_encoder_only", False)),
        (False,),
        "This plugin serves text only: it has no encoder.",
        of_draft=False,
    ),
    Requirement(
        "config.json quantization_config.weight_block_size",
        lambda c: tuple(getattr(c.quant_config, "weight_block_size", None) or ()),
        ((32, 32),),
        "Use the released checkpoint, or one in its format.",
    ),
    Requirement(
        "config.json quantization_config.expert_dtype",
        lambda c: getattr(c.model_config.hf_config, "expert_dtype", "fp4"),
        ("fp4",),
        "Use the released checkpoint, or one in its format.",
    ),
)


def check_config(vllm_config: VllmConfig, *, draft: bool = False) -> None:
    """Raise for the first setting this plugin does not serve, before anything is loaded.

    UnsupportedOptionError for an option, ModelConfigError for a field of config.json. ``draft``: ``vllm_config`` is
    what vLLM derives for the DSpark draft.
    """
    for requirement in REQUIREMENTS:
        if draft and not requirement.of_draft:
            continue
        found = requirement.read(vllm_config)
        if found not in requirement.allowed:
            raise UnsupportedOptionError(
                option=requirement.option,
                found=found,
                allowed=" or ".join(str(value) for value in requirement.allowed),
                remedy=requirement.remedy,
            )
    source = vllm_config.speculative_config.draft_model_config if draft else vllm_config.model_config
    model_config(source.hf_config)
