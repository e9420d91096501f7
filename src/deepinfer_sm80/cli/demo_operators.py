"""The operators of one decoder layer, in forward-pass order, on real text and a checkpoint's weights.

One layer stands for all: the candidate source, which owns a compressor, an indexer and both caches. Its input is the
embedded text (what layers below would add is left out). Matrix products around the operators are plain PyTorch.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import torch

from deepinfer_sm80 import ops
from deepinfer_sm80.model.checkpoint import Reader
from deepinfer_sm80.model.config import ModelConfig
from deepinfer_sm80.model.requirements import require
from deepinfer_sm80.ops.formats import fp8_block
from deepinfer_sm80.testing.agreement import Agreement, compare_with_reference

if TYPE_CHECKING:
    from collections.abc import Iterator
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
TOPK = 64  # below the number of tokens, so that the choice matters
INTERPRETED = 16  # tokens for a Triton kernel: its interpreter takes 0.1 s for each
DECODED = 5  # the last tokens play the decode rows of one request
SWA_BLOCK, BLOCK = 32, 128  # tokens in a page of the sliding-window and of the compressed cache
RECORD, INDEX_RECORD, PAGE_ALIGNMENT = 584, 132, 576

Step = tuple[str, Agreement]


def walk(directory: Path, device: str) -> Iterator[Step]:
    """Yield (case, agreement) for each operator, in order; a later one reads what the launcher of an earlier wrote."""
    layer = _Layer(directory, device)
    yield from _residual_streams(layer)
    yield from _write_caches(layer)
    yield from _choose(layer)
    yield from _prefill(layer)
    yield from _decode(layer)
    yield from _project(layer)
    yield from _route(layer)


class _Layer:
    """The layer's weights as the operators take them, the text's activations, and the caches they fill."""

    def __init__(self, directory: Path, device: str) -> None:
        self.checkpoint, self.device = Reader(directory), device
        self.config = ModelConfig.from_dict(json.loads((directory / "config.json").read_text(encoding="utf-8")))
        self.prefix = f"layers.{self.config.candidate_source_layer_id}."
        self.tokenizer = require("tokenizers").Tokenizer.from_file(str(directory / "tokenizer.json"))
        self.ids: list[int] = self.tokenizer.encode(PROSE, add_special_tokens=False).ids
        self.tokens = len(self.ids)
        self.positions = torch.arange(self.tokens, device=device)
        self.rope = _rope_table(self.tokens, self.config.compress_rope_theta, device)
        self.scale = self.config.head_dim**-0.5

        self.embedded = self.checkpoint.load("embed.weight")[self.ids].to(device)
        self.x = self.norm(self.embedded, "attn_norm.weight")
        self.q_latent = self.norm(self.linear(self.x, "attn.wq_a"), "attn.q_norm.weight")
        q = self.linear(self.q_latent, "attn.wq_b").unflatten(1, (-1, self.config.head_dim))
        self.q = _rotate(q, self.rope)
        self.swa_latent = self.norm(self.linear(self.x, "attn.wkv"), "attn.kv_norm.weight")
        compressed = self.x @ self.tensor("attn.compressor.wkv.weight").T
        self.latent = self.norm(compressed, "attn.compressor.norm.weight")

        self.swa_cache = _pages(self.tokens, SWA_BLOCK, RECORD, device)
        self.cache = _pages(self.tokens, BLOCK, RECORD, device)
        self.index_cache = _pages(self.tokens, BLOCK, INDEX_RECORD, device)
        self.chosen = torch.empty(0)
        self.attended = torch.empty(0)

    def tensor(self, name: str) -> torch.Tensor:
        return self.checkpoint.load(self.prefix + name).to(self.device)

    def weight(self, name: str) -> torch.Tensor:
        wide: torch.Tensor = fp8_block.decode(self.tensor(f"{name}.weight"), self.tensor(f"{name}.scale"))
        return wide.bfloat16()

    def linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x @ self.weight(name).T

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        wide = x.float()
        scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.config.rms_norm_eps)
        return (scaled * self.tensor(name).float()).bfloat16()

    def int32(self, *values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def block_table(self, block: int) -> torch.Tensor:
        return torch.arange(-(-self.tokens // block), dtype=torch.int32, device=self.device)[None]


def _residual_streams(layer: _Layer) -> Iterator[Step]:
    config, device = layer.config, layer.device
    first = config.engram_layer_ids[0]
    rows = torch.tensor(_engram_rows(layer), device=device)
    table = {
        "weight": layer.checkpoint.load(f"layers.{first}.engram.embed.weight").to(device),
        "scale": layer.checkpoint.load(f"layers.{first}.engram.embed.scale").to(device),
    }
    heads = rows.shape[1]
    bounds = {"head_start": 0, "local_heads": heads, "vocab_start": 0, "vocab_end": table["weight"].shape[0]}
    yield f"T{layer.tokens}-C{heads}", compare_with_reference("engram_lookup", {**table, "ids": rows, **bounds})

    streams = layer.embedded[:, None].expand(-1, config.hc_mult, -1).contiguous()
    flat = streams.flatten(1).float()
    mixed = flat @ layer.tensor("hc_attn_fn").T * torch.rsqrt(flat.square().mean(-1, keepdim=True) + 1e-20)
    scale, base = layer.tensor("hc_attn_scale"), layer.tensor("hc_attn_base")
    n = config.hc_mult
    post = 2 * torch.sigmoid(mixed[:, n : 2 * n] * scale[1] + base[n : 2 * n])
    comb = torch.softmax((mixed[:, 2 * n :] * scale[2] + base[2 * n :]).unflatten(1, (n, n)), -1)
    arguments = {"x": layer.x, "residual": streams, "post_mix": post, "comb": comb}
    arguments = {name: value[:INTERPRETED] for name, value in arguments.items()}
    yield f"T{INTERPRETED}-H{config.hidden_size}", compare_with_reference("mhc_post", arguments, ops.kernel("mhc_post"))


def _write_caches(layer: _Layer) -> Iterator[Step]:
    slots = torch.arange(layer.tokens, device=layer.device)
    shared = {"positions": layer.positions, "cos_sin_cache": layer.rope, "slot_mapping": slots, "compress_ratio": 1}
    for kind, latent in (("swa", layer.swa_latent), ("compressed", layer.latent)):
        cache = layer.swa_cache if kind == "swa" else layer.cache
        found = compare_with_reference("rope_quant_insert", {"latent": latent, "kv_cache": cache, **shared})
        cache.copy_(found.arguments["kv_cache"])
        yield f"T{layer.tokens}-{kind}", found
    keys = layer.latent @ layer.tensor("attn.indexer.wk.weight").T
    norm = {"norm_weight": layer.tensor("attn.indexer.k_norm.weight"), "eps": layer.config.rms_norm_eps}
    arguments = {"k_pre": keys, "kv_cache": layer.index_cache, **norm, **shared}
    found = compare_with_reference("indexer_k_norm_rope_store", arguments)
    layer.index_cache.copy_(found.arguments["kv_cache"])
    yield f"T{layer.tokens}", found


def _choose(layer: _Layer) -> Iterator[Step]:
    """Index queries, scores, candidate blocks and the choice of rows."""
    config, tokens = layer.config, layer.tokens
    q = layer.linear(layer.q_latent, "attn.indexer.wq_b").unflatten(1, (-1, config.index_head_dim))
    weights = layer.x @ layer.tensor("attn.indexer.weights_proj.weight").T
    scales = {"softmax_scale": config.index_head_dim**-0.5, "head_scale": config.index_n_heads**-0.5}
    rotary = {"positions": layer.positions, "cos_sin_cache": layer.rope}
    found = compare_with_reference("indexer_q_rope_quant", {"q": q, "weights": weights, **rotary, **scales})
    codes, folded = found.values
    yield f"T{tokens}-H{config.index_n_heads}", found

    lens = (layer.positions + 1).int()
    queries = {"q_codes": codes, "weights": folded}
    table = layer.block_table(BLOCK).expand(tokens, -1)
    paged = {"kv_cache": layer.index_cache, "context_lens": lens, "block_table": table, "max_context_len": tokens}
    found = compare_with_reference("indexer_logits_paged", {**queries, **paged})
    yield f"T{tokens}-ctx{tokens}", found
    logits = found.values[0]
    keys = _index_keys(layer)
    rows = {"row_start": torch.zeros_like(lens), "row_end": lens, "max_k": tokens}
    yield f"T{tokens}-ctx{tokens}", compare_with_reference("indexer_logits_prefill", {**queries, **keys, **rows})

    size = config.candidate_block_size
    blocks = {"logits": logits, "row_lens": lens, "topk_blocks": 16, "block_size": size}
    found = compare_with_reference("select_candidate_blocks", blocks)
    yield f"T{tokens}-B16x{size}", found
    candidates = {"candidate_blocks": found.values[0], "candidate_block_size": size}
    picked = {"logits": logits, "row_lens": lens, "topk": TOPK}
    yield f"T{tokens}-K{TOPK}-candidates", compare_with_reference("indexer_topk", {**picked, **candidates})
    found = compare_with_reference("indexer_topk", picked)
    layer.chosen = found.values[0]
    yield f"T{tokens}-K{TOPK}", found


def _prefill(layer: _Layer) -> Iterator[Step]:
    """Both caches into one workspace, the index list over it, and attention."""
    tokens, window = layer.tokens, layer.config.sliding_window
    workspace = torch.zeros(1, 2 * tokens, layer.config.head_dim, dtype=torch.bfloat16, device=layer.device)
    lens = layer.int32(tokens)
    for kind, cache, block, offset in (
        ("compressed", layer.cache, BLOCK, 0),
        ("swa", layer.swa_cache, SWA_BLOCK, tokens),
    ):
        arguments = {"out": workspace, "k_cache": cache, "seq_lens": lens, "gather_lens": None}
        place = {"block_table": layer.block_table(block), "block_size": block, "offset": offset}
        found = compare_with_reference("dequantize_and_gather_k_cache", {**arguments, **place})
        workspace.copy_(found.arguments["out"])
        yield f"T{tokens}-{kind}", found
    request = {"query_start_loc": layer.int32(0, tokens), "seq_lens": lens, "gather_lens": lens}
    shape = {"window_size": window, "compress_ratio": 1, "topk": TOPK, "M": 2 * tokens, "N": tokens}
    found = compare_with_reference("combine_topk_swa_indices", {"topk_indices": layer.chosen, **request, **shape})
    indices, index_lens = found.values
    yield f"T{tokens}-K{TOPK}-W{window}", found
    rows = {"kv": workspace.flatten(0, 1), "indices": indices, "lens": index_lens}
    head = {"q": layer.q, "attn_sink": layer.tensor("attn.attn_sink"), "softmax_scale": layer.scale}
    found = compare_with_reference("sparse_mla_prefill", {**rows, **head})
    layer.attended = found.values[0]
    yield f"T{tokens}-H{layer.q.shape[1]}-K{indices.shape[1]}", found


def _decode(layer: _Layer) -> Iterator[Step]:
    """The last tokens again, straight from the paged caches."""
    window = layer.config.sliding_window
    last = layer.positions[-DECODED:]
    request = {
        "token_to_req_indices": torch.zeros_like(last, dtype=torch.int32),
        "block_table": layer.block_table(BLOCK),
    }
    chosen = {"topk_indices": layer.chosen[-DECODED:].contiguous(), "block_size": BLOCK}
    valid = torch.ones_like(last, dtype=torch.bool)
    found = compare_with_reference("global_topk_indices", {**chosen, **request, "is_valid_token": valid})
    extra, extra_lens = found.values
    yield f"T{DECODED}-K{TOPK}", found
    # pages lie in order here, so a slot is a position
    seen = last[:, None] - torch.arange(window - 1, -1, -1, device=layer.device)
    swa = {"swa_k_cache": layer.swa_cache, "swa_indices": seen.clamp_min(-1).int()}
    swa["swa_lens"] = torch.full_like(last, window, dtype=torch.int32)
    compressed = {"extra_k_cache": layer.cache, "extra_indices": extra, "extra_lens": extra_lens}
    head = {"attn_sink": layer.tensor("attn.attn_sink"), "softmax_scale": layer.scale}
    arguments = {"q": layer.q[-DECODED:].contiguous(), **swa, **head, **compressed}
    yield f"T{DECODED}-H{layer.q.shape[1]}-K{TOPK + window}", compare_with_reference("sparse_mla_decode", arguments)


def _project(layer: _Layer) -> Iterator[Step]:
    groups = layer.config.o_groups
    arguments = {"o": layer.attended, "positions": layer.positions, "cos_sin_cache": layer.rope, "num_groups": groups}
    found = compare_with_reference("inverse_rope_grouped", arguments)
    yield f"T{layer.tokens}-G{groups}", found
    weight = layer.weight("attn.wo_a").unflatten(0, (groups, -1))
    arguments = {"x": found.values[0], "weight": weight}
    yield (
        f"T{layer.tokens}-G{groups}-R{weight.shape[1]}",
        compare_with_reference("grouped_output_projection", arguments),
    )


def _route(layer: _Layer) -> Iterator[Step]:
    """Routes of the text grouped by expert, each expert's from last to first: the operator puts them into order."""
    block, topk = 16, layer.config.num_experts_per_tok
    scores = torch.nn.functional.softplus(layer.x.float() @ layer.tensor("ffn.gate.weight").float().T).sqrt()
    chosen = (scores + layer.tensor("ffn.gate.bias")).topk(topk).indices.flatten().tolist()
    ids: list[int] = []
    experts: list[int] = []
    for expert in range(layer.config.n_routed_experts):
        routes = [i for i in reversed(range(len(chosen))) if chosen[i] == expert]
        routes += [len(chosen)] * (-len(routes) % block)
        ids, experts = ids + routes, experts + [expert] * (len(routes) // block)
    arguments = {
        "sorted_token_ids": layer.int32(*ids),
        "expert_ids": layer.int32(*experts),
        "num_tokens_post_padded": layer.int32(len(ids)),
        "block_size": block,
        "num_routes": len(chosen),
    }
    name = f"T{layer.tokens}-K{topk}-E{layer.config.n_routed_experts}-block{block}"
    yield name, compare_with_reference("stable_expert_order", arguments)


def _engram_rows(layer: _Layer) -> list[list[int]]:
    from deepinfer_sm80.model import engram_hash as engram

    config = layer.config
    mapping, _ = engram.compress_vocabulary(layer.tokenizer)
    compressed = [mapping[token] for token in layer.ids]
    sizes = (config.engram_max_ngram_size, config.engram_n_heads)
    primes = engram.bucket_primes(len(config.engram_layer_ids), config.engram_vocab_size, *sizes)[0]
    drawn = engram.hash_multipliers(config.engram_layer_ids[0], sizes[0], config.engram_compressed_vocab_size)
    pad = mapping[config.engram_pad_token_id]
    histories = (compressed[max(p - sizes[0] + 1, 0) : p + 1][::-1] for p in range(layer.tokens))
    return [engram.ngram_rows(history, drawn, primes, pad) for history in histories]


def _index_keys(layer: _Layer) -> dict[str, torch.Tensor]:
    """The index keys of all tokens, gathered out of their pages: codes, then scales, block by block."""
    width = layer.config.index_head_dim
    pages = layer.index_cache.flatten(1)
    codes = pages[:, : BLOCK * width].reshape(-1, width)[: layer.tokens]
    scales = pages[:, BLOCK * width :].contiguous().view(torch.float32).flatten()[: layer.tokens]
    return {"k_codes": codes.contiguous(), "k_scale": scales.contiguous()}


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
