"""Triton launcher of stable_expert_order. The definition is in reference.py beside this file."""

from __future__ import annotations

import torch

from deepinfer_sm80.ops.checks import Shapes
from deepinfer_sm80.ops.moe.stable_expert_order.tuning import ORDER
from deepinfer_sm80.ops.variants import run


def stable_expert_order(
    sorted_token_ids: torch.Tensor,
    expert_ids: torch.Tensor,
    num_tokens_post_padded: torch.Tensor,
    block_size: int,
    num_routes: int,
) -> torch.Tensor:
    s = Shapes("stable_expert_order")
    s.check(sorted_token_ids, "sorted_token_ids", ("P",), torch.int32)
    s.check(expert_ids, "expert_ids", ("B",), torch.int32)
    s.check(num_tokens_post_padded, "num_tokens_post_padded", (1,), torch.int32)
    s.require(block_size > 0, "block_size", "1 or larger", block_size)
    blocks = -(-s["P"] // block_size)
    s.require(s["B"] * block_size >= s["P"], "expert_ids", f"at least {blocks} blocks long", s["B"])
    out = torch.empty_like(sorted_token_ids)
    if s["P"] == 0:
        return out
    run(
        ORDER,
        (blocks,),
        sorted_token_ids,
        expert_ids,
        num_tokens_post_padded,
        out,
        s["P"],
        s["B"],
        block_size,
        num_routes,
    )
    return out
