"""Attention: one shared key head whose rows are also the values; a sliding window and chosen compressed rows.

    qr = rms(wq_a . x), q = wq_b . qr [64, 512], kv = rms(wkv . x) [512]; q rotated at p, rows read back from records
    out_h = softmax over the window's rows and the chosen compressed rows, one entry more for the sink, times the rows
    y = wo_b . concat over groups (wo_a_g . (out rotated back at p)_g)
Layers behind an index source reuse its choice; layers behind a KV source read its rows. A step first leaves its rows in
the caches (``write``), then every query reads them there, its own too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from deepinfer_sm80.model import linear, rope
from deepinfer_sm80.model.cache import as_recorded, profile_of
from deepinfer_sm80.model.compressor import Compressor
from deepinfer_sm80.model.indexer import Indexer, KeyMaker

if TYPE_CHECKING:
    from deepinfer_sm80.model.choices import Choices
    from deepinfer_sm80.model.config import ModelConfig
    from deepinfer_sm80.model.linear import Weights
    from deepinfer_sm80.model.state import State
    from deepinfer_sm80.model.switches import Switches

_QUERIES_AT_ONCE = 32


@dataclass
class Step:
    """The rows of one step on their way through the layers.

    positions   int64 [T], ascending; the last ones only, once a step is trimmed
    floor       no window row below this position is seen
    chosen      bool [T, n] over the compressed rows: what the last index source chose
    candidates  bool [T, n]: what the candidate source leaves to the index sources behind it
    choices     watches what is chosen, or imposes it
    """

    state: State
    positions: torch.Tensor
    floor: int
    chosen: torch.Tensor | None = None
    candidates: torch.Tensor | None = None
    choices: Choices | None = None


class Attention:
    """The attention of layer ``layer``; ``cos_sin`` float32 [positions, 64] is its table."""

    def __init__(
        self, config: ModelConfig, weights: Weights, layer: int, cos_sin: torch.Tensor, switches: Switches
    ) -> None:
        prefix = f"layers.{layer}.attn"
        self.config, self.layer, self.cos_sin, self.switches = config, layer, cos_sin, switches
        self.ratio, self.eps = config.compress_ratios[layer], config.rms_norm_eps
        self.profile, self.rounded = profile_of(switches), linear.input_rounding(switches)
        self.wq_a, self.wq_b = weights.matrix(f"{prefix}.wq_a"), weights.matrix(f"{prefix}.wq_b")
        self.wkv, self.wo_b = weights.matrix(f"{prefix}.wkv"), weights.matrix(f"{prefix}.wo_b")
        self.wo_a = weights.matrix(f"{prefix}.wo_a").view(config.o_groups, config.o_lora_rank, -1)
        self.q_norm, self.kv_norm = weights.norm(f"{prefix}.q_norm"), weights.norm(f"{prefix}.kv_norm")
        sink = weights.tensor(f"{prefix}.attn_sink")
        self.sink = sink if switches.has("sinks") else torch.full_like(sink, -torch.inf)
        self.source = max((source for source in config.kv_source_layer_ids if source <= layer), default=-1)
        owner, chooser = layer in config.kv_source_layer_ids, layer in config.index_source_layer_ids
        self.compressor = Compressor(config, weights, layer, switches) if owner else None
        self.key_maker = KeyMaker(config, weights, layer, switches) if owner else None
        self.indexer = Indexer(config, weights, layer, switches) if chooser else None

    def write(self, x: torch.Tensor, step: Step) -> None:
        """x bfloat16 [T, H] of the rows of ``step`` -> window rows, and at a KV source compressed rows and keys."""
        rows = self.key_rows(x, self.cos_sin[step.positions])
        step.state.write_window(self.layer, step.positions, rows)
        if self.compressor is None or self.key_maker is None:
            return
        start = int(step.positions[0])
        latent = self.compressor(x, start, step.state.rings.get(self.layer))
        numbers = torch.arange(len(latent), device=x.device) + start // self.ratio
        at = numbers * self.ratio
        rows = as_recorded(latent, self.cos_sin[at], self.profile.compressed)
        step.state.write_compressed(self.layer, numbers, rows, self.key_maker(latent, at, self.cos_sin))

    def __call__(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        """x bfloat16 [T, H] of the rows of ``step``, which are written -> bfloat16 [T, H]."""
        turn = self.cos_sin[step.positions]
        qr, q = self.queries(x, turn)
        if self.indexer is not None:
            self._choose(self.indexer, qr, x, step)
        return self.output(self._attend(q, step), turn)

    def key_rows(self, x: torch.Tensor, turn: torch.Tensor) -> torch.Tensor:
        """x bfloat16 [T, H], turn float32 [T, 64] of their positions -> window rows bfloat16 [T, 512], as recorded."""
        kv = linear.rms_norm(linear.project(self.rounded(x), self.wkv), self.kv_norm, self.eps)
        return as_recorded(kv, turn, self.profile.window)

    def queries(self, x: torch.Tensor, turn: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x bfloat16 [T, H], turn float32 [T, 64] -> qr bfloat16 [T, q_lora_rank], q bfloat16 [T, heads, 512]."""
        qr = linear.rms_norm(linear.project(self.rounded(x), self.wq_a), self.q_norm, self.eps)
        q = linear.project(self.rounded(qr), self.wq_b).view(len(x), -1, self.config.head_dim)
        return qr, rope.rotate(q, turn)

    def _choose(self, indexer: Indexer, qr: torch.Tensor, x: torch.Tensor, step: Step) -> None:
        lengths, source = (step.positions + 1) // self.ratio, self.config.candidate_source_layer_id
        keys = step.state.index_keys(self.source, int(lengths[-1]))
        scores = indexer.scores(qr, x, step.positions, self.cos_sin, keys)
        if not self.switches.has("index_selection"):
            scores = -torch.arange(scores.shape[1], device=x.device).float().expand_as(scores)
        limited = self.layer > source >= 0 and self.switches.has("candidates")
        among = step.candidates if limited else None
        step.chosen = indexer.choose(scores, lengths, among)
        if step.choices is not None:
            step.chosen = step.choices.choose_rows(self.layer, step.positions, scores, lengths, step.chosen, among)
        if self.layer == source:
            step.candidates = indexer.candidates(scores, lengths)
            if step.choices is not None:
                step.choices.note_candidates(scores, lengths, step.candidates, indexer.block_size)

    def _attend(self, q: torch.Tensor, step: Step) -> torch.Tensor:
        """q bfloat16 [T, heads, 512] -> bfloat16 [T, heads, 512]. As many places as a query can fill are summed over,
        whatever it sees: then a row does not depend on the rows beside it."""
        size = self.config.sliding_window if self.switches.has("window") else len(step.state.history)
        places = torch.arange(size, device=q.device) - size + 1
        parts = []
        for i in range(0, len(q), _QUERIES_AT_ONCE):
            at = step.positions[i : i + _QUERIES_AT_ONCE, None]
            seen = at + places >= step.floor
            rows = step.state.read_window(self.layer, torch.where(seen, at + places, at))
            if self.ratio and step.chosen is not None:
                columns = packed(step.chosen[i : i + _QUERIES_AT_ONCE], self.config.index_topk)
                chosen = step.state.read_compressed(self.source, columns.clamp_min(0))
                rows, seen = torch.cat((chosen, rows), dim=1), torch.cat((columns >= 0, seen), dim=1)
            rows = rows.masked_fill(~seen[..., None], 0)
            parts.append(attend(q[i : i + _QUERIES_AT_ONCE], rows, seen, self.sink))
        return torch.cat(parts)

    def output(self, out: torch.Tensor, turn: torch.Tensor) -> torch.Tensor:
        """out bfloat16 [T, heads, 512], turn float32 [T, 64] -> bfloat16 [T, H]."""
        groups = rope.rotate(out, turn, inverse=True).view(len(out), len(self.wo_a), -1)
        z = [linear.project(groups[:, g], weight) for g, weight in enumerate(self.wo_a)]
        return linear.project(self.rounded(torch.cat(z, dim=-1)), self.wo_b)


def packed(chosen: torch.Tensor, most: int) -> torch.Tensor:
    """bool [t, n], at most ``most`` true in a row -> int64 [t, most]: their columns, ascending, then -1."""
    place = torch.where(chosen, chosen.cumsum(-1) - 1, most)
    columns = torch.arange(chosen.shape[1], device=chosen.device).expand_as(place)
    found = torch.full((len(chosen), most + 1), -1, dtype=torch.int64, device=chosen.device)
    return found.scatter_(1, place, columns)[:, :most]


def attend(q: torch.Tensor, rows: torch.Tensor, seen: torch.Tensor, sink: torch.Tensor) -> torch.Tensor:
    """``sparse_mla_prefill`` with a mask: q bfloat16 [t, H, D], rows bfloat16 [n, D] or [t, n, D], seen bool [t, n],
    sink float32 [H] -> bfloat16 [t, H, D]. Zeros where nothing is seen."""
    values = rows.float()
    scores = (q.float() @ values.transpose(-1, -2)).mul_(q.shape[-1] ** -0.5)
    scores.masked_fill_(~seen[:, None], -torch.inf)
    sink = sink[None, :, None]
    largest = torch.maximum(scores.amax(-1, keepdim=True), sink)
    largest = largest.masked_fill(largest == -torch.inf, 0.0)
    p = scores.sub_(largest).exp_()
    total = p.sum(-1, keepdim=True) + (sink - largest).exp()
    return torch.where(total == 0, 0.0, (round_probabilities(p) @ values) / total).bfloat16()


def round_probabilities(p: torch.Tensor) -> torch.Tensor:
    """What the product with the values uses: bfloat16 values, kept in float32."""
    return p.bfloat16().float()
