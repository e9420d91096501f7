"""Watches what a forward pass chose: experts of every MoE layer, top-k rows of every index source.

Works on vLLM's classes, so one watcher serves the stock path and the plugin's. Eager mode, one process, one prompt per
``generate`` call: then row i of a step is position i of the prompt.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator


class Recorder:
    """``experts[layer]`` and ``topk[layer]``: one CPU tensor of chosen ids per position, rows sorted."""

    def __init__(self) -> None:
        self.active = False
        self.experts: dict[int, torch.Tensor] = {}
        self.margins: dict[int, torch.Tensor] = {}
        self.topk: dict[int, torch.Tensor] = {}

    @contextmanager
    def recording(self) -> Iterator[Recorder]:
        self.experts, self.margins, self.topk = {}, {}, {}
        self.active = True
        try:
            yield self
        finally:
            self.active = False

    def install(self) -> None:
        """Wrap vLLM's classes. Call before the engine is built."""
        from vllm.models.deepseek_v4.nvidia.model import DeepseekV4MoE
        from vllm.models.deepseek_v41.attention import DeepseekV4Attention

        attend, moe = DeepseekV4Attention._sparse_indexer_and_attn, DeepseekV4MoE.forward

        def attend_and_watch(layer: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> None:
            attend(layer, hidden_states, *args, **kwargs)
            if self.active and layer.indexer is not None:
                rows = layer.topk_indices_buffer[: hidden_states.shape[0]]
                self.topk[layer.layer_id] = rows.sort(-1).values.cpu()

        def moe_and_watch(layer: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            if self.active:
                number = int(layer.prefix.split(".layers.")[1].split(".")[0])
                scores = torch.nn.functional.softplus(hidden_states.float() @ layer.gate.weight.float().T).sqrt()
                scores = scores + layer.gate.e_score_correction_bias
                best = scores.topk(layer.n_activated_experts + 1, -1)
                self.experts[number] = best.indices[:, :-1].sort(-1).values.cpu()
                self.margins[number] = (best.values[:, -2] - best.values[:, -1]).cpu()
            return moe(layer, hidden_states, *args, **kwargs)

        DeepseekV4Attention._sparse_indexer_and_attn = attend_and_watch
        DeepseekV4MoE.forward = moe_and_watch
