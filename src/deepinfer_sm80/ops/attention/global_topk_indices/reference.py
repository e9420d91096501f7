"""Cache slots of each decode token's selected rows.

    c = topk_indices[t, j],  r = token_to_req_indices[t]
    indices[t, j] = block_table[r, c // block_size] * block_size + c % block_size
    lens[t] = 1 + position of the row's last valid entry, 0 if there is none

topk_indices int32 [T, W] (request-local rows), token_to_req_indices int32 or int64 [>= T], block_table int32 [R, C];
row strides are arbitrary. is_valid_token bool or integer [T]. An entry is -1 if c is negative, its column is not in the
table, its block is negative, the request does not exist, the token is not valid or the slot does not fit int32.
Integers only.

Source: vLLM 0.33.0, ``compute_global_topk_indices_and_lens``, whose length counts the valid entries and is used as a
prefix length; that agrees with this one as long as -1 entries only trail. Here the length covers every valid entry
wherever the -1s are, and our attention masks -1 at any position below it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from deepinfer_sm80.ops.contract import Cost, OpSpec, Tolerance

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

INT32_MAX = 2**31 - 1


def global_topk_indices(
    topk_indices: torch.Tensor,
    token_to_req_indices: torch.Tensor,
    block_table: torch.Tensor,
    block_size: int,
    is_valid_token: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    table, requests = block_table.tolist(), token_to_req_indices.tolist()
    slots = topk_indices.clone()
    lens = torch.zeros(len(topk_indices), dtype=torch.int32, device=topk_indices.device)
    for t, row in enumerate(topk_indices.tolist()):
        known = bool(is_valid_token[t]) and 0 <= requests[t] < len(table)
        for j, c in enumerate(row):
            column = c // block_size
            mapped = known and c >= 0 and column < len(table[requests[t]])
            block = table[requests[t]][column] if mapped else -1
            slot = block * block_size + c % block_size if block >= 0 else -1
            slots[t, j] = slot if slot <= INT32_MAX else -1
            if slots[t, j] >= 0:
                lens[t] = j + 1
    return slots, lens


def cases(device: str) -> Iterator[tuple[str, dict[str, Any]]]:
    for T, W, block_size, R in ((0, 512, 64, 2), (1, 512, 128, 1), (5, 512, 64, 3), (3, 200, 1, 2), (2, 0, 64, 1)):
        g = torch.Generator(device).manual_seed(T * 613 + W)

        def randint(low: int, high: int, *shape: int, g: torch.Generator = g) -> torch.Tensor:
            return torch.randint(low, high, shape, generator=g, device=device, dtype=torch.int32)

        columns = 9
        table = randint(0, 1000, R, columns + 4)
        table[:, 3] = -1
        table[:, 5] = INT32_MAX  # stale garbage: does not fit as a slot unless a block has one row
        local = randint(-60, block_size * (columns + 1), T, W + 3)[:, :W]  # below zero, and a column too far
        if W:
            local[:, -5:] = -1
        requests = randint(0, R, T + 2)
        requests[3:4] = R + 7  # stale id of a padding row
        valid = torch.ones(T, dtype=torch.bool, device=device)
        valid[2:3] = False
        yield (
            f"T{T}-W{W}-page{block_size}",
            {
                "topk_indices": local,
                "token_to_req_indices": requests,
                "block_table": table[:, :columns],
                "block_size": block_size,
                "is_valid_token": valid if T != 5 else valid.int(),
            },
        )


def cost(
    topk_indices: torch.Tensor,
    token_to_req_indices: torch.Tensor,
    block_table: torch.Tensor,
    block_size: int,
    is_valid_token: torch.Tensor,
) -> Cost:
    T = topk_indices.shape[0]
    return Cost(bytes=12 * topk_indices.numel() + 8 * T + is_valid_token.nbytes, flops=0)


SPEC = OpSpec(global_topk_indices, cases, Tolerance.exact(), cost, outputs=("indices", "lens"))
