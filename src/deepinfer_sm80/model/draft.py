"""DSpark: three draft layers that propose a block of tokens at once, and the heads that make tokens of it.

    main_x_t = rms(main_proj . [features of the target at t], main_norm)            t: every accepted position
    context of draft layer j: key rows of main_x at t, in place of the draft's own pass over the text
    block: anchor and K - 1 noise tokens at positions P .. P + K - 1, P = number of accepted positions
    every layer: as in the target, window only; each of the K queries sees context [max(P - 128, 0), P) and all K rows
    h = collapse(X, pre of the last experts), U = bf16(head . rms(h, norm))         the target's embedding and head
    for k = 0 .. K - 1:  m = markov_embed[token k - 1, the anchor first],  L = bf16(U_k + bf16(markov_head . m))
                         token k = the best of L,  confidence = sigmoid(w . [h_k ; m]) in float32
Token k stands at position P + 1 + k: the anchor's row predicts the first one. Confidences never change a token.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from deepinfer_sm80.errors import UnsupportedOptionError
from deepinfer_sm80.model import linear, rope, streams
from deepinfer_sm80.model.attention import attend
from deepinfer_sm80.model.checkpoint import Reader
from deepinfer_sm80.model.forward import Layer
from deepinfer_sm80.model.rejection import best_token

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from deepinfer_sm80.model.forward import TextModel
    from deepinfer_sm80.model.linear import Source


@dataclasses.dataclass
class Context:
    """What the draft knows of a sequence.

    length  P, the accepted positions so far
    rows    per draft layer bfloat16 [n, 512]: the key rows of the last n = min(P, 128) of them
    """

    length: int
    rows: list[torch.Tensor]


class Proposal(NamedTuple):
    """K drafted tokens: ids int64 [K], the logits bfloat16 [K, vocab] that they were chosen from, and confidences
    float32 [K] that the target will accept each, given that it accepts those before."""

    tokens: torch.Tensor
    logits: torch.Tensor
    confidences: torch.Tensor


class Draft:
    """The draft of ``target``, whose embedding, head, configuration and switches it shares."""

    def __init__(self, target: TextModel, source: Source) -> None:
        """``source`` holds the ``mtp.*`` tensors."""
        config, device = target.config, target.device
        self.config, self.device = config, device
        self.embed, self.head, self.eps = target.embed, target.head, config.rms_norm_eps
        self.rounded = linear.input_rounding(target.switches)
        weights, last = linear.Weights(source, device), f"mtp.{config.num_nextn_predict_layers - 1}"
        self.main_proj, self.main_norm = weights.matrix("mtp.0.main_proj"), weights.norm("mtp.0.main_norm")
        self.norm = weights.norm(f"{last}.norm")
        self.markov_embed = weights.matrix(f"{last}.markov_head.embed")
        self.markov_head = weights.matrix(f"{last}.markov_head.head")
        self.confidence = weights.matrix(f"{last}.confidence_head.proj")
        table = rope.table(config, False, config.max_position_embeddings).to(device)
        self.layers = _layers(target, source, table)

    @classmethod
    def from_checkpoint(cls, directory: str | Path, target: TextModel) -> Draft:
        """The draft in ``directory``, which ``target`` was read from. Raises CheckpointError."""
        return cls(target, Reader(Path(directory)))

    def new_context(self, start: int = 0) -> Context:
        """The empty context of a sequence whose features come from position ``start`` on."""
        empty = torch.empty(0, self.config.head_dim, dtype=torch.bfloat16, device=self.device)
        return Context(start, [empty for _ in self.layers])

    def extend(self, context: Context, features: torch.Tensor) -> None:
        """Writes the rows of the next accepted positions; ``features`` bfloat16 [T, targets, H], the target's.

        The caller leaves rejected positions out: what was written stays.
        """
        main_x = linear.project(self.rounded(features.flatten(1)), self.main_proj)
        main_x = linear.rms_norm(main_x, self.main_norm, self.eps)
        positions = torch.arange(context.length, context.length + len(features), device=self.device)
        for j, layer in enumerate(self.layers):
            rows = layer.attention.key_rows(main_x, layer.attention.cos_sin[positions])
            context.rows[j] = torch.cat((context.rows[j], rows))[-self.config.sliding_window :]
        context.length += len(features)

    def propose(
        self, context: Context, anchor: int, count: int, choose: Callable[[torch.Tensor], torch.Tensor] = best_token
    ) -> Proposal:
        """``count`` tokens behind ``anchor``, the token at position ``context.length``; leaves the context as it is.

        ``choose`` makes a token id of logits bfloat16 [vocab]: the best one, or a draw. In the middle of a prompt the
        anchor is the next prompt token. Raises UnsupportedOptionError for a ``count`` below 1.
        """
        if count < 1:
            raise UnsupportedOptionError(
                option="num_speculative_tokens", found=count, allowed="1 or more", remedy="Draft without it to draft 0."
            )
        h = self.block(context, anchor, count)
        base = linear.project(linear.rms_norm(h, self.norm, self.eps), self.head)
        tokens, logits, markov = [], [], []
        previous = torch.tensor(anchor, device=self.device)
        for row in base:
            markov.append(self.markov_embed[previous])
            logits.append(row + linear.project(markov[-1][None], self.markov_head)[0])
            previous = choose(logits[-1])
            tokens.append(previous)
        seen = torch.cat((h, torch.stack(markov)), dim=-1)
        confidences = linear.sigmoid(linear.product(seen, self.confidence)[:, 0])
        return Proposal(torch.stack(tokens), torch.stack(logits), confidences)

    def block(self, context: Context, anchor: int, count: int) -> torch.Tensor:
        """What the heads read: bfloat16 [count, H], not normed."""
        config = self.config
        ids = torch.full((count,), config.dspark_noise_token_id, device=self.device)
        ids[0] = anchor
        positions = torch.arange(context.length, context.length + count, device=self.device)
        positions = positions.clamp(max=config.max_position_embeddings - 1)
        X = self.embed[ids][:, None].repeat(1, config.hc_mult, 1)
        pre = streams.first_pre(count, config.hc_mult, self.device)
        for layer, rows in zip(self.layers, context.rows, strict=True):
            X, pre = _through(layer, X, pre, positions, rows)
        return streams.collapse(X, pre)


def _through(
    layer: Layer, X: torch.Tensor, pre: torch.Tensor, positions: torch.Tensor, context: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Streams bfloat16 [K, S, H] and carried pre-mix float32 [K, S] through one draft layer."""
    attention, turn = layer.attention, layer.attention.cos_sin[positions]
    mix, x = layer.enter(0, X, pre)
    rows = torch.cat((context, attention.key_rows(x, turn)))
    seen = torch.ones(len(x), len(rows), dtype=torch.bool, device=x.device)
    out = attend(attention.queries(x, turn)[1], rows, seen, attention.sink)
    X, pre = streams.write_back(X, attention.output(out, turn), mix), mix.pre
    mix, x = layer.enter(1, X, pre)
    return streams.write_back(X, layer.experts(x), mix), mix.pre


class _Behind:
    """``mtp.j`` of ``source`` under the name of the layer behind the target's: ``layers.40`` is ``mtp.0``."""

    def __init__(self, source: Source, layers: int, drafts: int) -> None:
        self.source = source
        self.names = {
            f"layers.{layers + j}.{name.removeprefix(f'mtp.{j}.')}": name
            for j in range(drafts)
            for name in source.headers
            if name.startswith(f"mtp.{j}.")
        }

    @property
    def headers(self) -> Mapping[str, tuple[str, tuple[int, ...]]]:
        return {alias: self.source.headers[name] for alias, name in self.names.items()}

    def load(self, name: str) -> torch.Tensor:
        return self.source.load(self.names[name])


def _layers(target: TextModel, source: Source, table: torch.Tensor) -> list[Layer]:
    """The draft layers: ordinary ones behind the target's, with experts of their own number."""
    config = target.config
    first, drafts = config.num_hidden_layers, config.num_nextn_predict_layers
    own = dataclasses.replace(
        config,
        n_routed_experts=config.dspark_n_routed_experts,
        num_experts_per_tok=config.dspark_num_experts_per_tok,
    )
    weights = linear.Weights(_Behind(source, first, drafts), target.device)
    return [Layer(own, weights, first + j, table, 0, target.switches) for j in range(drafts)]
