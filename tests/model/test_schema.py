"""The released tensor list: counts, the traps, and what check_tensors says."""

import dataclasses
import itertools

import pytest

from deepinfer_sm80.errors import CheckpointError
from deepinfer_sm80.model.config import preset
from deepinfer_sm80.model.schema import check_tensors, expected_tensors


@pytest.fixture(scope="module")
def released():
    return expected_tensors(preset("released"))


def test_released_counts(released):
    assert len(released) == 95819  # with the 266 vision tensors: 96085, the count of the released shards
    draft = [name for name in released if name.startswith("mtp.")]
    assert len(draft) == 2401
    text = expected_tensors(preset("released"), draft=False)
    assert set(released) - set(text) == set(draft)


def test_only_the_documented_dtypes(released):
    assert {dtype for dtype, _ in released.values()} == {"BF16", "F32", "F8_E4M3", "F8_E8M0", "I8"}


def layers_with(tensors, suffix):
    return sorted(int(name.split(".")[1]) for name in tensors if name.startswith("layers.") and name.endswith(suffix))


def test_sources_own_what_they_must(released):
    assert layers_with(released, "attn.compressor.wkv.weight") == [2, 8, 14, 20]
    assert layers_with(released, "attn.compressor.wgate.weight") == [2, 8, 14]
    assert layers_with(released, "attn.indexer.wk.weight") == [2, 8, 14, 20]
    assert layers_with(released, "attn.indexer.wq_b.weight") == [2, 8, 14, 20, 24, 28, 32, 36]
    assert layers_with(released, "engram.wkv.weight") == [1, 14]


@pytest.mark.parametrize(
    ("name", "dtype", "shape"),
    [
        ("embed.weight", "BF16", (129280, 5120)),
        ("head.weight", "BF16", (129280, 5120)),
        ("layers.0.hc_attn_fn", "F32", (24, 20480)),
        ("layers.39.hc_ffn_scale", "F32", (3,)),
        ("layers.0.attn.attn_sink", "F32", (64,)),
        ("layers.0.attn.wq_b.weight", "F8_E4M3", (32768, 1280)),
        ("layers.0.attn.wq_b.scale", "F8_E8M0", (1024, 40)),
        ("layers.0.attn.wo_a.weight", "F8_E4M3", (8192, 4096)),
        ("layers.0.attn.wo_b.weight", "F8_E4M3", (5120, 8192)),
        ("layers.20.attn.indexer.weights_proj.weight", "BF16", (32, 5120)),
        ("layers.3.ffn.experts.383.w1.weight", "I8", (2304, 2560)),
        ("layers.3.ffn.experts.383.w2.weight", "I8", (5120, 1152)),
        ("layers.3.ffn.experts.383.w2.scale", "F8_E8M0", (5120, 72)),
        ("layers.3.ffn.gate.bias_vl", "F32", (384,)),
        ("layers.14.engram.embed.weight", "F8_E4M3", (384016682, 256)),
        ("layers.14.engram.embed.scale", "F8_E8M0", (384016682, 8)),
        ("layers.1.engram.wkv.weight", "F8_E4M3", (25600, 6144)),
        ("layers.1.engram.k_weight", "BF16", (4, 5120)),
        ("mtp.0.main_proj.weight", "F8_E4M3", (5120, 15360)),
        ("mtp.2.confidence_head.proj.weight", "BF16", (1, 5376)),
        ("mtp.2.markov_head.embed.weight", "BF16", (129280, 256)),
        ("mtp.1.ffn.gate.weight", "BF16", (128, 5120)),
    ],
)
def test_released_entries(released, name, dtype, shape):
    assert released[name] == (dtype, shape)


def test_names_that_do_not_exist(released):
    for name in (
        "model.embed.weight",
        "lm_head.weight",
        "mtp.0.embed.weight",
        "mtp.0.head.weight",
        "mtp.1.norm.weight",
    ):
        assert name not in released
    for name in ("layers.0.hc_attn_fn.weight", "layers.1.engram.q_weight.weight", "mtp.2.ffn.experts.128.w1.weight"):
        assert name not in released


def test_a_scale_follows_its_weight(released):
    names = list(released)
    for before, name in itertools.pairwise(names):
        if name.endswith(".scale"):
            assert before == name.removesuffix("scale") + "weight"


def test_image_bias_exists_only_with_a_vision_tower():
    tiny = preset("tiny")
    assert not [name for name in expected_tensors(tiny) if name.endswith("bias_vl")]
    seeing = expected_tensors(dataclasses.replace(tiny, vision_num_hidden_layers=1))
    assert len([name for name in seeing if name.endswith("bias_vl")]) == 8 + 3


def test_odd_sizes_round_scales_up(micro):
    narrow = dataclasses.replace(micro, q_lora_rank=32, num_attention_heads=8)
    tensors = expected_tensors(narrow)
    assert tensors["layers.0.attn.wo_a.scale"] == ("F8_E8M0", (8, 16))
    assert tensors["mtp.0.main_proj.scale"] == ("F8_E8M0", (2, 6))


class TestCheck:
    @pytest.fixture
    def found(self, micro):
        return dict(expected_tensors(micro))

    def test_complete_passes_and_vision_is_ignored(self, micro, found):
        found |= {"vision.patch.weight": ("BF16", (1,)), "aligner.w1.weight": ("F32", ()), "image_end": ("F32", (64,))}
        check_tensors(micro, found)

    @pytest.mark.parametrize(
        ("change", "said"),
        [
            (lambda f: f.pop("norm.weight"), "1 missing (norm.weight)"),
            (lambda f: f.update({"norm.bias": ("BF16", (64,))}), "1 unknown (norm.bias)"),
            (
                lambda f: f.update({"norm.weight": ("F32", (64,))}),
                "1 of the wrong dtype (norm.weight is F32, must be BF16)",
            ),
            (
                lambda f: f.update({"norm.weight": ("BF16", (65,))}),
                "1 of the wrong shape (norm.weight is (65,), must be (64,))",
            ),
        ],
    )
    def test_each_kind_of_fault_is_named(self, micro, found, change, said):
        change(found)
        with pytest.raises(CheckpointError) as caught:
            check_tensors(micro, found, "somewhere")
        assert said in str(caught.value)
        assert "Checkpoint somewhere" in str(caught.value)

    def test_many_faults_are_counted_not_listed(self, micro, found):
        for name in [name for name in found if ".experts." in name]:
            del found[name]
        with pytest.raises(CheckpointError, match=r"60 missing \(.*, and 56 more\)") as caught:
            check_tensors(micro, found)
        assert len(str(caught.value)) < 600

    def test_the_layout_of_another_group_size_is_caught(self, micro, found):
        name = "layers.0.ffn.experts.0.w1.scale"
        found[name] = ("F8_E8M0", (32, 4))  # groups of 16
        with pytest.raises(CheckpointError, match=r"is \(32, 4\), must be \(32, 2\)"):
            check_tensors(micro, found)
