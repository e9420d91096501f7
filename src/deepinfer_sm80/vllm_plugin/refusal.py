"""What stands in for DeepSeek-V4.1 where this plugin must not serve it: it refuses when the model is built.

Other models on the same machine never meet it. It carries the few methods vLLM looks for when it inspects a text model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from deepinfer_sm80.errors import PluginUndecidedError, UnsupportedVllmError
from deepinfer_sm80.vllm_plugin.activation import activation_here
from deepinfer_sm80.vllm_plugin.window import SUPPORTED_VLLM, installed_vllm

if TYPE_CHECKING:
    import torch


def refusal() -> Exception:
    """Why, with the remedy: vLLM's version, or a decision that failed."""
    activation = activation_here()
    if activation.undecided:
        return PluginUndecidedError(reason=activation.reason)
    return UnsupportedVllmError(found=installed_vllm(), supported=SUPPORTED_VLLM)


class DeepseekV41ForCausalLM(nn.Module):
    """Refuses at construction with the reason and the remedy."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__()
        del vllm_config, prefix
        raise refusal()

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        raise refusal()

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        raise refusal()

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        raise refusal()


class DSparkDeepseekV4ForCausalLM(DeepseekV41ForCausalLM):
    """The draft model's stand-in."""
