"""``unfused`` baselines of the operators whose results are indices; see unfused.py."""

from __future__ import annotations

import torch


def select_candidate_blocks(
    logits: torch.Tensor, row_lens: torch.Tensor, topk_blocks: int, block_size: int
) -> torch.Tensor:
    """There are ``topk_blocks`` blocks or more. Between equal scores torch may choose another: then there is no row."""
    column = torch.arange(logits.shape[1], device=logits.device)
    inside = logits.masked_fill(column >= row_lens[:, None], float("-inf"))
    padded = torch.nn.functional.pad(inside, (0, -logits.shape[1] % block_size), value=float("-inf"))
    scores = padded.view(logits.shape[0], -1, block_size).amax(-1)
    newest = (row_lens.long() - 1) // block_size
    scores.scatter_(1, newest[:, None], float("inf"))
    return scores.topk(topk_blocks, dim=-1).indices.sort(dim=-1).values.int()


def global_topk_indices(
    topk_indices: torch.Tensor,
    token_to_req_indices: torch.Tensor,
    block_table: torch.Tensor,
    block_size: int,
    is_valid_token: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Entries that are -1 only trail, and every column is in the table."""
    valid = (topk_indices >= 0) & is_valid_token[:, None]
    safe = topk_indices.clamp_min(0).long()
    blocks = block_table[token_to_req_indices.long()].gather(1, safe // block_size)
    slots = blocks * block_size + safe % block_size
    return torch.where(valid, slots, -1).int(), valid.sum(-1).int()


def combine_topk_swa_indices(
    topk_indices: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    gather_lens: torch.Tensor,
    window_size: int,
    compress_ratio: int,
    topk: int,
    M: int,
    N: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One request, whose indices are valid."""
    del M
    tokens, device = topk_indices.shape[0], topk_indices.device
    width = -(-(topk + window_size) // 128) * 128
    position = seq_lens - (query_start_loc[1] - query_start_loc[0]) + torch.arange(tokens, device=device)
    k = ((position + 1) // compress_ratio).clamp(0, topk)[:, None]
    gather_start = seq_lens - gather_lens
    first = torch.maximum((position - window_size + 1).clamp_min(0), gather_start)[:, None]
    lens = k + position[:, None] - first + 1
    column = torch.arange(width, device=device)
    chosen = torch.nn.functional.pad(topk_indices[:, :topk], (0, width - topk))
    rows = torch.where(column < k, chosen, N + first + column - k - gather_start)
    return torch.where(column < lens, rows, -1).int(), lens[:, 0].int()


def indexer_topk(logits: torch.Tensor, row_lens: torch.Tensor, topk: int) -> torch.Tensor:
    """Between equal logits torch may choose another column: then there is no row."""
    column = torch.arange(logits.shape[1], device=logits.device)
    scores = logits.masked_fill(column >= row_lens[:, None], float("-inf"))
    return scores.topk(topk, dim=-1).indices.sort(dim=-1).values.int()


def stable_expert_order(
    sorted_token_ids: torch.Tensor,
    expert_ids: torch.Tensor,
    num_tokens_post_padded: torch.Tensor,
    block_size: int,
    num_routes: int,
) -> torch.Tensor:
    """By route, then stably by run of blocks of one expert."""
    del num_routes
    row = torch.arange(sorted_token_ids.shape[0], device=sorted_token_ids.device)
    run = torch.nn.functional.pad((expert_ids[1:] != expert_ids[:-1]).cumsum(0), (1, 0))
    segment = torch.where(row < num_tokens_post_padded, run[row // block_size], expert_ids.shape[0])
    by_route = sorted_token_ids.argsort(stable=True)
    return sorted_token_ids[by_route[segment[by_route].argsort(stable=True)]]
