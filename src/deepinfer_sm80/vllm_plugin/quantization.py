"""Routed experts as wide as Marlin needs and no wider: 576 columns per rank at TP4 (vLLM: 640), 320 at TP8 (384).

vLLM rounds the intermediate size of MXFP4 experts up to 128 for its Marlin backend; the kernels need 64 (gate and up
together a multiple of 128 columns, down a multiple of 64 rows). What is left to pad, the 32 columns of TP8, holds code
0 under vLLM's zero-initialised weights and scales: 0 in the gate and up products, 0 as input of the down product.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger
from vllm.model_executor.layers.fused_moe.oracle.mxfp4 import Mxfp4MoeBackend
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.mxfp4 import Mxfp4MoEMethod
from vllm.models.deepseek_v41.quant_config import DeepseekV4FP8Config

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger("vllm.deepinfer_sm80")

MARLIN_COLUMNS = 64
VLLM_COLUMNS = 128
_BYTES_PER_WEIGHT = 0.5 + 1 / 32  # an FP4 code, and one scale byte for 32 of them


def expert_columns(intermediate: int, multiple: int = MARLIN_COLUMNS) -> int:
    """``intermediate`` (columns of one rank) rounded up to ``multiple``."""
    return -(-intermediate // multiple) * multiple


def saved_bytes(intermediate: int, hidden: int, experts: int, layers: int) -> int:
    """Bytes a rank saves over vLLM's rounding.

    ``intermediate``: unpadded columns per rank; ``experts``: experts held by the rank in each of its ``layers``.
    """
    columns = expert_columns(intermediate, VLLM_COLUMNS) - expert_columns(intermediate)
    return int(columns * 3 * hidden * experts * layers * _BYTES_PER_WEIGHT)


class AmpereMxfp4MoEMethod(Mxfp4MoEMethod):
    """vLLM's MXFP4 experts; only the rounding of their size differs, and only on a Marlin backend."""

    def maybe_roundup_sizes(
        self, hidden_size: int, intermediate_size_per_partition: int, act_dtype: Any, moe_parallel_config: Any
    ) -> tuple[int, int]:
        hidden, intermediate = super().maybe_roundup_sizes(
            hidden_size=hidden_size,
            intermediate_size_per_partition=intermediate_size_per_partition,
            act_dtype=act_dtype,
            moe_parallel_config=moe_parallel_config,
        )
        if self.mxfp4_backend in (Mxfp4MoeBackend.MARLIN, Mxfp4MoeBackend.BATCHED_MARLIN):
            intermediate = expert_columns(intermediate_size_per_partition)
        return hidden, intermediate


@register_quantization_config("deepseek_v4_fp8")
class AmpereFP8Config(DeepseekV4FP8Config):
    """vLLM's quantisation of DeepSeek-V4.1 with the experts above. Registered under vLLM's own name."""

    def get_quant_method(self, layer: Any, prefix: str) -> Any:
        method = super().get_quant_method(layer, prefix)
        if type(method) is Mxfp4MoEMethod:
            return AmpereMxfp4MoEMethod(layer.moe_config, activation_key=method.activation_key)
        return method


def adopt(vllm_config: VllmConfig) -> None:
    """Make the quantisation of ``vllm_config`` this module's; repeated calls change nothing.

    vLLM reads it from the registry in the front-end process, before the model's module (and so this one) is imported,
    and hands the object to its workers. Logs what the rank saves, once.
    """
    config = vllm_config.quant_config
    if type(config) is DeepseekV4FP8Config:
        config.__class__ = AmpereFP8Config  # no state of its own: everything vLLM resolved so far stays
    parallel, text = vllm_config.parallel_config, vllm_config.model_config.hf_text_config
    if parallel.enable_expert_parallel or not isinstance(config, AmpereFP8Config) or config.expert_dtype != "fp4":
        return
    shards = parallel.tensor_parallel_size * parallel.data_parallel_size
    columns = text.moe_intermediate_size // shards
    layers = vllm_config.model_config.get_num_layers(parallel)
    saved = saved_bytes(columns, text.hidden_size, text.n_routed_experts, layers)
    if saved:
        logger.info_once(
            "DeepInfer-SM80: experts are %d columns wide on this rank instead of %d: %.2f GiB saved in %d layers.",
            expert_columns(columns),
            expert_columns(columns, VLLM_COLUMNS),
            saved / 2**30,
            layers,
        )
