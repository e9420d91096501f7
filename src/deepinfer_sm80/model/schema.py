"""The tensors of a released DeepSeek-V4.1 checkpoint: name, dtype and shape. Standard library only.

Names are stored without a ``model.`` prefix. A quantised tensor is a pair: ``.weight`` and ``.scale``. dtypes are the
names of the safetensors format. Traps: ``hc_*``, ``attn_sink``, ``engram.q_weight`` and ``engram.k_weight`` carry no
``.weight``; ``wkv`` means three things (attention, compressor, Engram); only compressors of ratio 2 have ``wgate``;
the draft layers (``mtp.*``) share the embedding and the head of the target.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from deepinfer_sm80.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from deepinfer_sm80.model.config import ModelConfig

Tensors = dict[str, tuple[str, tuple[int, ...]]]

BLOCK = 32  # one scale covers 32 x 32 values of an FP8 weight, 32 values of a row of an FP4 one
IGNORED_PREFIXES = ("vision.", "aligner.", "image_")
_SHOWN = 4


def expected_tensors(config: ModelConfig, draft: bool = True) -> Tensors:
    """Every text tensor of ``config``, with ``draft`` also those of the draft layers: name -> (dtype, shape).

    A ``.weight`` is directly followed by its ``.scale``. ``gate.bias_vl`` exists exactly where there is a vision
    tower, as vLLM's loader expects.
    """
    hidden, vocab = config.hidden_size, config.vocab_size
    tensors: Tensors = {"embed.weight": ("BF16", (vocab, hidden))}
    for layer in range(config.num_hidden_layers):
        prefix = f"layers.{layer}."
        tensors |= _prefixed(prefix, _block(config, config.n_routed_experts))
        if layer in config.kv_source_layer_ids:
            tensors |= _prefixed(f"{prefix}attn.", _compressor(config, config.compress_ratios[layer]))
        if layer in config.index_source_layer_ids:
            tensors |= _prefixed(f"{prefix}attn.indexer.", _indexer(config))
        if layer in config.engram_layer_ids:
            rows = config.engram_num_embeddings[config.engram_layer_ids.index(layer)]
            tensors |= _prefixed(f"{prefix}engram.", _engram(config, rows))
    tensors |= {"norm.weight": ("BF16", (hidden,)), "head.weight": ("BF16", (vocab, hidden))}
    if draft:
        tensors |= _draft(config)
    return tensors


def check_tensors(config: ModelConfig, found: Mapping[str, tuple[str, tuple[int, ...]]], path: str = "") -> None:
    """Raises CheckpointError unless ``found`` (name -> (dtype, shape), see ``read_headers``) holds every tensor of
    ``config`` with its dtype and shape and nothing else. Vision tensors are ignored."""
    expected = expected_tensors(config)
    names = [name for name in found if not name.startswith(IGNORED_PREFIXES)]
    missing = [name for name in expected if name not in found]
    unknown = [name for name in names if name not in expected]
    shared = [name for name in expected if name in found]
    dtypes = [name for name in shared if found[name][0] != expected[name][0]]
    shapes = [name for name in shared if tuple(found[name][1]) != expected[name][1]]
    problems = [
        _listing("missing", missing),
        _listing("unknown", unknown),
        _listing("of the wrong dtype", [f"{n} is {found[n][0]}, must be {expected[n][0]}" for n in dtypes]),
        _listing("of the wrong shape", [f"{n} is {tuple(found[n][1])}, must be {expected[n][1]}" for n in shapes]),
    ]
    if any(problems):
        raise CheckpointError(
            path=path or "tensors",
            problem=f"of {len(expected)} expected tensors " + "; ".join(filter(None, problems)),
            remedy="Check that config.json belongs to these shards and that every shard was downloaded completely",
        )


def _listing(kind: str, items: list[str]) -> str:
    more = f", and {len(items) - _SHOWN} more" if len(items) > _SHOWN else ""
    return f"{len(items)} {kind} ({', '.join(items[:_SHOWN])}{more})" if items else ""


def _prefixed(prefix: str, tensors: Tensors) -> Tensors:
    return {prefix + name: entry for name, entry in tensors.items()}


def _blocks(size: int) -> int:
    return -(-size // BLOCK)


def _fp8(name: str, rows: int, columns: int) -> Tensors:
    scale = ("F8_E8M0", (_blocks(rows), _blocks(columns)))
    return {f"{name}.weight": ("F8_E4M3", (rows, columns)), f"{name}.scale": scale}


def _fp4(name: str, rows: int, columns: int) -> Tensors:
    """Two codes a byte, the even column in the low nibble."""
    scale = ("F8_E8M0", (rows, columns // BLOCK))
    return {f"{name}.weight": ("I8", (rows, columns // 2)), f"{name}.scale": scale}


def _bf16(name: str, *shape: int) -> Tensors:
    return {f"{name}.weight": ("BF16", shape)}


def _block(config: ModelConfig, experts: int) -> Tensors:
    """What every layer has, of the text model and of the draft."""
    hidden, inner = config.hidden_size, config.moe_intermediate_size
    tensors = _bf16("attn_norm", hidden) | _bf16("ffn_norm", hidden)
    for side in ("attn", "ffn"):
        tensors[f"hc_{side}_fn"] = ("F32", (config.hc_rows, config.hc_mult * hidden))
        tensors[f"hc_{side}_base"] = ("F32", (config.hc_rows,))
        tensors[f"hc_{side}_scale"] = ("F32", (3,))
    tensors |= _prefixed("attn.", _attention(config))
    tensors |= _bf16("ffn.gate", experts, hidden)
    tensors["ffn.gate.bias"] = ("F32", (experts,))
    if config.vision_num_hidden_layers:
        tensors["ffn.gate.bias_vl"] = ("F32", (experts,))
    for expert in range(experts):
        for name, rows, columns in (("w1", inner, hidden), ("w3", inner, hidden), ("w2", hidden, inner)):
            tensors |= _fp4(f"ffn.experts.{expert}.{name}", rows, columns)
    shared = config.n_shared_experts * inner
    for name, rows, columns in (("w1", shared, hidden), ("w3", shared, hidden), ("w2", hidden, shared)):
        tensors |= _fp8(f"ffn.shared_experts.{name}", rows, columns)
    return tensors


def _attention(config: ModelConfig) -> Tensors:
    hidden, width = config.hidden_size, config.num_attention_heads * config.head_dim
    low_rank = config.o_groups * config.o_lora_rank
    return {
        "attn_sink": ("F32", (config.num_attention_heads,)),
        **_bf16("q_norm", config.q_lora_rank),
        **_bf16("kv_norm", config.head_dim),
        **_fp8("wq_a", config.q_lora_rank, hidden),
        **_fp8("wq_b", width, config.q_lora_rank),
        **_fp8("wkv", config.head_dim, hidden),
        **_fp8("wo_a", low_rank, width // config.o_groups),
        **_fp8("wo_b", hidden, low_rank),
    }


def _compressor(config: ModelConfig, ratio: int) -> Tensors:
    """A layer that owns a compressed cache; the index keys are made from its rows."""
    gate = _bf16("compressor.wgate", config.head_dim, config.hidden_size) if ratio > 1 else {}
    return {
        **_bf16("compressor.wkv", config.head_dim, config.hidden_size),
        **gate,
        **_bf16("compressor.norm", config.head_dim),
        **_bf16("indexer.wk", config.index_head_dim, config.head_dim),
        **_bf16("indexer.k_norm", config.index_head_dim),
    }


def _indexer(config: ModelConfig) -> Tensors:
    queries = _fp8("wq_b", config.index_n_heads * config.index_head_dim, config.q_lora_rank)
    return queries | _bf16("weights_proj", config.index_n_heads, config.hidden_size)


def _engram(config: ModelConfig, rows: int) -> Tensors:
    """Rows [s*hidden, (s+1)*hidden) of ``wkv`` are the key of stream s; the last ``hidden`` rows the shared value."""
    width, hidden, streams = config.engram_head_dim, config.hidden_size, config.hc_mult
    return {
        "embed.weight": ("F8_E4M3", (rows, width)),
        "embed.scale": ("F8_E8M0", (rows, width // BLOCK)),
        **_fp8("wkv", (streams + 1) * hidden, config.engram_columns * width),
        "q_weight": ("BF16", (streams, hidden)),
        "k_weight": ("BF16", (streams, hidden)),
    }


def _draft(config: ModelConfig) -> Tensors:
    tensors: Tensors = {}
    count, hidden, rank = config.num_nextn_predict_layers, config.hidden_size, config.dspark_markov_rank
    for layer in range(count):
        tensors |= _prefixed(f"mtp.{layer}.", _block(config, config.dspark_n_routed_experts))
    if count:
        features = len(config.dspark_target_layer_ids) * hidden
        tensors |= _prefixed("mtp.0.", _fp8("main_proj", hidden, features) | _bf16("main_norm", hidden))
        last = f"mtp.{count - 1}."
        tensors |= _bf16(f"{last}norm", hidden)
        tensors |= _bf16(f"{last}markov_head.embed", config.vocab_size, rank)
        tensors |= _bf16(f"{last}markov_head.head", config.vocab_size, rank)
        tensors |= _bf16(f"{last}confidence_head.proj", 1, hidden + rank)
    return tensors
