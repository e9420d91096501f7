"""Launcher of stable_expert_order. The definition is in reference.py beside this file."""

from __future__ import annotations

import torch

from deepinfer_sm80.ops.checks import Shapes


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
    s.require(s["B"] * block_size >= s["P"], "expert_ids", f"at least {-(-s['P'] // block_size)} blocks long", s["B"])
    if s["P"] == 0:
        return torch.empty_like(sorted_token_ids)
    # One sort over (segment, route): segments ascend with the position, so the sort moves routes inside them only.
    changed = expert_ids[1:] != expert_ids[:-1]
    segment_of_block = torch.nn.functional.pad(changed.cumsum(0), (1, 0))
    position = torch.arange(s["P"], device=sorted_token_ids.device)
    segment = torch.where(position < num_tokens_post_padded, segment_of_block[position // block_size], s["B"])
    keys = segment * (num_routes + 1) + sorted_token_ids.clamp(0, num_routes)
    return (keys.sort().values % (num_routes + 1)).to(torch.int32)
