"""One decoder layer of a checkpoint with a text in front of it: what the demo's operators are given.

One layer stands for all: the candidate source, which owns a compressor, an indexer and both caches. Its input is the
embedded text (what layers below would add is left out). Matrix products around the operators are plain PyTorch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from deepinfer_sm80.model import engram_hash
from deepinfer_sm80.model.checkpoint import Reader
from deepinfer_sm80.model.checkpoint_files import read_config, read_tokenizer
from deepinfer_sm80.ops.formats import fp8_block

if TYPE_CHECKING:
    from pathlib import Path

PROSE = (
    "The ferry left the northern quay a little after six, while the lamps along the harbour were still lit and the "
    "fish market was loud with crates. Nobody on deck spoke much. A woman with a basket of quinces asked the mate "
    "whether the channel was clear of ice; he shrugged and said that it had been clear on Tuesday, which in March "
    "meant very little. Behind them the town grew small: first the crane, then the brewery chimney, and last of all "
    "the white tower of the observatory, where someone had forgotten to close the dome. By eight o'clock the wind had "
    "turned. The engine changed its note, the cups began to slide along the shelf, and the two engineers who had been "
    "arguing about the price of copper since breakfast went below without finishing the argument. The mate wrote the "
    "time in his book, wiped the glass, and looked for the second buoy."
)
SWA_BLOCK, BLOCK = 32, 128  # tokens in a page of the sliding-window and of the compressed cache
RECORD, INDEX_RECORD, PAGE_ALIGNMENT = 584, 132, 576


class Layer:
    """The layer's weights as the operators take them, the activations of ``tokens`` tokens, and empty caches for them.

    ``embedded``, ``x``: bfloat16 [T, hidden]. ``streams``: [T, 4, hidden], ``post``, ``comb``: the mix back into them.
    ``q``: bfloat16 [T, heads, 512], rotated. ``swa_latent``, ``latent``, ``keys``: what the three caches are written
    from. ``index_q``, ``index_weights``: the indexer's queries. ``engram``: the table's arguments; ``engram_rows``:
    int64 [T, C]. ``route_scores``: float32 [T, experts].
    """

    def __init__(self, directory: Path, device: str, tokens: int) -> None:
        self.device, self.tokens = device, tokens
        self._checkpoint = Reader(directory)
        self.config = read_config(directory)
        self._prefix = f"layers.{self.config.candidate_source_layer_id}."
        self._tokenizer = read_tokenizer(directory)
        self.ids: list[int] = self._tokenizer.encode(PROSE, add_special_tokens=False).ids[:tokens]
        self.positions = torch.arange(tokens, device=device)
        self.rope = _rope_table(tokens, self.config.compress_rope_theta, device)
        self.scale = self.config.head_dim**-0.5
        self._attention_inputs()
        self._stream_inputs()
        self.swa_cache = _pages(tokens, SWA_BLOCK, RECORD, device)
        self.cache = _pages(tokens, BLOCK, RECORD, device)
        self.index_cache = _pages(tokens, BLOCK, INDEX_RECORD, device)

    def tensor(self, name: str) -> torch.Tensor:
        return self._checkpoint.load(self._prefix + name).to(self.device)

    def int32(self, *values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def block_table(self, block: int) -> torch.Tensor:
        """Pages lie in order, so that a slot is a position: int32 [1, pages]."""
        return torch.arange(-(-self.tokens // block), dtype=torch.int32, device=self.device)[None]

    def index_keys(self, rows: int) -> dict[str, torch.Tensor]:
        """The first ``rows`` index keys, gathered out of their pages: codes, then scales, block by block."""
        width = self.config.index_head_dim
        pages = self.index_cache.flatten(1)
        codes = pages[:, : BLOCK * width].reshape(-1, width)[:rows]
        scales = pages[:, BLOCK * width :].contiguous().view(torch.float32).flatten()[:rows]
        return {"k_codes": codes.contiguous(), "k_scale": scales.contiguous()}

    def _attention_inputs(self) -> None:
        config = self.config
        self.embedded = self._checkpoint.load("embed.weight")[self.ids].to(self.device)
        self.x = self._norm(self.embedded, "attn_norm.weight")
        q_latent = self._norm(self._linear(self.x, "attn.wq_a"), "attn.q_norm.weight")
        self.q = _rotate(self._linear(q_latent, "attn.wq_b").unflatten(1, (-1, config.head_dim)), self.rope)
        self.swa_latent = self._norm(self._linear(self.x, "attn.wkv"), "attn.kv_norm.weight")
        self.latent = self._norm(self.x @ self.tensor("attn.compressor.wkv.weight").T, "attn.compressor.norm.weight")
        self.keys = self.latent @ self.tensor("attn.indexer.wk.weight").T
        self.key_norm = self.tensor("attn.indexer.k_norm.weight")
        self.index_q = self._linear(q_latent, "attn.indexer.wq_b").unflatten(1, (-1, config.index_head_dim))
        self.index_weights = self.x @ self.tensor("attn.indexer.weights_proj.weight").T
        self.attn_sink = self.tensor("attn.attn_sink")
        self.wo_a = self._weight("attn.wo_a").unflatten(0, (config.o_groups, -1))
        scores = torch.nn.functional.softplus(self.x.float() @ self.tensor("ffn.gate.weight").float().T).sqrt()
        self.route_scores = scores + self.tensor("ffn.gate.bias")

    def _stream_inputs(self) -> None:
        config, n = self.config, self.config.hc_mult
        self.streams = self.embedded[:, None].expand(-1, n, -1).contiguous()
        flat = self.streams.flatten(1).float()
        mixed = flat @ self.tensor("hc_attn_fn").T * torch.rsqrt(flat.square().mean(-1, keepdim=True) + 1e-20)
        scale, base = self.tensor("hc_attn_scale"), self.tensor("hc_attn_base")
        self.post = 2 * torch.sigmoid(mixed[:, n : 2 * n] * scale[1] + base[n : 2 * n])
        self.comb = torch.softmax((mixed[:, 2 * n :] * scale[2] + base[2 * n :]).unflatten(1, (n, n)), -1)
        self.pre = torch.sigmoid(mixed[:, :n] * scale[0] + base[:n]) + config.hc_eps
        self.next_mix = {
            **{name: self.tensor(f"hc_ffn_{name}") for name in ("fn", "scale", "base")},
            "norm_weight": self.tensor("ffn_norm.weight"),
            "rms_eps": config.rms_norm_eps,
            "hc_eps": config.hc_eps,
            "norm_eps": config.rms_norm_eps,
            "sinkhorn_iters": config.hc_sinkhorn_iters,
        }
        first = config.engram_layer_ids[0]
        self.engram_rows = torch.tensor(self._engram_rows(), device=self.device)
        self.engram = {
            name: self._checkpoint.load(f"layers.{first}.engram.embed.{name}").to(self.device)
            for name in ("weight", "scale")
        }

    def _engram_rows(self) -> list[list[int]]:
        config = self.config
        mapping, _ = engram_hash.compress_vocabulary(self._tokenizer)
        compressed = [mapping[token] for token in self.ids]
        sizes = (config.engram_max_ngram_size, config.engram_n_heads)
        primes = engram_hash.bucket_primes(len(config.engram_layer_ids), config.engram_vocab_size, *sizes)[0]
        drawn = engram_hash.hash_multipliers(config.engram_layer_ids[0], sizes[0], config.engram_compressed_vocab_size)
        pad = mapping[config.engram_pad_token_id]
        histories = (compressed[max(p - sizes[0] + 1, 0) : p + 1][::-1] for p in range(self.tokens))
        return [engram_hash.ngram_rows(history, drawn, primes, pad) for history in histories]

    def _weight(self, name: str) -> torch.Tensor:
        wide: torch.Tensor = fp8_block.decode(self.tensor(f"{name}.weight"), self.tensor(f"{name}.scale"))
        return wide.bfloat16()

    def _linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x @ self._weight(name).T

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        wide = x.float()
        scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.config.rms_norm_eps)
        return (scaled * self.tensor(name).float()).bfloat16()


def _pages(tokens: int, block: int, record: int, device: str) -> torch.Tensor:
    """Zeroed cache uint8 [pages, block, record] whose pages lie apart by a multiple of 576 bytes, as vLLM lays them."""
    stride = -(-(block * record + 1) // PAGE_ALIGNMENT) * PAGE_ALIGNMENT
    pages = -(-tokens // block)
    return torch.zeros(pages * stride, dtype=torch.uint8, device=device).as_strided(
        (pages, block, record), (stride, record, 1)
    )


def _rope_table(rows: int, theta: float, device: str) -> torch.Tensor:
    """cos and sin, float32 [rows, 64]. YaRN's interpolation is left out: it changes the angles, not the path."""
    angles = torch.arange(rows).double()[:, None] * theta ** -(torch.arange(0, 64, 2).double() / 64)
    return torch.cat((angles.cos(), angles.sin()), 1).float().to(device)


def _rotate(q: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
    """RoPE on the last 64 dims of bf16 [T, heads, 512], neighbouring dims paired."""
    cos, sin = rope[:, None].chunk(2, -1)
    even, odd = q[..., -64::2].float(), q[..., -63::2].float()
    turned = torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1).flatten(-2)
    return torch.cat((q[..., :-64], turned.bfloat16()), -1)
