"""The configuration of DeepSeek-V4.1's text model and its released file form. Standard library only.

Field names are those of ``text_config`` in the released config.json; the token ids at the end of the class live one
level higher in that file.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from deepinfer_sm80.errors import ModelConfigError
from deepinfer_sm80.model.config_checks import check
from deepinfer_sm80.model.engram_hash import table_rows

if TYPE_CHECKING:
    from collections.abc import Mapping

_TOP_LEVEL = ("bos_token_id", "eos_token_id", "pad_token_id", "image_token_id")
_QUANTIZATION = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "weight_block_size": [32, 32],
    "scale_fmt": "ue8m0",
    "expert_dtype": "fp4",
}
_VISION = {
    "model_type": "deepseek_v41_vision",
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "intermediate_size": 2816,
    "patch_size": 14,
    "rope_theta": 10000.0,
    "downsample_ratio": 3,
    "max_image_tokens": 1024,
    "min_pixels": 295936,
}


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """YaRN parameters of the layers with a compressed cache; layers without one use plain RoPE."""

    type: str = "yarn"
    factor: float = 16
    original_max_position_embeddings: int = 65536
    beta_fast: float = 32
    beta_slow: float = 1


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Text and draft model. The defaults are the released DeepSeek-V4.1-Flash; construction checks every relation
    between the fields and raises ModelConfigError naming the field, what is allowed and what was found."""

    vocab_size: int = 129280
    hidden_size: int = 5120
    moe_intermediate_size: int = 2304
    num_hidden_layers: int = 40
    num_attention_heads: int = 64
    num_key_value_heads: int = 1
    head_dim: int = 512
    qk_rope_head_dim: int = 64
    q_lora_rank: int = 1280
    o_lora_rank: int = 1024
    o_groups: int = 8
    hidden_act: str = "silu"
    swiglu_limit: float = 10.0
    rms_norm_eps: float = 1e-20
    attention_bias: bool = False
    tie_word_embeddings: bool = False
    max_position_embeddings: int = 1048576
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling = RopeScaling()
    compress_rope_theta: float = 160000.0
    n_routed_experts: int = 384
    n_shared_experts: int = 1
    num_experts_per_tok: int = 6
    scoring_func: str = "sqrtsoftplus"
    topk_method: str = "noaux_tc"
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.5
    sliding_window: int = 128
    compress_ratios: tuple[int, ...] = (0,) * 2 + (2,) * 18 + (1,) * 20 + (0,) * 3
    kv_source_layer_ids: tuple[int, ...] = (2, 8, 14, 20)
    index_source_layer_ids: tuple[int, ...] = (2, 8, 14, 20, 24, 28, 32, 36)
    index_n_heads: int = 32
    index_head_dim: int = 128
    index_topk: int = 512
    candidate_source_layer_id: int = 20
    candidate_topk_blocks: int = 2048
    candidate_block_size: int = 8
    hc_mult: int = 4
    hc_sinkhorn_iters: int = 20
    hc_eps: float = 1e-6
    engram_layer_ids: tuple[int, ...] = (1, 14)
    engram_num_embeddings: tuple[int, ...] = (384006168, 384016682)
    engram_max_ngram_size: int = 4
    engram_vocab_size: int = 16000000
    engram_n_heads: int = 8
    engram_head_dim: int = 256
    engram_pad_token_id: int = 2
    engram_compressed_vocab_size: int = 99092
    num_nextn_predict_layers: int = 3
    dspark_block_size: int = 5
    dspark_noise_token_id: int = 128799
    dspark_target_layer_ids: tuple[int, ...] = (37, 38, 39)
    dspark_markov_rank: int = 256
    dspark_n_routed_experts: int = 128
    dspark_num_experts_per_tok: int = 3
    bos_token_id: int = 0
    eos_token_id: int = 1
    pad_token_id: int = 2
    image_token_id: int = 129264
    vision_num_hidden_layers: int = 32

    def __post_init__(self) -> None:
        check(self)

    @property
    def hc_rows(self) -> int:
        """Rows of an ``hc_*_fn`` matrix: pre and post of every stream and the stream-to-stream mixture."""
        return self.hc_mult * (self.hc_mult + 2)

    @property
    def engram_columns(self) -> int:
        """Table rows read per token and Engram layer: one per n-gram size and head."""
        return (self.engram_max_ngram_size - 1) * self.engram_n_heads

    @classmethod
    def from_dict(cls, config_json: Mapping[str, Any]) -> ModelConfig:
        """From a parsed config.json of the released form. Keys that do not concern the text model are ignored; a
        missing or contradictory one raises ModelConfigError."""
        text = config_json.get("text_config")
        if config_json.get("model_type") != "deepseek_v41" or not isinstance(text, dict):
            found = f"{config_json.get('model_type')!r} {'with' if isinstance(text, dict) else 'without'} a text_config"
            raise _wrong("model_type", "'deepseek_v41' with a text_config", found, "Pass a DeepSeek-V4.1 config.json.")
        vision = config_json.get("vision_config") or {}
        if not isinstance(vision, dict):
            raise _wrong("vision_config", "a mapping", repr(vision), "Pass the config.json of the checkpoint.")
        values = {**text, **{key: config_json[key] for key in _TOP_LEVEL if key in config_json}}
        values["vision_num_hidden_layers"] = vision.get("num_hidden_layers", 0)
        names = [field.name for field in dataclasses.fields(cls)]
        missing = [name for name in names if name not in values]
        if missing:
            raise _wrong(
                "text_config", "complete", f"no {', '.join(missing)}", "Pass the config.json of the checkpoint."
            )
        values["rope_scaling"] = _rope_scaling(values["rope_scaling"])
        return cls(**{name: _frozen(values[name]) for name in names})

    def to_config_json(self) -> dict[str, Any]:
        """The complete config.json of the released form; ``from_dict`` reads it back to an equal object."""
        text: dict[str, Any] = {"model_type": "deepseek_v41_text"}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            text[field.name] = list(value) if isinstance(value, tuple) else value
        text["rope_scaling"] = dataclasses.asdict(self.rope_scaling)
        vision = {**_VISION, "num_hidden_layers": text.pop("vision_num_hidden_layers")}
        top = {key: text.pop(key) for key in _TOP_LEVEL}
        head = {"architectures": ["DeepseekV41ForCausalLM"], "model_type": "deepseek_v41", "dtype": "bfloat16"}
        return {**head, **top, "quantization_config": _QUANTIZATION, "text_config": text, "vision_config": vision}


def _wrong(field: str, allowed: str, found: object, remedy: str) -> ModelConfigError:
    return ModelConfigError(field=field, allowed=allowed, found=found, remedy=remedy)


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _rope_scaling(values: Any) -> RopeScaling:
    names = [field.name for field in dataclasses.fields(RopeScaling)]
    values = {"type": values.get("rope_type"), **values} if isinstance(values, dict) else {}
    if any(values.get(name) is None for name in names):
        raise _wrong("rope_scaling", f"a mapping with {', '.join(names)}", values, "Use the checkpoint's config.json.")
    return RopeScaling(**{name: values[name] for name in names})


def preset(name: str) -> ModelConfig:
    """``released``: DeepSeek-V4.1-Flash. ``tiny``: every kind of layer at full head and index widths, about 1 GB.
    ``layer``: the released widths, nine layers of 16 experts, 10.1 GB. Raises ModelConfigError."""
    try:
        changes = _PRESETS[name]
    except KeyError:
        raise _wrong("preset", f"one of {', '.join(_PRESETS)}", repr(name), "Choose one of these.") from None
    return dataclasses.replace(ModelConfig(), **changes)


def preset_names() -> tuple[str, ...]:
    """The names ``preset`` knows, the released model first."""
    return tuple(_PRESETS)


_PRESETS: dict[str, dict[str, Any]] = {
    "released": {},
    "tiny": {
        "hidden_size": 1024,
        "moe_intermediate_size": 256,
        "num_hidden_layers": 8,
        "q_lora_rank": 256,
        "o_lora_rank": 256,
        "max_position_embeddings": 16384,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "compress_ratios": (0, 0, 2, 2, 1, 1, 1, 1, 0, 0, 0),
        "kv_source_layer_ids": (2, 4),
        "index_source_layer_ids": (2, 4, 6),
        "candidate_source_layer_id": 4,
        "candidate_topk_blocks": 68,  # 65 always hold 512 rows, the newest block not full; 68 keep rows aligned
        "engram_layer_ids": (1, 2),
        "engram_vocab_size": 2000,
        "engram_num_embeddings": table_rows(2, 2000, 4, 8),
        "dspark_target_layer_ids": (5, 6, 7),
        "dspark_markov_rank": 128,
        "dspark_n_routed_experts": 8,
        "dspark_num_experts_per_tok": 2,
        "vision_num_hidden_layers": 0,
    },
    "layer": {
        "num_hidden_layers": 9,
        "max_position_embeddings": 65536,
        "n_routed_experts": 16,
        "compress_ratios": (0, 0, 2, 2, 2, 1, 1, 1, 1, 0, 0, 0),
        "kv_source_layer_ids": (2, 4, 5),
        "index_source_layer_ids": (2, 4, 5, 7),
        "candidate_source_layer_id": 5,
        "candidate_topk_blocks": 68,
        "engram_layer_ids": (1, 4),  # as released: one before the first compressed layer, one on a KV source
        "engram_vocab_size": 100000,
        "engram_num_embeddings": table_rows(2, 100000, 4, 8),
        "dspark_target_layer_ids": (6, 7, 8),
        "dspark_n_routed_experts": 16,
        "vision_num_hidden_layers": 0,
    },
}
