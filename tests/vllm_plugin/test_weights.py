"""A checkpoint with a missing, misshapen or mistyped tensor is refused by the tensor's name while it loads."""

import dataclasses
import types

import pytest
import torch

from deepinfer_sm80.errors import CheckpointError
from deepinfer_sm80.model.config import preset
from deepinfer_sm80.model.schema import expected_tensors
from deepinfer_sm80.vllm_plugin.weights import checked, model_config

DTYPES = {
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
}
TINY = preset("tiny")


def hf_config():
    """As vLLM flattens it: lists, and the vision layers under another name."""
    values = {k: list(v) if isinstance(v, tuple) else v for k, v in dataclasses.asdict(TINY).items()}
    values |= {"vision_n_layers": values.pop("vision_num_hidden_layers"), "rope_scaling": None}
    return types.SimpleNamespace(**values)


def stream(change=lambda name, dtype, shape: (dtype, shape)):
    for name, (dtype, shape) in expected_tensors(TINY, draft=True).items():
        entry = change(name, dtype, shape)
        if entry is not None:
            yield name, torch.empty(entry[1], dtype=DTYPES[entry[0]], device="meta")


def run(change, part="text", **options):
    return list(checked(stream(change), hf_config(), part=part, **options))


def unchanged(name, dtype, shape):
    return dtype, shape


def without(needle):
    return lambda name, dtype, shape: None if needle in name else (dtype, shape)


def test_our_view_of_vllms_configuration_is_the_checkpoints():
    assert model_config(hf_config()) == TINY


def test_a_complete_checkpoint_passes_through():
    assert len(run(unchanged)) == len(expected_tensors(TINY, draft=True))
    run(unchanged, part="draft")


@pytest.mark.parametrize(
    "name", ["layers.2.attn.compressor.wgate.weight", "layers.1.engram.embed.scale", "head.weight"]
)
def test_a_missing_tensor_is_named(name):
    with pytest.raises(CheckpointError, match=rf"1 tensors are missing \({name}\)"):
        run(without(name))


def test_a_missing_draft_tensor_matters_to_the_draft_only():
    run(without("mtp.2.norm.weight"))
    with pytest.raises(CheckpointError, match=r"mtp\.2\.norm\.weight"):
        run(without("mtp.2.norm.weight"), part="draft")


def test_a_misshapen_tensor_is_named_with_both_shapes():
    def halve(name, dtype, shape):
        return (dtype, (shape[0] // 2, *shape[1:])) if name == "layers.3.ffn.experts.1.w2.scale" else (dtype, shape)

    with pytest.raises(
        CheckpointError, match=r"layers\.3\.ffn\.experts\.1\.w2\.scale is F8_E8M0 \[512, 8\], must be .* \[1024, 8\]"
    ):
        run(halve)


def test_a_mistyped_tensor_is_named_with_both_types():
    def to_bf16(name, dtype, shape):
        return ("BF16", shape) if name == "layers.0.attn.wkv.weight" else (dtype, shape)

    with pytest.raises(CheckpointError, match=r"layers\.0\.attn\.wkv\.weight is BF16 .* must be F8_E4M3"):
        run(to_bf16)


def test_what_the_loader_leaves_out_on_this_rank_is_not_missing():
    """As vLLM's expert filter does: weights of other ranks' experts, and nothing else."""

    def left_out(name):
        return ".ffn.experts.5." in name and name.endswith(".weight")

    gone = lambda name, dtype, shape: None if left_out(name) else (dtype, shape)  # noqa: E731
    run(gone, left_out=left_out)
    with pytest.raises(CheckpointError, match=r"24 tensors are missing .*experts\.5\.w1\.weight"):
        run(gone)
    for needle in ("layers.3.ffn.experts.5.w1.scale", "layers.3.ffn.experts.4.w1.weight", "shared_experts.w1"):
        with pytest.raises(CheckpointError, match=needle.replace(".", r"\.")):
            run(without(needle), left_out=left_out)


def extra(*entries):
    """The complete stream, then more tensors."""
    yield from stream()
    for name in entries:
        dtype, shape = expected_tensors(TINY, draft=True).get(name, ("BF16", (3,)))
        yield name, torch.empty(shape, dtype=DTYPES[dtype], device="meta")


@pytest.mark.parametrize(
    ("part", "name", "said"),
    [
        ("text", "layers.3.attn.wq_a.weight", r"layers\.3\.attn\.wq_a\.weight comes twice.*index\.json"),
        ("text", "layers.8.attn.wq_a.weight", r"the model has no tensor layers\.8\.attn\.wq_a\.weight"),
        ("text", "foo", "the model has no tensor foo"),
        ("draft", "mtp.0.attn.wq_a.weight", r"mtp\.0\.attn\.wq_a\.weight comes twice"),
        ("draft", "mtp.3.norm.weight", r"the model has no tensor mtp\.3\.norm\.weight"),
    ],
)
def test_a_repeated_or_unknown_name_is_refused(part, name, said):
    with pytest.raises(CheckpointError, match=said):
        list(checked(extra(name), hf_config(), part=part))


@pytest.mark.parametrize(
    ("part", "name"),
    [
        ("text", "vision.x"),
        ("text", "image_start"),
        ("text", "mtp.9.x"),
        ("draft", "layers.8.x"),
        ("draft", "vision.x"),
    ],
)
def test_what_vllm_drops_may_be_there_and_may_repeat(part, name):
    list(checked(extra(name, name), hf_config(), part=part))


class TestUpdateOfARunningModel:
    """vLLM's weight transfer hands over one tensor, or a few, at a time."""

    def test_a_single_tensor_is_no_incomplete_checkpoint(self):
        one = list(stream())[:1]
        assert list(checked(one, hf_config(), part="text", whole=False)) == one
        with pytest.raises(CheckpointError, match="tensors are missing"):
            list(checked(one, hf_config(), part="text"))

    def test_its_shape_and_dtype_are_checked_all_the_same(self):
        update = [("norm.weight", torch.empty(7, dtype=torch.bfloat16))]
        with pytest.raises(CheckpointError, match=r"norm\.weight is BF16 \[7\], must be BF16 \[1024\]"):
            list(checked(update, hf_config(), part="text", whole=False))
