"""The text model: logits of a whole prompt, in the order and with the roundings of vLLM 0.33.0 on Ampere.

    e = embedding;  X = e in four streams;  pre = select stream 0
    every layer:  [Engram]  mix, collapse, norm, attention, write back;  mix, collapse, norm, experts, write back
    h = collapse(X, pre of the last experts);  logits = bf16(head . rms(h, norm))
A sublayer writes back with its own coefficients and collapses with those of the sublayer before.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from deepinfer_sm80.model import linear, rope, streams
from deepinfer_sm80.model.attention import Attention, Shared
from deepinfer_sm80.model.checkpoint import Reader
from deepinfer_sm80.model.config import ModelConfig
from deepinfer_sm80.model.engram import Engram
from deepinfer_sm80.model.engram_hash import compress_vocabulary
from deepinfer_sm80.model.experts import Experts
from deepinfer_sm80.model.requirements import require
from deepinfer_sm80.model.schema import check_tensors
from deepinfer_sm80.model.switches import Switches

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from deepinfer_sm80.model.linear import Source

_ROWS_AT_ONCE = 256  # logits in flight: 129280 float32 each, 132 MB


class Layer:
    """One decoder layer."""

    def __init__(
        self, config: ModelConfig, weights: linear.Weights, layer: int, cos_sin: torch.Tensor, pad: int, sw: Switches
    ) -> None:
        prefix = f"layers.{layer}"
        has_engram = layer in config.engram_layer_ids and sw.has("engram")
        self.engram = Engram(config, weights, layer, pad) if has_engram else None
        self.mixers = [streams.Mixer(config, weights, f"{prefix}.hc_{side}", sw) for side in ("attn", "ffn")]
        self.norms = [weights.norm(f"{prefix}.{side}_norm") for side in ("attn", "ffn")]
        self.attention = Attention(config, weights, layer, cos_sin, sw)
        self.experts = Experts(
            config, weights, f"{prefix}.ffn", config.n_routed_experts, config.num_experts_per_tok, sw
        )
        self.eps, self.switches = config.rms_norm_eps, sw

    def __call__(
        self, X: torch.Tensor, pre: torch.Tensor, positions: torch.Tensor, history: torch.Tensor, shared: Shared
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Streams bfloat16 [T, S, H] and the carried pre-mix float32 [T, S]: of the layer before -> of this layer."""
        if self.engram is not None:
            X = self.engram(X, history)

        def attention(x: torch.Tensor) -> torch.Tensor:
            y = self.attention(x, positions, shared)
            return y if self.switches.has("attention") else torch.zeros_like(y)

        X, pre = self._sublayer(0, X, pre, attention)
        return self._sublayer(1, X, pre, self.experts)

    def _sublayer(
        self, side: int, X: torch.Tensor, pre: torch.Tensor, run: Callable[[torch.Tensor], torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        mix = self.mixers[side](X)
        x = streams.collapse(X, pre if self.switches.has("delayed_premix") else mix.pre)
        y = run(linear.rms_norm(x, self.norms[side], self.eps))
        return streams.write_back(X, y, mix), mix.pre


class TextModel:
    """DeepSeek-V4.1's text model over the tensors of ``source``; ``compressed_ids``: token id -> its Engram id."""

    def __init__(
        self,
        config: ModelConfig,
        source: Source,
        compressed_ids: Sequence[int],
        switches: Switches | None = None,
        device: str | torch.device = "cpu",
    ) -> None:
        self.config, self.switches, self.device = config, switches or Switches(), torch.device(device)
        weights = linear.Weights(source, self.device)
        self.compressed_ids = torch.tensor(compressed_ids, device=self.device)
        self.embed, self.head = weights.matrix("embed"), weights.matrix("head")
        self.norm = weights.norm("norm")
        rows = config.max_position_embeddings
        tables = [rope.table(config, compressed, rows).to(self.device) for compressed in (False, True)]
        pad = int(self.compressed_ids[config.engram_pad_token_id])
        self.layers = [
            Layer(config, weights, layer, tables[config.compress_ratios[layer] > 0], pad, self.switches)
            for layer in range(config.num_hidden_layers)
        ]

    @classmethod
    def from_checkpoint(
        cls, directory: str | Path, switches: Switches | None = None, device: str | torch.device = "cpu"
    ) -> TextModel:
        """The model in ``directory``. Raises CheckpointError or ModelConfigError if that is not a complete one."""
        path = Path(directory)
        reader = Reader(path)
        config = ModelConfig.from_dict(json.loads((path / "config.json").read_text(encoding="utf-8")))
        check_tensors(config, reader.headers, str(path))
        tokenizer = require("tokenizers").Tokenizer.from_file(str(path / "tokenizer.json"))
        return cls(config, reader, compress_vocabulary(tokenizer)[0], switches, device)

    def hidden(self, tokens: Sequence[int] | torch.Tensor) -> torch.Tensor:
        """Token ids [T] -> what the head reads, bfloat16 [T, H]."""
        ids = torch.as_tensor(tokens, dtype=torch.int64, device=self.device)
        positions, history, shared = torch.arange(len(ids), device=self.device), self.compressed_ids[ids], Shared()
        X = self.embed[ids][:, None].repeat(1, self.config.hc_mult, 1)
        pre = streams.first_pre(len(ids), self.config.hc_mult, self.device)
        for layer in self.layers:
            X, pre = layer(X, pre, positions, history, shared)
        return linear.rms_norm(streams.collapse(X, pre), self.norm, self.config.rms_norm_eps)

    def forward(self, tokens: Sequence[int] | torch.Tensor) -> torch.Tensor:
        """Token ids [T] -> logits bfloat16 [T, vocab]."""
        return linear.project(self.hidden(tokens), self.head)

    def prompt_logprobs(self, tokens: Sequence[int] | torch.Tensor) -> torch.Tensor:
        """Token ids [T] -> float32 [T - 1]: log-probability of every token but the first, given those before it."""
        ids = torch.as_tensor(tokens, dtype=torch.int64, device=self.device)
        found = []
        for h, following in zip(self.hidden(ids)[:-1].split(_ROWS_AT_ONCE), ids[1:].split(_ROWS_AT_ONCE), strict=True):
            logits = linear.project(h, self.head).float()
            found.append(logits.gather(1, following[:, None])[:, 0] - logits.logsumexp(-1))
        return torch.cat(found)
