"""The two model classes over a stand-in of vLLM: what they check, and when."""

from __future__ import annotations

import importlib
import sys
import types

import pytest
import torch

from deepinfer_sm80.errors import CheckpointError
from deepinfer_sm80.vllm_plugin import overrides

PLUGIN = "deepinfer_sm80.vllm_plugin"
Space = types.SimpleNamespace


class StockTarget:
    def __init__(self, *, vllm_config, prefix=""):
        self.config, self.finished = vllm_config.model_config.hf_config, 0

    def load_weights(self, weights):
        return {name for name, _ in weights}

    def process_weights_after_loading(self):
        self.finished += 1


class StockDraft:
    def __init__(self, *, vllm_config, prefix=""):
        self.config = vllm_config.model_config.hf_config

    def load_weights(self, weights):
        return {name for name, _ in weights}


@pytest.fixture
def plugin(monkeypatch):
    """The module over a stand-in of vLLM, and what it called in order."""
    calls = []
    registry = Space(register_processor=lambda *args, **kwargs: lambda cls: cls)
    logger = Space(info_once=lambda *args: calls.append("said"))
    stubs = {
        "vllm": {},
        "vllm.logger": {"init_logger": lambda name: logger},
        "vllm.multimodal": {"MULTIMODAL_REGISTRY": registry},
        "vllm.models.deepseek_v41.nvidia": {},
        "vllm.models.deepseek_v41.nvidia.vl_model": {"DeepseekV41ForCausalLM": StockTarget},
        "vllm.models.deepseek_v41.nvidia.dspark": {"DSparkDeepseekV4ForCausalLM": StockDraft},
        "vllm.models.deepseek_v41.common.mm_preprocess": {
            "DeepseekV4VLDummyInputsBuilder": object,
            "DeepseekV4VLMultiModalProcessor": object,
        },
        f"{PLUGIN}.images": {
            "TextOnlyProcessingInfo": object,
            "leave_out_vision_tower": lambda config: None,
            "refuse_image_inputs": lambda inputs: calls.append(inputs),
        },
        f"{PLUGIN}.expert_padding": {"report_saved_memory": lambda model: calls.append(("reported", type(model)))},
        f"{PLUGIN}.expert_filter": {"left_out_on_this_rank": lambda config: lambda name: False},
        f"{PLUGIN}.kernels": {
            "start_warmup": lambda config: calls.append("warming up") or "warmup",
            "finish_warmup": lambda warmup: calls.append(f"{warmup} ready"),
        },
        f"{PLUGIN}.requirements": {"check_config": lambda config, **more: calls.append(("checked", more))},
    }
    for name, content in stubs.items():
        module = types.ModuleType(name)
        module.__dict__.update(content)
        monkeypatch.setitem(sys.modules, name, module)
        parent, _, leaf = name.rpartition(".")
        if parent in stubs:
            monkeypatch.setattr(sys.modules[parent], leaf, module, raising=False)
    monkeypatch.setattr(overrides, "OVERRIDES", ())
    monkeypatch.setattr(overrides, "_originals", {})
    monkeypatch.delitem(sys.modules, f"{PLUGIN}.model", raising=False)
    yield importlib.import_module(f"{PLUGIN}.model"), calls
    sys.modules.pop(f"{PLUGIN}.model", None)


def built(cls):
    return cls(vllm_config=Space(model_config=Space(hf_config=Space(vision_n_layers=0))))


ONE = [("norm.weight", torch.empty(5120, dtype=torch.bfloat16, device="meta"))]
ONE_OF_THE_DRAFT = [("mtp.2.norm.weight", torch.empty(5120, dtype=torch.bfloat16, device="meta"))]
WRONG = [("norm.weight", torch.empty(64, dtype=torch.bfloat16, device="meta"))]


def test_a_start_needs_the_whole_checkpoint_and_an_update_does_not(plugin):
    model = built(plugin[0].DeepseekV41ForCausalLM)
    with pytest.raises(CheckpointError, match="tensors are missing"):
        model.load_weights(ONE)
    model.process_weights_after_loading()
    assert model.finished == 1
    assert model.load_weights(ONE) == {"norm.weight"}
    with pytest.raises(CheckpointError, match=r"\[64\], must be BF16 \[5120\]"):
        model.load_weights(WRONG)


def test_the_drafts_too(plugin):
    model = built(plugin[0].DSparkDeepseekV4ForCausalLM)
    with pytest.raises(CheckpointError, match="tensors are missing"):
        model.load_weights(ONE_OF_THE_DRAFT)
    model.process_weights_after_loading()
    assert model.load_weights(ONE_OF_THE_DRAFT) == {"mtp.2.norm.weight"}


def test_kernels_are_waited_for_once_whichever_way_vllm_loaded(plugin):
    """Random weights (``--load-format dummy``) never come through ``load_weights``; updates come many times."""
    module, calls = plugin
    model = built(module.DeepseekV41ForCausalLM)
    for _ in range(3):
        model.process_weights_after_loading()
        model.load_weights(ONE)
    assert calls[-2:] == ["warming up", "warmup ready"]


def test_whatever_reaches_the_tower_is_looked_at(plugin):
    module, calls = plugin
    assert built(module.DeepseekV41ForCausalLM).embed_multimodal(image_embeds="rows") == []
    assert calls[-1] == {"image_embeds": "rows"}


def test_the_draft_is_asked_for_its_own_configuration(plugin):
    module, calls = plugin
    built(module.DeepseekV41ForCausalLM)
    built(module.DSparkDeepseekV4ForCausalLM)
    assert [call for call in calls if "checked" in call] == [("checked", {}), ("checked", {"draft": True})]


def test_both_models_report_what_their_experts_save(plugin):
    module, calls = plugin
    classes = (module.DeepseekV41ForCausalLM, module.DSparkDeepseekV4ForCausalLM)
    for cls in classes:
        built(cls)
    assert [call for call in calls if "reported" in call] == [("reported", cls) for cls in classes]


def test_what_the_loader_leaves_out_is_the_targets_only(plugin, monkeypatch):
    module, _ = plugin
    monkeypatch.setattr(module, "left_out_on_this_rank", lambda config: lambda name: True)
    assert built(module.DeepseekV41ForCausalLM).load_weights(ONE) == {"norm.weight"}
    with pytest.raises(CheckpointError, match="tensors are missing"):
        built(module.DSparkDeepseekV4ForCausalLM).load_weights(ONE_OF_THE_DRAFT)
