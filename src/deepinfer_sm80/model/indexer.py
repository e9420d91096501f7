"""The indexer: which compressed rows a query attends to.

key    k = bf16(rms(bf16(wk . latent), k_norm)), dims 64..127 rotated at c * ratio, then as the profile stores it
query  q = wq_b . qr [32, 128], dims 64..127 rotated at p, then like a key, head by head
score[p, c] = sum_h weights[p, h] * 128^-0.5 * 32^-0.5 * relu(q[p, h] . k[c]),  weights = bf16(weights_proj . x)
chosen: the index_topk best of c < (p + 1) // ratio; behind the candidate source only among its candidate blocks
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn.functional import pad

from deepinfer_sm80.model import linear
from deepinfer_sm80.model.cache import Vectors, profile_of
from deepinfer_sm80.ops.indexer import ranking, vectors

if TYPE_CHECKING:
    from deepinfer_sm80.model.config import ModelConfig
    from deepinfer_sm80.model.linear import Weights
    from deepinfer_sm80.model.switches import Switches

_QUERIES_AT_ONCE = 64
_NEVER = float("-inf")


class KeyMaker:
    """Index keys of a layer that owns a compressed cache."""

    def __init__(self, config: ModelConfig, weights: Weights, layer: int, switches: Switches) -> None:
        prefix = f"layers.{layer}.attn.indexer"
        self.eps, self.stored = config.rms_norm_eps, profile_of(switches).index_vectors
        self.wk, self.norm = weights.matrix(f"{prefix}.wk"), weights.norm(f"{prefix}.k_norm")

    def __call__(self, latent: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor) -> Vectors:
        """latent bfloat16 [n, 512] (not rotated), positions int64 [n], the YaRN table."""
        k = linear.rms_norm(linear.project(latent, self.wk), self.norm, self.eps)
        return self.stored(vectors.rotate(k.float()[:, None], positions, cos_sin)[:, 0])


class Indexer:
    """Queries and choice of layer ``layer``."""

    def __init__(self, config: ModelConfig, weights: Weights, layer: int, switches: Switches) -> None:
        prefix = f"layers.{layer}.attn.indexer"
        self.heads, self.dim, self.topk = config.index_n_heads, config.index_head_dim, config.index_topk
        self.stored, self.rounded = profile_of(switches).index_vectors, linear.input_rounding(switches)
        self.blocks, self.block_size = config.candidate_topk_blocks, config.candidate_block_size
        self.wq_b = weights.matrix(f"{prefix}.wq_b")
        self.weights_proj = weights.matrix(f"{prefix}.weights_proj")

    def scores(
        self, qr: torch.Tensor, x: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor, keys: Vectors
    ) -> torch.Tensor:
        """qr bfloat16 [T, q_lora], x bfloat16 [T, H], positions int64 [T] -> float32 [T, n], nothing masked.

        Dots and their sum are float64 before one rounding: no other row or key can change their order.
        """
        q = linear.project(self.rounded(qr), self.wq_b).view(-1, self.heads, self.dim)
        values, scale = self.stored(vectors.rotate(q.float(), positions, cos_sin))
        weights = linear.project(x, self.weights_proj).float() * scale * self.dim**-0.5 * self.heads**-0.5
        out, k = [], keys.values.double().T
        for part, share in zip(values.split(_QUERIES_AT_ONCE), weights.split(_QUERIES_AT_ONCE), strict=True):
            dots = (part.double().flatten(0, 1) @ k).relu().view(len(part), self.heads, -1)
            out.append(((share[:, None].double() @ dots)[:, 0] * keys.scale).float())
        return torch.cat(out)

    def choose(self, scores: torch.Tensor, lengths: torch.Tensor, candidates: torch.Tensor | None) -> torch.Tensor:
        """Chosen rows as bool [T, n]: among the first ``lengths`` [T] and, if given, ``candidates`` bool [T, n]."""
        eligible = before(scores, lengths)
        if candidates is not None:
            eligible = eligible & candidates
        if scores.shape[1] <= self.topk:
            return eligible
        return _marked(ranking.largest(scores.masked_fill(~eligible, _NEVER), self.topk), scores.shape[1])

    def candidates(self, scores: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """Rows of the candidate blocks as bool [T, n]: the best blocks, the newest one always."""
        n = scores.shape[1]
        masked = pad(scores.masked_fill(~before(scores, lengths), _NEVER), (0, -n % self.block_size), value=_NEVER)
        best = masked.unflatten(1, (-1, self.block_size)).amax(-1)
        newest = torch.arange(best.shape[1], device=best.device) == ((lengths - 1) // self.block_size)[:, None]
        if best.shape[1] > self.blocks:
            kept = _marked(ranking.largest(best, self.blocks, pinned=newest), best.shape[1])
        else:
            kept = (best > _NEVER) | newest
        return kept.repeat_interleave(self.block_size, 1)[:, :n]


def before(scores: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """scores [T, n], lengths int64 [T] -> bool [T, n]: the first ``lengths`` columns."""
    return torch.arange(scores.shape[1], device=scores.device) < lengths[:, None]


def _marked(columns: torch.Tensor, width: int) -> torch.Tensor:
    """int32 [T, k] with -1s -> bool [T, width]."""
    marked = torch.zeros(len(columns), width + 1, dtype=torch.bool, device=columns.device)
    return marked.scatter_(1, torch.where(columns < 0, width, columns).long(), True)[:, :width]
