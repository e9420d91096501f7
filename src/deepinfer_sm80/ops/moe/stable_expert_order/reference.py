"""Put the routes of every expert into token order.

vLLM's ``moe_align_block_size`` groups routes (token times k-th choice) by expert into blocks of ``block_size`` rows,
but fills an expert's rows by atomic counters: their order changes from run to run. Marlin splits the sum over K at
places that depend on the block a row is in, so the same row then rounds differently. Within each run of blocks that
belong to one expert, ascending route numbers with the padding last make the order a function of the routing alone:

    out[segment] = sorted(sorted_token_ids[segment])

A segment is a maximal run of blocks with equal ``expert_ids`` below ``num_tokens_post_padded``; the unused tail beyond
it is one segment of its own. Padding is the value ``num_routes``, larger than every route.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from deepinfer_sm80.ops.contract import Cost, OpSpec, Tolerance

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any


def stable_expert_order(
    sorted_token_ids: torch.Tensor,
    expert_ids: torch.Tensor,
    num_tokens_post_padded: torch.Tensor,
    block_size: int,
    num_routes: int,
) -> torch.Tensor:
    """Sort the routes of every expert; returns int32 [P], P the length of ``sorted_token_ids``.

    ``sorted_token_ids`` int32 [P]: route numbers 0..num_routes-1, grouped by expert, padding ``num_routes``; values in
    the unused tail are clamped into that range. ``expert_ids`` int32 [B], B * block_size >= P: expert of each block, -1
    for a block of another rank. ``num_tokens_post_padded`` int32 [1]: rows in use, a multiple of ``block_size``.
    Raises TensorContractError for other shapes or dtypes. Source: the contract of vLLM 0.33.0's alignment kernel.
    """
    used = int(num_tokens_post_padded)
    ids = sorted_token_ids.clamp(0, num_routes).tolist()
    experts = expert_ids.tolist()
    out: list[int] = []
    while len(out) < used:
        end = len(out) + block_size
        while end < used and experts[end // block_size] == experts[len(out) // block_size]:
            end += block_size
        out += sorted(ids[len(out) : end])
    out += sorted(ids[used:])
    return torch.tensor(out, dtype=torch.int32, device=sorted_token_ids.device)


def _aligned(
    tokens: int, topk: int, experts: int, block_size: int, local: int, seed: int, device: str
) -> dict[str, Any]:
    """As the alignment kernel leaves it, an expert's routes shuffled; experts from ``local`` on are other ranks'."""
    g = torch.Generator().manual_seed(seed)
    chosen = [expert for _ in range(tokens) for expert in torch.randperm(experts, generator=g)[:topk].tolist()]
    ids: list[int] = []
    blocks: list[int] = []
    for expert in range(experts):
        routes = [i for i, e in enumerate(chosen) if e == expert]
        routes = [routes[i] for i in torch.randperm(len(routes), generator=g).tolist()]
        ids += routes + [tokens * topk] * (-len(routes) % block_size)
        blocks += [expert if expert < local else -1] * (-(-len(routes) // block_size))
    used, total = len(ids), tokens * topk + experts * (block_size - 1)
    tail = torch.randint(-5, tokens * topk + 5, (total - used,), generator=g).tolist()
    blocks += [-7] * (-(-total // block_size) - len(blocks))

    def int32(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    return {
        "sorted_token_ids": int32(ids + tail),
        "expert_ids": int32(blocks),
        "num_tokens_post_padded": int32([used]),
        "block_size": block_size,
        "num_routes": tokens * topk,
    }


def cases(device: str) -> Iterator[tuple[str, dict[str, Any]]]:
    for tokens, topk, experts, block_size, local in (
        (0, 2, 8, 8, 8),
        (1, 6, 384, 8, 384),
        (3, 2, 8, 16, 8),
        (200, 2, 8, 64, 8),
        (65, 6, 384, 8, 48),
        (257, 3, 128, 48, 128),
    ):
        name = f"T{tokens}-K{topk}-E{experts}-block{block_size}" + (f"-local{local}" if local < experts else "")
        yield name, _aligned(tokens, topk, experts, block_size, local, tokens * 31 + block_size, device)


def cost(
    sorted_token_ids: torch.Tensor,
    expert_ids: torch.Tensor,
    num_tokens_post_padded: torch.Tensor,
    block_size: int,
    num_routes: int,
) -> Cost:
    return Cost(bytes=2 * sorted_token_ids.nbytes + expert_ids.nbytes, flops=0)


SPEC = OpSpec(stable_expert_order, cases, Tolerance.exact(), cost)
