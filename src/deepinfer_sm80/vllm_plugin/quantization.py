"""DeepSeek-V4.1's quantisation in vLLM's public registry, under vLLM's own name."""

from __future__ import annotations

from typing import Any

from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

METHOD = "deepseek_v4_fp8"


class AmpereQuantization(QuantizationConfig):
    """What vLLM's registry holds; everything it makes is an ``expert_padding.AmpereFP8Config``.

    That class needs vLLM's expert code, which is not imported while plugins load but when a quantised model is there.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        return _ampere_config()(*args, **kwargs)

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: dict[str, Any], user_quant: str | None, hf_config: Any = None
    ) -> Any:
        return _ampere_config().override_quantization_method(hf_quant_cfg, user_quant, hf_config=hf_config)

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Any:
        return _ampere_config().from_config(config)

    @staticmethod
    def get_config_filenames() -> list[str]:
        names: list[str] = _ampere_config().get_config_filenames()
        return names


def _ampere_config() -> Any:
    from deepinfer_sm80.vllm_plugin.expert_padding import AmpereFP8Config

    return AmpereFP8Config


def register() -> None:
    """Take the place of vLLM's class in this process; repeated calls change nothing."""
    register_quantization_config(METHOD)(AmpereQuantization)
