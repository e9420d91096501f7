"""The last pipeline stage broadcasts a token after it is sampled, and the others read it after it arrived.

vLLM's ``PPHandler`` does this on a stream of its own, ordered by events against ``main_stream``, the stream that was
current when the handler was built. Where vLLM has no PyNccl communicator (libnccl.so.2 cannot be opened by that name),
the first call of ``vllm.utils.torch_utils.current_stream`` comes later, in the model, and makes another stream the
current one. The events then order nothing: the first stage embeds what lay in memory, and the GPU reports an index out
of bounds or an illegal address. So ``main_stream`` is set to the stream in use before each of its methods.
"""

from __future__ import annotations

from typing import Any

import torch

from deepinfer_sm80.vllm_plugin import overrides

_HANDLER = "vllm.v1.worker.gpu.pp_utils.PPHandler"


def receive(self: Any, input_batch: Any, recv_drafts: bool) -> bool:
    """vLLM's, ordered after the stream in use."""
    return bool(_in_order(self, "receive")(self, input_batch, recv_drafts))


def broadcast(self: Any, sampled_token_ids: Any, num_sampled: Any, num_rejected: Any, input_batch: Any) -> None:
    """vLLM's, ordered after the stream in use."""
    _in_order(self, "broadcast")(self, sampled_token_ids, num_sampled, num_rejected, input_batch)


def broadcast_drafts(self: Any, draft_tokens: Any) -> None:
    """vLLM's, ordered after the stream in use."""
    _in_order(self, "broadcast_drafts")(self, draft_tokens)


def get_prev_sampled_outputs(self: Any) -> dict[str, Any] | None:
    """vLLM's; the stream in use waits for what was received."""
    found: dict[str, Any] | None = _in_order(self, "get_prev_sampled_outputs")(self)
    return found


def _in_order(handler: Any, name: str) -> Any:
    handler.main_stream = torch.cuda.current_stream(handler.device)
    return overrides.original(f"{_HANDLER}.{name}")
