"""Relations between the fields of a ModelConfig; each check raises ModelConfigError with the sentence a user needs."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import TYPE_CHECKING

from deepinfer_sm80.errors import ModelConfigError
from deepinfer_sm80.model.engram_hash import table_rows

if TYPE_CHECKING:
    from deepinfer_sm80.model.config import ModelConfig

_MAX_HASHES = 1024  # of a token in an Engram layer; the primes of each are searched for
_CONFIG_FILE = "Use the config.json that belongs to the checkpoint, or one of the presets."

# What the operators are built for: another value would load and then compute something else.
_FIXED = {
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "num_key_value_heads": 1,
    "index_n_heads": 32,
    "index_head_dim": 128,
    "sliding_window": 128,
    "hc_mult": 4,
    "engram_head_dim": 256,
    "image_token_id": 129264,
    "hidden_act": "silu",
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "attention_bias": False,
    "tie_word_embeddings": False,
}
_POSITIVE = (
    *("vocab_size", "num_hidden_layers", "num_attention_heads", "o_groups", "n_shared_experts", "hc_sinkhorn_iters"),
    *("index_topk", "candidate_topk_blocks", "candidate_block_size"),
    *("max_position_embeddings", "dspark_markov_rank"),
)
_SCALED = ("hidden_size", "moe_intermediate_size", "q_lora_rank", "o_lora_rank")
_FINITE = ("swiglu_limit", "rms_norm_eps", "routed_scaling_factor", "hc_eps", "rope_theta", "compress_rope_theta")


def check(config: ModelConfig) -> None:
    """Raises ModelConfigError for the first field of ``config`` that cannot be."""
    _check_kinds(config)
    _check_widths(config)
    _check_layers(config)
    _check_experts(config)
    _check_tokens(config)
    _check_engram(config)
    _check_draft(config)


def _require(condition: bool, field: str, allowed: str, found: object, remedy: str = _CONFIG_FILE) -> None:
    if not condition:
        raise ModelConfigError(field=field, allowed=allowed, found=found, remedy=remedy)


def _check_kinds(config: ModelConfig) -> None:
    """Numbers are numbers and lists are lists of them: the other checks compare and count."""
    for field in dataclasses.fields(config):
        found = getattr(config, field.name)
        if isinstance(field.default, tuple):
            whole = isinstance(found, tuple) and all(map(_whole, found))
            _require(whole, field.name, "a list of integers below 2**31", repr(found))
        elif type(field.default) is int:
            _require(_whole(found), field.name, "an integer below 2**31", repr(found))
        elif type(field.default) is float:
            number = isinstance(found, (int, float)) and not isinstance(found, bool)
            _require(number, field.name, "a number", repr(found))


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**31


def _positive(value: object) -> bool:
    return isinstance(value, (int, float)) and 0 < value < math.inf


def _check_widths(config: ModelConfig) -> None:
    for field, value in _FIXED.items():
        found = getattr(config, field)
        _require(found == value, field, f"{value!r}, the value the kernels are built for", repr(found))
    for field in _POSITIVE:
        found = getattr(config, field)
        _require(isinstance(found, int) and found > 0, field, "a positive integer", repr(found))
    for field in _SCALED:
        found = getattr(config, field)
        _require(found > 0 and found % 32 == 0, field, "a positive multiple of 32 (one scale covers 32 values)", found)
    for field in _FINITE:
        found = getattr(config, field)
        _require(_positive(found), field, "a positive number", found)
    for field in ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow"):
        found = getattr(config.rope_scaling, field)
        _require(_positive(found), f"rope_scaling.{field}", "a positive number", found)
    heads, groups = config.num_attention_heads, config.o_groups
    _require(heads % groups == 0, "num_attention_heads", f"a multiple of o_groups = {groups}", heads)
    _require(config.rope_scaling.type == "yarn", "rope_scaling.type", "'yarn'", repr(config.rope_scaling.type))


def _check_layers(config: ModelConfig) -> None:
    layers, drafts, ratios = config.num_hidden_layers, config.num_nextn_predict_layers, config.compress_ratios
    length = f"{layers + drafts} long (num_hidden_layers + num_nextn_predict_layers)"
    _require(len(ratios) == layers + drafts, "compress_ratios", length, f"{len(ratios)} values")
    _require(set(ratios) <= {0, 1, 2}, "compress_ratios", "made of 0 (window only), 1 and 2", sorted(set(ratios)))
    _require(not any(ratios[layers:]), "compress_ratios", "0 for the draft layers", ratios[layers:])
    for field in ("kv_source_layer_ids", "index_source_layer_ids"):
        ids = getattr(config, field)
        ascending = all(a < b for a, b in itertools.pairwise(ids))
        compressed = all(0 <= i < layers and ratios[i] for i in ids)
        _require(ascending and compressed, field, "ascending ids of layers with a compress ratio", ids)
    sources, indexers = config.kv_source_layer_ids, config.index_source_layer_ids
    allowed = "among index_source_layer_ids (an indexer must follow a new cache)"
    _require(set(sources) <= set(indexers), "kv_source_layer_ids", allowed, sources)
    for layer in (i for i in range(layers) if ratios[i]):
        source = max((s for s in sources if s <= layer), default=None)
        _require(source is not None, "kv_source_layer_ids", f"such that layer {layer} has a source before it", sources)
        same = source is not None and ratios[source] == ratios[layer]
        found = f"ratio {ratios[layer]} on layer {layer} and source {source}"
        _require(same, "compress_ratios", "equal to that of the layer's KV source", found)
    candidate = config.candidate_source_layer_id
    allowed = "-1 (no candidates) or one of index_source_layer_ids"
    _require(candidate == -1 or candidate in indexers, "candidate_source_layer_id", allowed, candidate)


def _check_experts(config: ModelConfig) -> None:
    pairs = [("num_experts_per_tok", "n_routed_experts")]
    if config.num_nextn_predict_layers:
        pairs.append(("dspark_num_experts_per_tok", "dspark_n_routed_experts"))
    for chosen, total in pairs:
        found, limit = getattr(config, chosen), getattr(config, total)
        _require(0 < found <= limit, chosen, f"between 1 and {total} = {limit}", found)


def _check_tokens(config: ModelConfig) -> None:
    ids = ("bos_token_id", "eos_token_id", "pad_token_id", "image_token_id")
    for field in (*ids, "engram_pad_token_id", "dspark_noise_token_id"):
        found = getattr(config, field)
        _require(0 <= found < config.vocab_size, field, f"a token id below vocab_size = {config.vocab_size}", found)


def _check_engram(config: ModelConfig) -> None:
    ids, rows, layers = config.engram_layer_ids, config.engram_num_embeddings, config.num_hidden_layers
    _require(all(0 <= i < layers for i in ids), "engram_layer_ids", f"layers below {layers}", ids)
    if not ids and not rows:
        return
    size, order, heads = config.engram_vocab_size, config.engram_max_ngram_size, config.engram_n_heads
    sane = size > 1 and order > 1 and heads > 0 and order * heads <= _MAX_HASHES
    allowed = f"at least 2, with engram_max_ngram_size >= 2, engram_n_heads >= 1 and their product <= {_MAX_HASHES}"
    _require(sane, "engram_vocab_size", allowed, (size, order, heads))
    expected = table_rows(len(ids), size, order, heads)
    allowed = f"{list(expected)}, the sums of the hash primes from engram_vocab_size = {size}"
    _require(rows == expected, "engram_num_embeddings", allowed, list(rows))
    found = config.engram_compressed_vocab_size
    _require(0 < found <= config.vocab_size, "engram_compressed_vocab_size", "between 1 and vocab_size", found)


def _check_draft(config: ModelConfig) -> None:
    if not config.num_nextn_predict_layers:
        return
    ids, layers = config.dspark_target_layer_ids, config.num_hidden_layers
    valid = bool(ids) and all(0 <= i < layers for i in ids)
    _require(valid, "dspark_target_layer_ids", f"at least one layer below num_hidden_layers = {layers}", ids)
    _require(config.dspark_block_size > 0, "dspark_block_size", "a positive integer", config.dspark_block_size)
