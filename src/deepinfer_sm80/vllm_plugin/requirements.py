"""What a configuration must be to be served: checked when the model is built, refused by the flag's name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from deepinfer_sm80.errors import UnsupportedOptionError

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm.config import VllmConfig

_BACKENDS = (None, "FLASHMLA_SPARSE", "FLASHMLA_SPARSE_DSV4", "FLASHMLA_SPARSE_DSV41")
_MEGA_MOE = ("deep_gemm_mega_moe", "flashinfer_mega_moe")


@dataclass(frozen=True, slots=True)
class Requirement:
    """One option: how to read it, which values are served, and the remedy for any other."""

    option: str
    read: Callable[[VllmConfig], Any]
    allowed: tuple[Any, ...]
    remedy: str


def _backend(config: VllmConfig) -> str | None:
    backend = config.attention_config.backend
    return None if backend is None else str(backend.name)


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


def check_config(vllm_config: VllmConfig) -> None:
    """Raise UnsupportedOptionError for the first option this plugin does not serve."""
    for requirement in REQUIREMENTS:
        found = requirement.read(vllm_config)
        if found not in requirement.allowed:
            raise UnsupportedOptionError(
                option=requirement.option,
                found=found,
                allowed=" or ".join(str(value) for value in requirement.allowed),
                remedy=requirement.remedy,
            )
    if vllm_config.kernel_config.moe_backend in _MEGA_MOE:
        raise UnsupportedOptionError(
            option="--moe-backend",
            found=vllm_config.kernel_config.moe_backend,
            allowed="auto or marlin",
            remedy="MegaMoE kernels are for compute capability 10.0.",
        )
