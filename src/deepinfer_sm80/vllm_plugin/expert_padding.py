"""Routed experts as wide as Marlin needs and no wider: 576 columns per rank at TP4 (vLLM: 640), 320 at TP8 (384).

vLLM rounds the intermediate size of MXFP4 experts up to 128 for its Marlin backend; the kernels need 64 (gate and up
together a multiple of 128 columns, down a multiple of 64 rows). What is left to pad, the 32 columns of TP8, holds code
0 under vLLM's zero-initialised weights and scales: 0 in the gate and up products, 0 as input of the down product.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger
from vllm.model_executor.layers.fused_moe.oracle.mxfp4 import Mxfp4MoeBackend
from vllm.model_executor.layers.quantization.mxfp4 import Mxfp4MoEMethod
from vllm.models.deepseek_v41.quant_config import DeepseekV4FP8Config

if TYPE_CHECKING:
    import torch

logger = init_logger("vllm.deepinfer_sm80")

MARLIN_COLUMNS = 64
_BYTES_PER_WEIGHT = 0.5 + 1 / 32  # an FP4 code, and one scale byte for 32 of them


def expert_columns(intermediate: int) -> int:
    """``intermediate`` (columns of one rank) rounded up to what Marlin needs."""
    return -(-intermediate // MARLIN_COLUMNS) * MARLIN_COLUMNS


class AmpereMxfp4MoEMethod(Mxfp4MoEMethod):
    """vLLM's MXFP4 experts; only the rounding of their size differs, and only on a Marlin backend."""

    columns_saved = 0  # of each expert, over vLLM's rounding

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
            needed = expert_columns(intermediate_size_per_partition)
            self.columns_saved = intermediate - needed
            return hidden, needed
        return hidden, intermediate


class AmpereFP8Config(DeepseekV4FP8Config):
    """vLLM's quantisation with the experts above, for DeepSeek-V4.1 only: V4 has the same quantisation method."""

    of_v41 = False

    def maybe_update_config(self, model_name: str, hf_config: Any = None, revision: str | None = None) -> None:
        super().maybe_update_config(model_name, hf_config=hf_config, revision=revision)
        self.of_v41 = str(getattr(hf_config, "model_type", "")).startswith("deepseek_v41")

    def get_quant_method(self, layer: Any, prefix: str) -> Any:
        method = super().get_quant_method(layer, prefix)
        if self.of_v41 and type(method) is Mxfp4MoEMethod:
            return AmpereMxfp4MoEMethod(layer.moe_config, activation_key=method.activation_key)
        return method


def saved_bytes(columns: int, hidden: int, experts: int) -> int:
    """Bytes of ``columns`` columns in the gate, up and down projections of ``experts`` experts."""
    return int(columns * 3 * hidden * experts * _BYTES_PER_WEIGHT)


def report_saved_memory(model: torch.nn.Module) -> None:
    """Log what the experts of ``model`` hold less than with vLLM's rounding; nothing where that is nothing."""
    layers: list[Any] = [
        m for m in model.modules() if isinstance(getattr(m, "quant_method", None), AmpereMxfp4MoEMethod)
    ]
    saved = sum(
        saved_bytes(m.quant_method.columns_saved, m.moe_config.hidden_dim, m.moe_config.num_local_experts)
        for m in layers
    )
    if saved:
        columns = layers[0].moe_config.intermediate_size_per_partition
        logger.info(
            "DeepInfer-SM80: experts are %d columns wide on this rank, with vLLM's rounding %d: %.2f GiB saved in %d "
            "layers.",
            columns,
            columns + layers[0].quant_method.columns_saved,
            saved / 2**30,
            len(layers),
        )
