"""Random arguments of magnitude one on one device, and what a case is made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from deepinfer_sm80.ops.formats import e4m3
from deepinfer_sm80.ops.kv_cache.layout import (
    HEAD_DIM,
    INDEX_DIM,
    INDEX_RECORD_BYTES,
    NOPE_DIM,
    RECORD_BYTES,
    index_key_views,
    record_views,
)

if TYPE_CHECKING:
    from collections.abc import Callable


class Builder:
    """Random tensors on one device from one seed; ``pool`` returns the shared tensor of that name if there is one."""

    def __init__(self, device: str, seed: int, shared: dict[str, torch.Tensor]) -> None:
        self.device, self.seed, self.shared = device, seed, shared
        self.generator = torch.Generator(device).manual_seed(seed)

    def randn(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator, device=self.device)

    def randint(self, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=self.generator, device=self.device, dtype=dtype)

    def full(self, value: int, *shape: int) -> torch.Tensor:
        return torch.full(shape, value, dtype=torch.int32, device=self.device)

    def pool(self, name: str, build: Callable[[], torch.Tensor]) -> torch.Tensor:
        if name in self.shared:
            return self.shared[name]
        # a generator of its own: what is drawn afterwards must not depend on whether the tensor was shared
        outer, self.generator = self.generator, torch.Generator(self.device).manual_seed(self.seed + len(name) * 7919)
        built, self.generator = build(), outer
        return built

    def pages(self, blocks: int, block_size: int, width: int) -> torch.Tensor:
        """Zeros uint8 [blocks, block_size, width] whose page stride is padded to 576 bytes."""
        stride = -(-block_size * width // 576) * 576
        storage = torch.zeros(blocks * stride, dtype=torch.uint8, device=self.device)
        return storage.as_strided((blocks, block_size, width), (stride, width, 1))

    def records(self, rows: int, block_size: int) -> torch.Tensor:
        """A paged record cache uint8 [blocks, block_size, 584] of at least ``rows`` rows, pages padded to 576 bytes."""
        blocks = -(-rows // block_size)
        cache = self.pages(blocks, block_size, RECORD_BYTES)
        data, scales = record_views(cache)
        for first in range(0, blocks, 256):
            part = slice(first, min(first + 256, blocks))
            count = part.stop - part.start
            data[part, :, :NOPE_DIM] = e4m3.encode(self.randn(count, block_size, NOPE_DIM) * 64)
            rope = self.randn(count, block_size, HEAD_DIM - NOPE_DIM).bfloat16()
            data[part, :, NOPE_DIM:] = rope.view(torch.uint8)
            scales[part, :, :7] = self.randint(120, 123, count, block_size, 7, dtype=torch.uint8)
        return cache

    def codes(self, *shape: int) -> torch.Tensor:
        """E4M3 codes of values around 60, without NaN."""
        return e4m3.encode(self.randn(*shape) * 60)

    def index_keys(self, rows: int, block_size: int) -> torch.Tensor:
        """A paged index-key cache uint8 [blocks, block_size, 132] of ``rows`` rows, pages padded to 576 bytes."""
        blocks = -(-rows // block_size)
        cache = self.pages(blocks, block_size, INDEX_RECORD_BYTES)
        data, scales = index_key_views(cache)
        for first in range(0, blocks, 1024):
            part = slice(first, min(first + 1024, blocks))
            data[part] = self.codes(part.stop - part.start, block_size, INDEX_DIM)
            exponents = self.randint(-12, -4, part.stop - part.start, block_size, 1)
            scales[part] = torch.exp2(exponents.float()).view(torch.uint8)
        return cache

    def aligned_routes(
        self, tokens: int, chosen: int, experts: int, block_size: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Routes grouped by expert in blocks, an expert's in random order, as vLLM's alignment kernel leaves them.

        Returns routes int32 [P], the expert of every block int32 [B] and the rows in use int32 [1].
        """
        routes = tokens * chosen
        draw = torch.rand(tokens, experts, generator=self.generator, device=self.device)
        expert = draw.topk(chosen, -1).indices.flatten()
        shuffled = (expert + torch.rand(routes, generator=self.generator, device=self.device)).argsort()
        counts = torch.bincount(expert, minlength=experts)
        padded = (counts + block_size - 1) // block_size * block_size
        owner = expert[shuffled]
        rank = torch.arange(routes, device=self.device) - (counts.cumsum(0) - counts)[owner]
        ids = self.full(routes, routes + experts * (block_size - 1))
        ids[(padded.cumsum(0) - padded)[owner] + rank] = shuffled.int()
        blocks = torch.arange(-(-ids.numel() // block_size), device=self.device) * block_size
        owners = torch.searchsorted(padded.cumsum(0), blocks, right=True)
        return ids, owners.int(), padded.sum().int().view(1)

    def rotations(self, positions: int) -> torch.Tensor:
        angle = torch.rand(positions, 32, generator=self.generator, device=self.device) * 6.2831855
        return torch.cat((angle.cos(), angle.sin()), -1)


@dataclass(frozen=True, slots=True)
class BenchCase:
    """One size of one operator. ``build(builder)`` returns the launcher's arguments; ``pools`` may be shared."""

    op: str
    name: str
    build: Callable[[Builder], dict[str, Any]]
    pools: tuple[str, ...] = ()
    quick: bool = False

    def arguments(self, device: str, seed: int, shared: dict[str, torch.Tensor] | None = None) -> dict[str, Any]:
        return self.build(Builder(device, seed, shared or {}))
