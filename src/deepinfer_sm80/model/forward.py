"""The text model: steps of a sequence and logits of a whole prompt, in the order and with the roundings of vLLM 0.33.0
on Ampere.

    e = embedding;  X = e in four streams;  pre = select stream 0
    every layer:  [Engram]  mix, collapse, norm, attention, write back;  mix, collapse, norm, experts, write back
    h = collapse(X, pre of the last experts);  logits = bf16(head . rms(h, norm))
A sublayer writes back with its own coefficients and collapses with those of the sublayer before.

A step is one call for one sequence: a whole prompt, a chunk of it, one token or a token and its drafts. However a
sequence is cut into steps, its results are the same bits (``linear.matmul``), unless ``Switches.bounded_replay`` trims
(``replay``).
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from deepinfer_sm80.model import linear, rope, streams
from deepinfer_sm80.model.attention import Attention, Step
from deepinfer_sm80.model.checkpoint import Reader
from deepinfer_sm80.model.checkpoint_files import read_config, read_tokenizer
from deepinfer_sm80.model.engram import Engram
from deepinfer_sm80.model.engram_hash import compress_vocabulary
from deepinfer_sm80.model.experts import Experts
from deepinfer_sm80.model.replay import StepMode, last_full_layer
from deepinfer_sm80.model.schema import check_tensors
from deepinfer_sm80.model.state import Caches, State
from deepinfer_sm80.model.switches import Switches

if TYPE_CHECKING:
    from collections.abc import Sequence

    from deepinfer_sm80.model.choices import Choices
    from deepinfer_sm80.model.config import ModelConfig
    from deepinfer_sm80.model.linear import Source

_ROWS_AT_ONCE = 256  # logits in flight: 129280 float32 each, 132 MB


class StepOutput(NamedTuple):
    """What a step of T tokens gives.

    hidden    bfloat16 [T, H]: what the head reads, normed; zeros in rows that were trimmed
    kept      bool [T]: rows computed to the end
    features  bfloat16 [T, F, H]: mean of the streams entering each of the F layers ``dspark_target_layer_ids``, which
              is what the DSpark draft reads; zeros in rows that were trimmed
    """

    hidden: torch.Tensor
    kept: torch.Tensor
    features: torch.Tensor


class Layer:
    """One decoder layer."""

    def __init__(
        self, config: ModelConfig, weights: linear.Weights, layer: int, cos_sin: torch.Tensor, pad: int, sw: Switches
    ) -> None:
        prefix = f"layers.{layer}"
        has_engram = layer in config.engram_layer_ids and sw.has("engram")
        self.engram = Engram(config, weights, layer, pad, sw) if has_engram else None
        self.mixers = [streams.Mixer(config, weights, f"{prefix}.hc_{side}", sw) for side in ("attn", "ffn")]
        self.norms = [weights.norm(f"{prefix}.{side}_norm") for side in ("attn", "ffn")]
        self.attention = Attention(config, weights, layer, cos_sin, sw)
        self.experts = Experts(
            config, weights, f"{prefix}.ffn", config.n_routed_experts, config.num_experts_per_tok, sw
        )
        self.number, self.eps, self.switches = layer, config.rms_norm_eps, sw

    def __call__(
        self, X: torch.Tensor, pre: torch.Tensor, step: Step, keep: int | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Streams bfloat16 [T, S, H] and the carried pre-mix float32 [T, S]: of the layer before -> of this layer.

        With ``keep`` every row leaves what the caches hold, and only the last ``keep`` rows go on.
        """
        if self.engram is not None:
            X = self.engram(X, step.state.history)
        mix, x = self.enter(0, X, pre)
        self.attention.write(x, step)
        if keep is not None:
            X, x, mix = X[-keep:], x[-keep:], streams.Coefficients(*(part[-keep:] for part in mix))
            step.positions = step.positions[-keep:]
        y = self.attention(x, step) if self.switches.has("attention") else torch.zeros_like(x)
        X, pre = streams.write_back(X, y, mix), mix.pre
        mix, x = self.enter(1, X, pre)
        watched = None if step.choices is None else partial(step.choices.choose_experts, self.number, step.positions)
        return streams.write_back(X, self.experts(x, watched), mix), mix.pre

    def enter(self, side: int, X: torch.Tensor, pre: torch.Tensor) -> tuple[streams.Coefficients, torch.Tensor]:
        """Streams bfloat16 [T, S, H] and carried pre-mix float32 [T, S] -> coefficients of the sublayer ``side`` (0:
        attention, 1: experts) and its input bfloat16 [T, H], normed."""
        mix = self.mixers[side](X)
        x = streams.collapse(X, pre if self.switches.has("delayed_premix") else mix.pre)
        return mix, linear.rms_norm(x, self.norms[side], self.eps)


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
        self.norm, self.cut = weights.norm("norm"), last_full_layer(config)
        self.layers_behind = range((self.cut or 0) + 1, config.num_hidden_layers)
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
        config = read_config(path)
        check_tensors(config, reader.headers, str(path))
        return cls(config, reader, compress_vocabulary(read_tokenizer(path))[0], switches, device)

    def new_state(self) -> State:
        """An empty sequence, in caches of its own."""
        return State(Caches(self.config, self.switches.bounded_replay, self.device))

    def step(
        self,
        tokens: Sequence[int] | torch.Tensor,
        state: State,
        mode: StepMode | None = None,
        keep_all: bool = False,
        choices: Choices | None = None,
    ) -> StepOutput:
        """Computes the next token ids [T] of ``state`` and moves it on. No token is a step too.

        ``mode`` (default: eager) and ``keep_all`` (prompt log-probabilities are wanted) matter under
        ``Switches.bounded_replay`` only. Raises SequenceStateError beyond ``max_position_embeddings``.
        """
        ids = torch.as_tensor(tokens, dtype=torch.int64, device=self.device)
        T, window, start = len(ids), self.config.sliding_window, state.length
        trims = self.switches.bounded_replay and self.cut is not None and not keep_all
        first = T - window if trims and (mode or StepMode()).trims(T, window) else 0
        targets, width = self.config.dspark_target_layer_ids, self.config.hidden_size
        hidden, features = self.embed.new_zeros(T, width), self.embed.new_zeros(T, len(targets), width)
        out = StepOutput(hidden, torch.arange(T, device=self.device) >= first, features)
        if not T:
            return out
        state.begin(self.compressed_ids[ids])
        step = Step(state, torch.arange(start, start + T, device=self.device), state.replay_start, choices=choices)
        X = self.embed[ids][:, None].repeat(1, self.config.hc_mult, 1)
        pre = streams.first_pre(T, self.config.hc_mult, self.device)
        for number, layer in enumerate(self.layers):
            if number in targets:
                features[first:, targets.index(number)] = X[first - T :].float().mean(1).bfloat16()
            trimming = first > 0 and number == self.cut
            X, pre = layer(X, pre, step, T - first if trimming else None)
            if trimming:
                step.floor = max(state.replay_start, start + first)
        state.finish(trimmed=self.layers_behind if first else (), kept=T - first)
        hidden[first:] = linear.rms_norm(streams.collapse(X, pre), self.norm, self.config.rms_norm_eps)
        return out

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """``StepOutput.hidden`` bfloat16 [T, H] -> bfloat16 [T, vocab]."""
        return linear.project(hidden, self.head)

    def hidden(self, tokens: Sequence[int] | torch.Tensor, choices: Choices | None = None) -> torch.Tensor:
        """Token ids [T] -> what the head reads, bfloat16 [T, H], every row computed to the end."""
        return self.step(tokens, self.new_state(), keep_all=True, choices=choices).hidden

    def forward(self, tokens: Sequence[int] | torch.Tensor) -> torch.Tensor:
        """Token ids [T] -> logits bfloat16 [T, vocab]."""
        return self.logits(self.hidden(tokens))

    def prompt_logprobs(self, tokens: Sequence[int] | torch.Tensor, choices: Choices | None = None) -> torch.Tensor:
        """Token ids [T] -> float32 [T - 1]: log-probability of every token but the first, given those before it."""
        ids = torch.as_tensor(tokens, dtype=torch.int64, device=self.device)
        return logprobs_of(self.hidden(ids, choices), self.head, ids)


def logprobs_of(hidden: torch.Tensor, head: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """float32 [T - 1]: log-probability of every token but the first, from bfloat16 hidden [T, H] and head [V, H]."""
    found = []
    for h, following in zip(hidden[:-1].split(_ROWS_AT_ONCE), tokens[1:].split(_ROWS_AT_ONCE), strict=True):
        logits = linear.project(h, head).float()
        found.append(logits.gather(1, following[:, None])[:, 0] - logits.logsumexp(-1))
    return torch.cat(found)
