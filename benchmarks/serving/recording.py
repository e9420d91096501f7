"""Watches vLLM at work: what a forward pass chose, and which steps the scheduler made of a request.

Both watchers work on vLLM's classes, so they serve the stock path and the plugin's; one process.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator


class Recorder:
    """``experts[layer]`` and ``topk[layer]``: one CPU tensor of chosen ids per position, rows sorted.

    Eager mode, one prompt per ``generate`` call: then row i of a step is position i of the prompt.
    """

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


GRAPHS = {"NONE": "eager", "PIECEWISE": "piecewise", "FULL": "full"}


class Schedule:
    """``steps``: what each step did for each request, in order.

    request, computed, scheduled   vLLM's request id; tokens before the step and in it
    graph, padded                  eager, piecewise or full; tokens of the whole step with its padding
    prefill, replay_start          whether prompt tokens were left; where a prefix hit's replay began, else 0
    trimmed                        the layers behind the last KV source ran on a batch of their own
    """

    def __init__(self) -> None:
        self.steps: list[dict[str, Any]] = []
        self.replay_start: dict[str, int] = {}

    def install(self) -> None:
        """Wrap vLLM's model runner. Call before the engine is built."""
        from vllm.v1.worker.gpu.model_runner import GPUModelRunner

        prepare, execute = GPUModelRunner.prepare_inputs, GPUModelRunner.execute_model

        def prepare_and_note(runner: Any, scheduled: Any, state: Any, descriptor: Any, *rest: Any, **named: Any) -> Any:
            batch = prepare(runner, scheduled, state, descriptor, *rest, **named)
            self.note(scheduled, descriptor, batch)
            return batch

        def execute_and_note(runner: Any, *args: Any, **named: Any) -> Any:
            first = len(self.steps)
            result = execute(runner, *args, **named)
            replay = getattr(runner.model_state, "decoder_replay_layers", None)
            for step in self.steps[first:]:
                step["trimmed"] = replay is not None and replay.replay_batch is not None
            return result

        GPUModelRunner.prepare_inputs, GPUModelRunner.execute_model = prepare_and_note, execute_and_note

    def note(self, scheduled: Any, descriptor: Any, batch: Any) -> None:
        """One step: vLLM's scheduler output, graph descriptor and input batch."""
        self.replay_start |= {new.req_id: new.replay_start for new in scheduled.scheduled_new_reqs}
        self.steps += [
            {
                "request": request,
                "computed": int(batch.num_computed_tokens_np[place]),
                "scheduled": int(batch.num_scheduled_tokens[place]),
                "prefill": bool(batch.is_prefilling_np[place]),
                "graph": GRAPHS[descriptor.cg_mode.name],
                "padded": int(batch.num_tokens_after_padding),
                "replay_start": self.replay_start.get(request, 0),
                "trimmed": False,
            }
            for place, request in enumerate(batch.req_ids)
        ]

    def of(self, request: str) -> list[dict[str, Any]]:
        """The steps of the request that vLLM's output calls ``request``; inside, a random suffix follows."""
        return [step for step in self.steps if step["request"] == request or step["request"].startswith(f"{request}-")]
