"""Routed experts stay vLLM's Marlin kernels; their rows arrive in an order that does not change from run to run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deepinfer_sm80 import ops
from deepinfer_sm80.vllm_plugin import overrides

if TYPE_CHECKING:
    import torch

_TARGET = "vllm.model_executor.layers.fused_moe.experts.marlin_moe.moe_align_block_size"


def moe_align_block_size(
    topk_ids: torch.Tensor,
    block_size: int,
    num_experts: int,
    expert_map: torch.Tensor | None = None,
    pad_sorted_ids: bool = False,
    ignore_invalid_experts: bool = False,
    return_scatter_idx: bool = False,
) -> tuple[torch.Tensor, ...]:
    """vLLM's alignment of ``topk_ids`` [T, k] to expert blocks, each expert's routes then put into token order.

    An expert has at most T rows: while they fit one block, their order inside it changes no sum and is left alone.
    """
    ids, experts, used, *more = overrides.original(_TARGET)(
        topk_ids,
        block_size,
        num_experts,
        expert_map,
        pad_sorted_ids,
        ignore_invalid_experts,
        return_scatter_idx=return_scatter_idx,
    )
    if topk_ids.shape[0] <= block_size:
        return (ids, experts, used, *more)
    return (ops.stable_expert_order(ids, experts, used, block_size, topk_ids.numel()), experts, used, *more)
