"""An image is refused in every form in which vLLM lets one in, over a stand-in of its processing information."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import sys
import types
from pathlib import Path

import pytest

from deepinfer_sm80.errors import ImageInputError

_spec = importlib.util.spec_from_file_location("vllm_source", Path(__file__).with_name("vllm_source.py"))
source = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(source)

PREPROCESS = "vllm.models.deepseek_v41.common.mm_preprocess"
CONTEXT = "vllm.multimodal.processing.context"


class Items(dict):
    def get_count(self, modality, *, strict=True):
        return len(self.get(modality, ())) if not strict else len(self[modality])


class StockInfo:
    """vLLM's rule: counts are validated, except of embeddings where the limit is 0 and embeddings are enabled."""

    embeddings_enabled = True

    def parse_mm_data(self, mm_data, *, validate=True):
        for modality, items in mm_data.items():
            if validate and not (self.embeddings_enabled and items == ["embedding"]):
                self.validate_num_items(modality, len(items))
        return Items(mm_data)

    def validate_num_items(self, modality, num_items):
        if num_items > 0:
            raise ValueError(f"stock: {num_items} {modality}")


@pytest.fixture
def images(monkeypatch):
    for name in ("vllm", "vllm.models", "vllm.models.deepseek_v41", "vllm.models.deepseek_v41.common"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    module = types.ModuleType(PREPROCESS)
    module.DeepseekV4VLProcessingInfo = StockInfo
    monkeypatch.setitem(sys.modules, PREPROCESS, module)
    target = "deepinfer_sm80.vllm_plugin.images"
    monkeypatch.delitem(sys.modules, target, raising=False)
    yield importlib.import_module(target)
    sys.modules.pop(target, None)


@pytest.mark.parametrize("validate", [True, False])
@pytest.mark.parametrize("data", [["pixels", "pixels"], ["embedding"], [None]], ids=["pixels", "embedding", "missing"])
def test_every_form_is_refused(images, data, validate):
    with pytest.raises(ImageInputError, match=rf"holds {len(data)} image\(s\), allowed is 0"):
        images.TextOnlyProcessingInfo().parse_mm_data({"image": data}, validate=validate)


def test_text_and_other_modalities_go_vllms_way(images):
    info = images.TextOnlyProcessingInfo()
    assert info.parse_mm_data({}) == {}
    assert info.parse_mm_data({"image": []}) == {"image": []}
    with pytest.raises(ValueError, match="stock: 1 video"):
        info.parse_mm_data({"video": ["frames"]})


@pytest.mark.parametrize("name", ["patches", "image_embeds", "types"])
def test_inputs_of_the_tower_are_refused_by_name(images, name):
    images.refuse_image_inputs({})
    images.refuse_image_inputs({name: None})
    with pytest.raises(ImageInputError, match=rf"holds the {name} of at least 1 image"):
        images.refuse_image_inputs({name: object()})


@pytest.mark.parametrize(("limit", "before", "after"), [(1, False, True), (None, False, True), (0, False, False)])
def test_the_tower_is_left_out_unless_vllm_does_so_itself(images, limit, before, after):
    multimodal = types.SimpleNamespace(language_model_only=before, get_limit_per_prompt={"image": limit}.get)
    images.leave_out_vision_tower(
        types.SimpleNamespace(model_config=types.SimpleNamespace(multimodal_config=multimodal))
    )
    assert multimodal.language_model_only is after


def test_a_model_without_a_multimodal_configuration_has_no_tower(images):
    images.leave_out_vision_tower(types.SimpleNamespace(model_config=types.SimpleNamespace(multimodal_config=None)))


def test_vllm_has_the_seam():
    assert source.parameters(CONTEXT, "BaseProcessingInfo.parse_mm_data") == ("self", "mm_data", "validate")
    assert source.parameters(CONTEXT, "BaseProcessingInfo.validate_num_items") == ("self", "modality", "num_items")
    counts = source.parameters("vllm.multimodal.parse", "MultiModalDataItems.get_count")
    assert counts == ("self", "modality", "strict")
    gate = ast.unparse(source.definition(CONTEXT, "BaseProcessingInfo.parse_mm_data"))
    assert "get_limit_per_prompt(modality) == 0" in gate
