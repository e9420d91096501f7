"""Which tensors vLLM's loader leaves on disk on this rank: none, unless its expert filter is on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.distributed.parallel_state import get_ep_group
from vllm.model_executor.model_loader.ep_weight_filter import compute_local_expert_ids, should_skip_weight

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm.config import VllmConfig


def left_out_on_this_rank(vllm_config: VllmConfig) -> Callable[[str], bool]:
    """Whether the loader skips a checkpoint name of the text model, by vLLM's own rule.

    ``--enable-expert-parallel`` alone reads every expert. ``--enable-ep-weight-filter`` leaves out the weights, not the
    scales, of experts that other ranks own, and has no effect under EPLB. Needs vLLM's process groups.
    """
    parallel = vllm_config.parallel_config
    if not (parallel.enable_expert_parallel and parallel.enable_ep_weight_filter) or parallel.enable_eplb:
        return lambda name: False
    group = get_ep_group()
    experts = vllm_config.model_config.get_num_experts()
    own = compute_local_expert_ids(experts, group.world_size, group.rank_in_group)
    return lambda name: should_skip_weight(name, own)
