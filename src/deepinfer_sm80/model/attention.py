"""Attention: one shared key head whose rows are also the values; a sliding window and chosen compressed rows.

    qr = rms(wq_a . x), q = wq_b . qr [64, 512], kv = rms(wkv . x) [512]; q rotated at p, rows read back from records
    out_h = softmax over the window's rows and the chosen compressed rows, one entry more for the sink, times the rows
    y = wo_b . concat over groups (wo_a_g . (out rotated back at p)_g)
Layers behind an index source reuse its choice; layers behind a KV source read its rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from deepinfer_sm80.model import linear, rope
from deepinfer_sm80.model.cache import as_recorded
from deepinfer_sm80.model.compressor import Compressor
from deepinfer_sm80.model.indexer import Indexer, KeyMaker, Keys

if TYPE_CHECKING:
    from deepinfer_sm80.model.config import ModelConfig
    from deepinfer_sm80.model.linear import Weights
    from deepinfer_sm80.model.switches import Switches

_QUERIES_AT_ONCE = 128


@dataclass
class Shared:
    """What later layers take over: compressed rows bfloat16 [n, 512], their index keys, the chosen rows and the
    candidates as bool [T, n]."""

    rows: torch.Tensor | None = None
    keys: Keys | None = None
    chosen: torch.Tensor | None = None
    candidates: torch.Tensor | None = None


class Attention:
    """The attention of layer ``layer``; ``cos_sin`` float32 [positions, 64] is its table."""

    def __init__(
        self, config: ModelConfig, weights: Weights, layer: int, cos_sin: torch.Tensor, switches: Switches
    ) -> None:
        prefix = f"layers.{layer}.attn"
        self.config, self.layer, self.cos_sin, self.switches = config, layer, cos_sin, switches
        self.ratio, self.eps = config.compress_ratios[layer], config.rms_norm_eps
        self.wq_a, self.wq_b = weights.matrix(f"{prefix}.wq_a"), weights.matrix(f"{prefix}.wq_b")
        self.wkv, self.wo_b = weights.matrix(f"{prefix}.wkv"), weights.matrix(f"{prefix}.wo_b")
        self.wo_a = weights.matrix(f"{prefix}.wo_a").view(config.o_groups, config.o_lora_rank, -1)
        self.q_norm, self.kv_norm = weights.norm(f"{prefix}.q_norm"), weights.norm(f"{prefix}.kv_norm")
        sink = weights.tensor(f"{prefix}.attn_sink")
        self.sink = sink if switches.has("sinks") else torch.full_like(sink, -torch.inf)
        owner, chooser = layer in config.kv_source_layer_ids, layer in config.index_source_layer_ids
        self.compressor = Compressor(config, weights, layer, switches) if owner else None
        self.key_maker = KeyMaker(config, weights, layer) if owner else None
        self.indexer = Indexer(config, weights, layer) if chooser else None

    def __call__(self, x: torch.Tensor, positions: torch.Tensor, shared: Shared) -> torch.Tensor:
        """x bfloat16 [T, H], positions int64 [T] = 0 .. T - 1 -> bfloat16 [T, H]; updates ``shared``."""
        turn = self.cos_sin[positions]
        qr = linear.rms_norm(linear.project(x, self.wq_a), self.q_norm, self.eps)
        own = as_recorded(linear.rms_norm(linear.project(x, self.wkv), self.kv_norm, self.eps), turn)
        q = linear.project(qr, self.wq_b).view(len(x), -1, self.config.head_dim)
        if self.ratio:
            self._compress(x, shared)
            self._choose(qr, x, positions, shared)
        out = self._attend(rope.rotate(q, turn), own, positions, shared)
        return self._output(rope.rotate(out, turn, inverse=True))

    def _compress(self, x: torch.Tensor, shared: Shared) -> None:
        if self.compressor is not None and self.key_maker is not None:
            latent = self.compressor(x)
            at = torch.arange(len(latent), device=x.device) * self.ratio
            shared.rows = as_recorded(latent, self.cos_sin[at])
            shared.keys = self.key_maker(latent, at, self.cos_sin)

    def _choose(self, qr: torch.Tensor, x: torch.Tensor, positions: torch.Tensor, shared: Shared) -> None:
        if self.indexer is None or shared.keys is None:
            return
        lengths, source = (positions + 1) // self.ratio, self.config.candidate_source_layer_id
        scores = self.indexer.scores(qr, x, positions, self.cos_sin, shared.keys)
        if not self.switches.has("index_selection"):
            scores = -torch.arange(scores.shape[1], device=x.device).float().expand_as(scores)
        limited = self.layer > source >= 0 and self.switches.has("candidates")
        shared.chosen = self.indexer.choose(scores, lengths, shared.candidates if limited else None)
        if self.layer == source:
            shared.candidates = self.indexer.candidates(scores, lengths)

    def _attend(self, q: torch.Tensor, own: torch.Tensor, positions: torch.Tensor, shared: Shared) -> torch.Tensor:
        """q bfloat16 [T, heads, 512], own rows bfloat16 [T, 512] -> bfloat16 [T, heads, 512]."""
        window = self.config.sliding_window if self.switches.has("window") else len(own)
        parts = []
        for start in range(0, len(q), _QUERIES_AT_ONCE):
            end, low = min(start + _QUERIES_AT_ONCE, len(q)), max(start - window + 1, 0)
            age = positions[start:end, None] - positions[None, low:end]
            rows, seen = own[low:end], (age >= 0) & (age < window)
            if self.ratio and shared.rows is not None and shared.chosen is not None:
                closed = end // self.ratio
                rows = torch.cat((shared.rows[:closed], rows))
                seen = torch.cat((shared.chosen[start:end, :closed], seen), dim=1)
            parts.append(attend(q[start:end], rows, seen, self.sink))
        return torch.cat(parts)

    def _output(self, out: torch.Tensor) -> torch.Tensor:
        groups = out.view(len(out), len(self.wo_a), -1)
        z = [linear.project(groups[:, g], weight) for g, weight in enumerate(self.wo_a)]
        return linear.project(torch.cat(z, dim=-1), self.wo_b)


def attend(q: torch.Tensor, rows: torch.Tensor, seen: torch.Tensor, sink: torch.Tensor) -> torch.Tensor:
    """``sparse_mla_prefill`` with a mask: q bfloat16 [t, H, D], rows bfloat16 [n, D], seen bool [t, n], sink float32
    [H] -> bfloat16 [t, H, D]. Zeros where nothing is seen."""
    t, H, D = q.shape
    values, shape = rows.float(), (t, H, len(rows))
    scores = (q.reshape(t * H, D).float() @ values.T).view(shape).mul_(D**-0.5)
    scores.masked_fill_(~seen[:, None], -torch.inf)
    sink = sink[None, :, None]
    largest = torch.maximum(scores.amax(-1, keepdim=True), sink)
    largest = largest.masked_fill(largest == -torch.inf, 0.0)
    p = scores.sub_(largest).exp_()
    total = p.sum(-1, keepdim=True) + (sink - largest).exp()
    out = (round_probabilities(p).view(t * H, -1) @ values).view(t, H, D)
    return torch.where(total == 0, 0.0, out / total).bfloat16()


def round_probabilities(p: torch.Tensor) -> torch.Tensor:
    """What the product with the values uses: bfloat16 values, kept in float32."""
    return p.bfloat16().float()
