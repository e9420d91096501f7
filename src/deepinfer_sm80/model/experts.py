"""Mixture of experts: router, routed experts, shared expert.

s      = sqrt(softplus(x . gate^T))                         float32
chosen = the k largest of s + bias, lowest id first between equals;   w = s[chosen] * routed_scaling_factor / sum
expert: g = w1 . x, u = w3 . x (bfloat16),  a = bf16(silu(min(g, L)) * clamp(u, -L, L)),  out = w2 . a
         L = swiglu_limit, for the shared expert too
y      = bf16(bf16(sum_k bf16(w_k * out_k)) + bf16(shared expert))
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn.functional import softplus

from deepinfer_sm80.model import linear

if TYPE_CHECKING:
    from collections.abc import Callable

    from deepinfer_sm80.model.config import ModelConfig
    from deepinfer_sm80.model.linear import Weights
    from deepinfer_sm80.model.switches import Switches

    Watched = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Expert:
    """Three matrices and the clamp."""

    def __init__(self, weights: Weights, prefix: str, limit: float, switches: Switches) -> None:
        self.w1, self.w2, self.w3 = (weights.matrix(f"{prefix}.{name}") for name in ("w1", "w2", "w3"))
        self.limit, self.rounded = limit, linear.input_rounding(switches)

    def activation(self, x: torch.Tensor) -> torch.Tensor:
        """x bfloat16 [T, H] -> bfloat16 [T, I], the input of w2."""
        x = self.rounded(x)
        gate, up = linear.project(x, self.w1).float(), linear.project(x, self.w3).float()
        gate = gate.clamp(max=self.limit)
        return self.rounded((gate * linear.sigmoid(gate) * up.clamp(-self.limit, self.limit)).bfloat16())


class Experts:
    """The feed-forward sublayer ``prefix`` = ``layers.3.ffn`` with ``chosen`` of ``total`` experts a token."""

    def __init__(
        self, config: ModelConfig, weights: Weights, prefix: str, total: int, chosen: int, switches: Switches
    ) -> None:
        limit = config.swiglu_limit if switches.has("clamp") else float("inf")
        self.chosen, self.scaling = chosen, config.routed_scaling_factor
        self.gate = weights.matrix(f"{prefix}.gate")
        bias = weights.tensor(f"{prefix}.gate.bias")
        self.bias = bias if switches.has("router_bias") else torch.zeros_like(bias)
        self.experts = [Expert(weights, f"{prefix}.experts.{e}", limit, switches) for e in range(total)]
        shared = switches.has("shared_expert")
        self.shared = Expert(weights, f"{prefix}.shared_experts", limit, switches) if shared else None

    def __call__(self, x: torch.Tensor, watched: Watched | None = None) -> torch.Tensor:
        """x bfloat16 [T, H] -> bfloat16 [T, H]."""
        ids, share = self.route(x, watched)
        routed = torch.zeros(x.shape, device=x.device)
        for number, expert in enumerate(self.experts):
            tokens, place = (ids == number).nonzero(as_tuple=True)
            if len(tokens):
                out = linear.product(expert.activation(x[tokens]), expert.w2)
                routed.index_add_(0, tokens, (share[tokens, place, None] * out).bfloat16().float())
        if self.shared is None:
            return routed.bfloat16()
        shared = linear.project(self.shared.activation(x), self.shared.w2)
        return routed.bfloat16() + shared

    def route(self, x: torch.Tensor, watched: Watched | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """x bfloat16 [T, H] -> expert ids int64 [T, k] and their shares float32 [T, k].

        ``watched`` gets score + bias float32 [T, E] and the ids, and returns the ids to go on with.
        """
        score = softplus(linear.product(x, self.gate).double()).sqrt().float()  # float64: see linear.sigmoid
        ranked = score + self.bias
        ids = ranked.sort(dim=-1, descending=True, stable=True).indices[:, : self.chosen]
        if watched is not None:
            ids = watched(ranked, ids)
        share = score.gather(1, ids)
        total = share.sum(-1, keepdim=True)
        return ids, share * self.scaling / torch.where(total == 0, 1.0, total)
