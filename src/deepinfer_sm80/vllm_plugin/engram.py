"""Engram lookup: vLLM's table placement and hashing, our decode."""

from __future__ import annotations

from typing import Any

import torch

from deepinfer_sm80 import ops
from deepinfer_sm80.errors import UnsupportedOptionError


def lookup(self: Any, indices: torch.Tensor, out: torch.Tensor, background: bool = False) -> None:
    """Fill ``out`` [T, local heads, 256] bf16 with this rank's rows of the table.

    ``indices`` [T, 24] integer row ids. The table may be a GPU view of pinned host memory. ``background`` asks vLLM's
    kernel to leave half of the GPU to the main stream; rows are copied the same way here.
    """
    del background
    if self.peer_rows or out.dtype != torch.bfloat16:
        raise UnsupportedOptionError(
            option="--engram-config",
            found="a table split over peer GPUs" if self.peer_rows else f"a table read as {out.dtype}",
            allowed="cpu_offload=true (default), or a whole table per rank, read as bfloat16",
            remedy="Keep cpu_offload=true, or use tensor parallelism.",
        )
    weight, scale = self._storage()
    ops.engram_lookup(
        weight.view(torch.uint8),
        scale,
        indices,
        self.head_start,
        self.part_n_hash_cols,
        self.vocab_start_idx,
        self.vocab_end_idx,
        out=out,
    )
