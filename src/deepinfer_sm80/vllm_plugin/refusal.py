"""What stands in for DeepSeek-V4.1 on a vLLM this plugin was not made for: it refuses when the model is built.

Other models on the same machine never meet it. It carries the few methods vLLM looks for when it inspects a text model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from deepinfer_sm80.errors import UnsupportedVllmError
from deepinfer_sm80.vllm_plugin.window import SUPPORTED_VLLM, installed_vllm

if TYPE_CHECKING:
    import torch


class DeepseekV41ForCausalLM(nn.Module):
    """Refuses at construction with the installed version, the supported one and the remedy."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__()
        del vllm_config, prefix
        raise UnsupportedVllmError(found=installed_vllm(), supported=SUPPORTED_VLLM)

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        raise UnsupportedVllmError(found=installed_vllm(), supported=SUPPORTED_VLLM)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        raise UnsupportedVllmError(found=installed_vllm(), supported=SUPPORTED_VLLM)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        raise UnsupportedVllmError(found=installed_vllm(), supported=SUPPORTED_VLLM)


class DSparkDeepseekV4ForCausalLM(DeepseekV41ForCausalLM):
    """The draft model's stand-in."""
