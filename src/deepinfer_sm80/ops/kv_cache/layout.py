"""Byte offsets inside a page of the two uint8 caches. The only home of these numbers.

Key/value record, 584 bytes a row. All data rows come first, then all scale rows; the page is padded at its end::

    page + i * 576                      448 E4M3 codes (dims 0..447), then 64 bfloat16 (dims 448..511, rotated)
    page + block_size * 576 + i * 8     7 UE8M0 bytes (one per 64 dims of the first 448), then one zero pad byte

Index key, 132 bytes a row::

    page + i * 128                      128 E4M3 codes
    page + block_size * 128 + i * 4     one float32 scale, a power of two

Row i of page b is slot b * block_size + i; page b begins b * stride(0) bytes after the first one. Always take
``stride(0)``: caches that share a block are padded, so the page stride is larger than block_size * row bytes. Page id
times page stride passes 2^31 in real caches: address in int64. Source: vLLM 0.33.0's fp8_ds_mla and FP8 indexer caches.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

HEAD_DIM = 512
NOPE_DIM = 448
ROPE_DIM = 64
QUANT_GROUP = 64
NUM_SCALES = NOPE_DIM // QUANT_GROUP

DATA_BYTES = NOPE_DIM + 2 * ROPE_DIM
SCALE_BYTES = NUM_SCALES + 1
RECORD_BYTES = DATA_BYTES + SCALE_BYTES

INDEX_DIM = 128
INDEX_SCALE_BYTES = 4
INDEX_RECORD_BYTES = INDEX_DIM + INDEX_SCALE_BYTES

AMAX_FLOOR = 1e-4
"""A quantisation group's largest magnitude counts as at least this much, so that a zero group has a scale."""


def num_slots(cache: torch.Tensor) -> int:
    """Rows of a paged cache [blocks, block_size, bytes]; slots at or beyond it do not exist."""
    return cache.shape[0] * cache.shape[1]


def record_offsets(cache: torch.Tensor, slot: int) -> tuple[int, int]:
    """Bytes from the cache's first byte to the data and to the scales of ``slot`` in a 584-byte record cache."""
    return _offsets(cache, slot, DATA_BYTES, SCALE_BYTES)


def index_key_offsets(cache: torch.Tensor, slot: int) -> tuple[int, int]:
    """Bytes from the cache's first byte to the codes and to the scale of ``slot`` in a 132-byte index-key cache."""
    return _offsets(cache, slot, INDEX_DIM, INDEX_SCALE_BYTES)


def record_views(cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of a 584-byte record cache as data [blocks, block_size, 576] and scales [blocks, block_size, 8], uint8."""
    return _views(cache, DATA_BYTES, SCALE_BYTES)


def index_key_views(cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of a 132-byte index-key cache as codes [blocks, block_size, 128] and scales [blocks, block_size, 4]."""
    return _views(cache, INDEX_DIM, INDEX_SCALE_BYTES)


def _offsets(cache: torch.Tensor, slot: int, data_bytes: int, scale_bytes: int) -> tuple[int, int]:
    block_size = cache.shape[1]
    page, row = slot // block_size * cache.stride(0), slot % block_size
    return page + row * data_bytes, page + block_size * data_bytes + row * scale_bytes


def _views(cache: torch.Tensor, data_bytes: int, scale_bytes: int) -> tuple[torch.Tensor, torch.Tensor]:
    blocks, block_size = cache.shape[:2]
    page_stride, start = cache.stride(0), cache.storage_offset()
    data = cache.as_strided((blocks, block_size, data_bytes), (page_stride, data_bytes, 1), start)
    scales = cache.as_strided(
        (blocks, block_size, scale_bytes), (page_stride, scale_bytes, 1), start + block_size * data_bytes
    )
    return data, scales
