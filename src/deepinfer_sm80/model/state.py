"""What a sequence leaves behind: the paged caches of a model and the state of one sequence in them.

    window rows       of every layer, blocks of 32 tokens                                         one block table
    compressed rows,  of every KV source, blocks of 128 tokens: 128 // ratio rows                 one block table
    index keys
    ring              of every source that pools two tokens: what it made of the last 16 tokens   beside the tables
    history           compressed token ids, for the n-grams                                       beside the tables

Block sizes are vLLM's off SM90; its ring has max(8, the power of two >= drafted tokens + 2) rows, 16 for 7 to 14.
Unlike vLLM, a window row stays until its position is forgotten; nothing reads it after it has left the window.

A prefix hit shares blocks. Under bounded replay these are the compressed group's: the sequence
starts 128 tokens before the end of the hit, and what it computes again goes to window rows and the ring only.
Otherwise window rows are shared too and nothing is computed again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from deepinfer_sm80.errors import SequenceStateError
from deepinfer_sm80.model.cache import Vectors
from deepinfer_sm80.model.paging import Blocks, Pages, Table

if TYPE_CHECKING:
    from collections.abc import Iterable

    from deepinfer_sm80.model.config import ModelConfig

WINDOW_BLOCK = 32
COMPRESSED_BLOCK = 128
RING_ROWS = 16


class Caches:
    """The memory that sequences share: a model's caches, empty."""

    def __init__(self, config: ModelConfig, bounded_replay: bool, device: torch.device) -> None:
        self.config, self.bounded_replay, self.device = config, bounded_replay, device
        self.window_blocks, self.compressed_blocks = Blocks(WINDOW_BLOCK), Blocks(COMPRESSED_BLOCK)
        layers, sources = range(config.num_hidden_layers), config.kv_source_layer_ids
        self.window = {layer: Pages(config.head_dim, torch.bfloat16, device) for layer in layers}
        self.rows = {layer: Pages(config.head_dim, torch.bfloat16, device) for layer in sources}
        self.keys = {layer: Pages(config.index_head_dim, torch.float32, device) for layer in sources}
        self.key_scales = {layer: Pages(1, torch.float32, device) for layer in sources}


class Ring:
    """What a pooling compressor made of the last tokens: row p % 16 holds k and gate of the token at p."""

    def __init__(self, dim: int, device: torch.device) -> None:
        self.rows = torch.full((RING_ROWS, 2, dim), torch.nan, device=device)

    def write(self, start: int, k: torch.Tensor, gate: torch.Tensor) -> None:
        """k and gate float32 [T, dim] of the tokens at ``start`` .. start + T - 1."""
        positions = torch.arange(start, start + len(k), device=k.device)[-RING_ROWS:]
        self.rows[positions % RING_ROWS] = torch.stack((k, gate), dim=1)[-RING_ROWS:]

    def read(self, position: int) -> tuple[torch.Tensor, torch.Tensor]:
        """k and gate float32 [1, dim] of the token at ``position``."""
        k, gate = self.rows[position % RING_ROWS]
        return k[None], gate[None]


class State:
    """One sequence: ``length`` tokens computed, those below ``cached`` served by another sequence's blocks.

    replay_start   no row below this position may be read from a window
    valid_from     per layer, the lowest position whose window row exists; trimmed prefill steps raise it
    """

    def __init__(self, caches: Caches) -> None:
        config, self.caches = caches.config, caches
        self.length = self.replay_start = self.cached = self.lent = self.ring_from = 0
        self.valid_from = [0] * config.num_hidden_layers
        self.window_table, self.compressed_table = Table(caches.window_blocks), Table(caches.compressed_blocks)
        pooling = [layer for layer in config.kv_source_layer_ids if config.compress_ratios[layer] > 1]
        self.rings = {layer: Ring(config.head_dim, caches.device) for layer in pooling}
        self.history = torch.zeros(0, dtype=torch.int64, device=caches.device)

    def begin(self, ids: torch.Tensor) -> None:
        """Makes room for the compressed token ids int64 [T] behind the sequence. Raises SequenceStateError when the
        sequence would outgrow the model."""
        end, most = self.length + len(ids), self.caches.config.max_position_embeddings
        if end > most:
            raise SequenceStateError(
                what="the length after a step", allowed=f"at most max_position_embeddings = {most}", found=end,
                remedy="Start a shorter sequence.",
            )  # fmt: skip
        self.window_table.cover(end)
        self.compressed_table.cover(end)
        self.history = torch.cat((self.history, ids))

    def finish(self, trimmed: Iterable[int] = (), kept: int = 0) -> None:
        """The tokens of ``begin`` are computed; layers ``trimmed`` have window rows of the last ``kept`` only."""
        self.length = len(self.history)
        self.ring_from = max(self.ring_from, self.length - RING_ROWS)
        for layer in trimmed:
            self.valid_from[layer] = self.length - kept

    def truncate(self, n: int) -> None:
        """Forgets every position >= ``n``, as vLLM does with rejected drafts.

        Raises SequenceStateError when the rest could not go on: below a shared prefix, or where rows that the next
        token needs were never made (a trimmed prefill step, a half pair that has left the ring).
        """
        window, most = self.caches.config.sliding_window, max(self.cached, self.lent)
        missing = max(start for start in self.valid_from)
        lowest = max(most, missing + window - 1 if missing > self.replay_start else 0)
        if self.rings and n % 2 and n <= self.ring_from:
            lowest = max(lowest, n + 1)
        if not lowest <= n <= self.length and n != self.length:
            span = f"between {lowest} and " if lowest < self.length else ""
            raise SequenceStateError(
                what="n of truncate", allowed=f"{span}the length {self.length}", found=n,
                remedy="Compute the sequence again from its tokens.",
            )  # fmt: skip
        self.window_table.cut(n)
        self.compressed_table.cut(n)
        self.history, self.length, self.ring_from = self.history[:n], n, min(self.ring_from, n)

    def hit(self, n: int) -> State:
        """A new sequence whose first ``n`` tokens are this one's, found in the prefix cache; its ``length`` tells
        from which token on it must be computed. ``n`` is a multiple of 128 and less than the new prompt is long.

        Under bounded replay that is n - 128, and a hit of 128 tokens or fewer is dropped; otherwise it is n. Raises
        SequenceStateError for an ``n`` that is no multiple of 128 or not computed.
        """
        if n % COMPRESSED_BLOCK or not 0 <= n <= self.length:
            allowed = f"a multiple of {COMPRESSED_BLOCK} up to the length {self.length}"
            raise SequenceStateError(
                what="n of hit", allowed=allowed, found=n, remedy=f"Round down to a multiple of {COMPRESSED_BLOCK}."
            )
        new, window = State(self.caches), self.caches.config.sliding_window
        if self.caches.bounded_replay and n <= window:
            return new
        new.cached, self.lent = n, max(self.lent, n)
        new.length = new.ring_from = n
        new.compressed_table = Table(self.caches.compressed_blocks, self.compressed_table.ids[: n // COMPRESSED_BLOCK])
        if self.caches.bounded_replay:
            new.length = new.ring_from = new.replay_start = n - window
            new.valid_from = [n - window] * len(self.valid_from)
        else:
            new.window_table = Table(self.caches.window_blocks, self.window_table.ids[: n // WINDOW_BLOCK])
            new.valid_from = list(self.valid_from)
        new.history = self.history[: new.length]
        return new

    def write_window(self, layer: int, positions: torch.Tensor, rows: torch.Tensor) -> None:
        """rows bfloat16 [T, 512] of layer ``layer`` at ``positions`` int64 [T]."""
        self.caches.window[layer].write(self.window_table.slots(positions), rows)

    def read_window(self, layer: int, positions: torch.Tensor) -> torch.Tensor:
        """positions int64 of any shape -> bfloat16 [..., 512]."""
        return self.caches.window[layer].read(self.window_table.slots(positions))

    def write_compressed(self, source: int, numbers: torch.Tensor, rows: torch.Tensor, keys: Vectors) -> None:
        """Rows ``numbers`` int64 [n] of the KV source ``source`` and their index keys; cached ones are left alone."""
        ratio = self.caches.config.compress_ratios[source]
        new = numbers >= self.cached // ratio
        slots = self.compressed_table.slots(numbers[new], ratio)
        self.caches.rows[source].write(slots, rows[new])
        self.caches.keys[source].write(slots, keys.values[new])
        self.caches.key_scales[source].write(slots, keys.scale[new, None])

    def read_compressed(self, source: int, numbers: torch.Tensor) -> torch.Tensor:
        """numbers int64 of any shape -> compressed rows bfloat16 [..., 512] of the KV source ``source``."""
        ratio = self.caches.config.compress_ratios[source]
        return self.caches.rows[source].read(self.compressed_table.slots(numbers, ratio))

    def index_keys(self, source: int, count: int) -> Vectors:
        """The first ``count`` index keys of the KV source ``source``."""
        numbers = torch.arange(count, device=self.caches.device)
        slots = self.compressed_table.slots(numbers, self.caches.config.compress_ratios[source])
        return Vectors(self.caches.keys[source].read(slots), self.caches.key_scales[source].read(slots)[:, 0])
