"""ModelConfig: the released values, the file form, the presets, and a sentence for everything that cannot be."""

import dataclasses
import json

import pytest

from deepinfer_sm80.errors import ModelConfigError
from deepinfer_sm80.model.config import ModelConfig, RopeScaling, preset, preset_names


@pytest.mark.parametrize("name", preset_names())
def test_file_form_reads_back_to_an_equal_object(name):
    config = preset(name)
    assert ModelConfig.from_dict(json.loads(json.dumps(config.to_config_json()))) == config


def test_file_form_is_the_released_one():
    written = preset("released").to_config_json()
    assert written["architectures"] == ["DeepseekV41ForCausalLM"]
    assert (written["model_type"], written["image_token_id"]) == ("deepseek_v41", 129264)
    assert written["quantization_config"]["weight_block_size"] == [32, 32]
    assert written["quantization_config"]["expert_dtype"] == "fp4"
    text = written["text_config"]
    assert text["model_type"] == "deepseek_v41_text"
    assert text["rope_scaling"] == {
        "type": "yarn",
        "factor": 16,
        "original_max_position_embeddings": 65536,
        "beta_fast": 32,
        "beta_slow": 1,
    }
    assert "image_token_id" not in text
    assert "vision_num_hidden_layers" not in text
    assert written["vision_config"]["num_hidden_layers"] == 32
    assert preset("tiny").to_config_json()["vision_config"]["num_hidden_layers"] == 0


def test_keys_of_other_parts_are_ignored_and_rope_type_is_understood():
    written = preset("tiny").to_config_json()
    written["transformers_version"] = "5"
    written["text_config"]["initializer_range"] = 0.02
    scaling = written["text_config"]["rope_scaling"]
    scaling["rope_type"] = scaling.pop("type")
    assert ModelConfig.from_dict(written) == preset("tiny")


@pytest.mark.parametrize("name", ["tiny", "layer"])
def test_small_presets_have_every_kind_of_layer(name):
    config = preset(name)
    ratios = config.compress_ratios[: config.num_hidden_layers]
    assert set(ratios) == {0, 1, 2}
    sources, indexers = set(config.kv_source_layer_ids), set(config.index_source_layer_ids)
    assert {ratios[i] for i in sources} == {1, 2}
    assert any(ratios[i] and i not in indexers for i in range(len(ratios))), "a layer that reuses the selection"
    assert indexers - sources, "an indexer over another layer's cache"
    assert any(i > config.candidate_source_layer_id for i in indexers), "a consumer of the candidates"
    assert max(config.engram_layer_ids) < max(sources), "decoder replay needs Engram before the last source"
    assert config.num_nextn_predict_layers == 3


def test_layer_preset_has_the_released_widths():
    """Every field but these: how many layers, experts and table rows there are, which role a layer has, how long."""
    released, layer = preset("released"), preset("layer")
    counts = {"num_hidden_layers", "n_routed_experts", "dspark_n_routed_experts", "vision_num_hidden_layers"}
    tables = {"engram_vocab_size", "engram_num_embeddings", "max_position_embeddings", "candidate_topk_blocks"}
    fields = {field.name for field in dataclasses.fields(released)}
    roles = {name for name in fields if name.endswith(("_layer_ids", "_layer_id"))} | {"compress_ratios"}
    changed = {name for name in fields if getattr(layer, name) != getattr(released, name)}
    assert changed <= counts | tables | roles


@pytest.mark.parametrize("name", ["tiny", "layer"])
def test_a_prompt_of_3000_tokens_leaves_out_rows_and_candidates(name):
    """The longest prompt of the proofs: otherwise a choice that goes wrong would change nothing."""
    config, prompt = preset(name), 3000
    rows = config.candidate_topk_blocks * config.candidate_block_size
    assert config.index_topk <= rows < prompt / 2
    assert config.index_topk < prompt / max(config.compress_ratios) / 2


@pytest.mark.parametrize("name", ["tiny", "layer"])
def test_there_are_always_more_candidates_than_rows_to_choose(name):
    """As released: see docs/notes, rows beyond the candidates."""
    config = preset(name)
    assert (config.candidate_topk_blocks - 1) * config.candidate_block_size + 1 > config.index_topk


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("head_dim", 256),
        ("qk_rope_head_dim", 32),
        ("sliding_window", 256),
        ("hidden_act", "gelu"),
        ("tie_word_embeddings", True),
        ("hidden_size", 1000),
        ("moe_intermediate_size", 0),
        ("num_attention_heads", 60),
        ("num_hidden_layers", 9),
        ("compress_ratios", (0, 0, 4, 2, 1, 1, 1, 1, 0, 0, 0)),
        ("compress_ratios", (0, 0, 2, 2, 1, 1, 1, 1, 0, 1, 0)),
        ("compress_ratios", (0, 2, 2, 2, 1, 1, 1, 1, 0, 0, 0)),
        ("compress_ratios", (0, 0, 2, 1, 1, 1, 1, 1, 0, 0, 0)),
        ("kv_source_layer_ids", (4, 2)),
        ("kv_source_layer_ids", (0, 2, 4)),
        ("kv_source_layer_ids", (2, 3, 4)),
        ("index_source_layer_ids", (2, 4, 8)),
        ("candidate_source_layer_id", 5),
        ("num_experts_per_tok", 9),
        ("dspark_num_experts_per_tok", 0),
        ("dspark_target_layer_ids", (6, 7, 8)),
        ("dspark_noise_token_id", 129280),
        ("engram_layer_ids", (1, 8)),
        ("engram_num_embeddings", (50000, 50000)),
        ("engram_compressed_vocab_size", 0),
        ("index_n_heads", 16),
        ("engram_head_dim", 128),
        ("image_token_id", 5),
        ("vocab_size", 129264),
        ("routed_scaling_factor", float("nan")),
        ("rms_norm_eps", -1.0),
        ("hc_eps", float("inf")),
        ("swiglu_limit", None),
        ("rope_theta", "10000"),
        ("compress_rope_theta", 0.0),
        ("rope_scaling", RopeScaling(factor=float("nan"))),
        ("rope_scaling", RopeScaling(beta_slow=0)),
    ],
)
def test_a_value_that_cannot_be_is_named(field, value):
    with pytest.raises(ModelConfigError) as caught:
        dataclasses.replace(preset("tiny"), **{field: value})
    sentence = str(caught.value)
    assert "must be" in sentence
    assert "found" in sentence
    named = {"num_hidden_layers": "compress_ratios", "compress_ratios": "", "vocab_size": "image_token_id"}.get(
        field, field
    )
    assert named in sentence


def test_engram_rows_that_disagree_name_the_right_ones():
    with pytest.raises(ModelConfigError, match=r"\[384006168, 384016682\]"):
        dataclasses.replace(ModelConfig(), engram_num_embeddings=(384006168, 384016683))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda c: c.update(model_type="deepseek_v3"), "'deepseek_v41' with a text_config"),
        (lambda c: c.pop("text_config"), "without a text_config"),
        (lambda c: c["text_config"].pop("index_topk"), "no index_topk"),
        (lambda c: c["text_config"].update(rope_scaling=None), "rope_scaling"),
    ],
)
def test_a_config_json_of_something_else_is_refused(change, said):
    written = preset("tiny").to_config_json()
    change(written)
    with pytest.raises(ModelConfigError, match=said.replace("[", r"\[")):
        ModelConfig.from_dict(written)


def test_unknown_preset_lists_the_known_ones():
    with pytest.raises(ModelConfigError, match="released, tiny, layer"):
        preset("huge")


@pytest.mark.parametrize("value", [None, "big", {}, [None], 2**31, float("nan")], ids=repr)
def test_a_value_of_another_kind_is_named(value):
    """Whatever the field: a config.json that somebody wrote by hand ends in a sentence, not in a TypeError."""
    document = ModelConfig().to_config_json()
    named = 0
    for field in dataclasses.fields(ModelConfig):
        home = document["text_config"] if field.name in document["text_config"] else document
        if field.name not in home or type(field.default) not in (int, float, tuple):
            continue
        if value == 2**31 and type(field.default) is float:
            continue
        kept, home[field.name] = home[field.name], value
        with pytest.raises(ModelConfigError, match=f"configuration: {field.name} must be"):
            ModelConfig.from_dict(document)
        home[field.name] = kept
        named += 1
    assert named > 30


@pytest.mark.parametrize("value", [[1], "x", 3])
def test_vision_is_a_mapping(value):
    with pytest.raises(ModelConfigError, match="vision_config must be a mapping"):
        ModelConfig.from_dict({**ModelConfig().to_config_json(), "vision_config": value})


def test_more_hashes_than_a_token_has_are_refused():
    """The primes of each hash are searched for, which takes minutes for a wrong number."""
    with pytest.raises(ModelConfigError, match="product <= 1024"):
        dataclasses.replace(ModelConfig(), engram_n_heads=10**6)
