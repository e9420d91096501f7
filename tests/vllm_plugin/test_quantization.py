"""The expert padding: the seams in vLLM's source, and the classes' behaviour over a stand-in of vLLM."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import sys
import types
from pathlib import Path

import pytest

from deepinfer_sm80.model.config import ModelConfig
from deepinfer_sm80.topology import footprint

_spec = importlib.util.spec_from_file_location("vllm_source", Path(__file__).with_name("vllm_source.py"))
source = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(source)

MXFP4 = "vllm.model_executor.layers.quantization.mxfp4"
CONFIG = "vllm.models.deepseek_v41.quant_config"
ORACLE = "vllm.model_executor.layers.fused_moe.oracle.mxfp4"
QUANTIZATION = "vllm.model_executor.layers.quantization"
ROUND_UP = ("self", "hidden_size", "intermediate_size_per_partition", "act_dtype", "moe_parallel_config")


class Backend:
    MARLIN, BATCHED_MARLIN, TRITON = "MARLIN", "BATCHED_MARLIN", "TRITON"


class StockMethod:
    def __init__(self, moe, activation_key=None):
        self.moe, self.activation_key, self.mxfp4_backend = moe, activation_key, moe

    def maybe_roundup_sizes(
        self, hidden_size, intermediate_size_per_partition, act_dtype=None, moe_parallel_config=None
    ):
        return -(-hidden_size // 256) * 256, -(-intermediate_size_per_partition // 128) * 128


class StockConfig:
    updates = ()

    @classmethod
    def from_config(cls, config):
        made = cls()
        made.made_of = config
        return made

    @classmethod
    def override_quantization_method(cls, hf_quant_cfg, user_quant, hf_config=None):
        return ("overridden", hf_quant_cfg, user_quant, hf_config)

    @staticmethod
    def get_config_filenames():
        return ["config.json"]

    def maybe_update_config(self, model_name, hf_config=None, revision=None):
        self.updates = (model_name, hf_config, revision)

    def get_quant_method(self, layer, prefix):
        return StockMethod(layer.moe_config, activation_key="key") if prefix.endswith("experts") else prefix


@pytest.fixture
def plugin(monkeypatch):
    """``expert_padding`` and ``quantization`` over a stand-in of vLLM, what was registered, and the lines logged."""
    registered, lines = {}, []
    register = lambda name: lambda cls: registered.setdefault(name, cls)  # noqa: E731
    logger = types.SimpleNamespace(info=lambda line, *args: lines.append(line % args))
    names = {
        "vllm.logger": {"init_logger": lambda name: logger},
        ORACLE: {"Mxfp4MoeBackend": Backend},
        QUANTIZATION: {"register_quantization_config": register},
        f"{QUANTIZATION}.base_config": {"QuantizationConfig": object},
        MXFP4: {"Mxfp4MoEMethod": StockMethod},
        CONFIG: {"DeepseekV4FP8Config": StockConfig},
    }
    for name, content in names.items():
        module = types.ModuleType(name)
        module.__dict__.update(content)
        monkeypatch.setitem(sys.modules, name, module)
    for name in ("vllm", "vllm.model_executor", "vllm.models"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    targets = [f"deepinfer_sm80.vllm_plugin.{name}" for name in ("quantization", "expert_padding")]
    for target in targets:
        monkeypatch.delitem(sys.modules, target, raising=False)
    registry = importlib.import_module(targets[0])
    assert targets[1] not in sys.modules, "loading the plugin must not import vLLM's expert code"
    yield types.SimpleNamespace(
        registry=registry, padding=importlib.import_module(targets[1]), registered=registered, lines=lines
    )
    for target in targets:
        sys.modules.pop(target, None)


def test_vllm_has_the_seam():
    assert source.parameters(MXFP4, "Mxfp4MoEMethod.maybe_roundup_sizes") == ROUND_UP
    assert source.parameters(MXFP4, "Mxfp4MoEMethod.__init__") == ("self", "moe", "activation_key")
    assert source.parameters(CONFIG, "DeepseekV4FP8Config.get_quant_method") == ("self", "layer", "prefix")
    assert source.parameters(QUANTIZATION, "register_quantization_config") == ("quantization",)
    assert "'deepseek_v4_fp8'" in ast.unparse(source.definition(CONFIG, "DeepseekV4FP8Config.get_name"))
    base = f"{QUANTIZATION}.base_config"
    update = source.parameters(base, "QuantizationConfig.maybe_update_config")
    assert update == ("self", "model_name", "hf_config", "revision")
    override = source.parameters(CONFIG, "DeepseekV4FP8Config.override_quantization_method")
    assert override == ("cls", "hf_quant_cfg", "user_quant", "hf_config")


@pytest.mark.parametrize(
    ("module", "function", "name"),
    [
        ("vllm.model_executor.model_loader.weight_utils", "get_quant_config", "quant_cls"),
        ("vllm.config.model", "ModelConfig._verify_quantization", "method"),
    ],
)
def test_vllm_asks_the_registered_class_for_nothing_that_it_lacks(module, function, name):
    asked = {
        node.attr
        for node in ast.walk(source.definition(module, function))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == name
    }
    optional = {"from_config_file", "from_config_dict_json"}  # vLLM looks first whether they are there
    assert asked
    assert asked <= {"from_config", "get_config_filenames", "override_quantization_method"} | optional


def test_vllm_tells_every_configuration_its_model():
    made = ast.unparse(source.definition("vllm.config.vllm", "VllmConfig._get_quantization_config"))
    assert "quant_config.maybe_update_config(model_config.model, hf_config=model_config.hf_config" in made
    draft = ast.unparse(source.definition("vllm.model_executor.models.utils", "get_draft_quant_config"))
    assert "VllmConfig.get_quantization_config(draft_model_config" in draft
    assert "draft_vllm_config.quant_config = get_draft_quant_config(vllm_config)" in ast.unparse(
        source.definition("vllm.v1.worker.gpu.spec_decode.dspark.utils", "load_dspark_model")
    )


def test_vllm_still_rounds_marlin_to_128_and_needs_64():
    """When this fails the override has done its work: vLLM rounds to the need itself."""
    rounding = ast.unparse(source.definition(ORACLE, "mxfp4_round_up_hidden_size_and_intermediate_size"))
    marlin = rounding.partition("Mxfp4MoeBackend.MARLIN")[2].partition("elif")[0]
    assert "intermediate_size = round_up(intermediate_size, 128)" in marlin
    need = ast.unparse(source.definition(f"{QUANTIZATION}.utils.marlin_utils", "marlin_moe_padded_intermediate"))
    assert "math.lcm(64, group)" in need


def test_vllm_initialises_the_padding_to_zero_and_loads_unpadded_slices():
    """Neutral padding: codes and scales are zeros, and the loader cuts by the checkpoint's size, not the padded one."""
    created = ast.unparse(source.definition(MXFP4, "Mxfp4MoEMethod.create_weights"))
    for name in ("w13_weight", "w13_weight_scale", "w2_weight", "w2_weight_scale"):
        assert f"{name} = torch.nn.Parameter(torch.zeros(" in created
    experts = "vllm.model_executor.layers.fused_moe.routed_experts"
    for loader in ("_load_w13", "_load_w2"):
        text = ast.unparse(source.definition(experts, f"RoutedExperts.{loader}"))
        assert "loaded_per_rank = loaded_weight.shape[shard_dim] // tp_size" in text


@pytest.mark.parametrize(("tp", "ours", "vllms"), [(1, 2304, 2304), (2, 1152, 1152), (4, 576, 640), (8, 320, 384)])
def test_columns_per_rank(plugin, tp, ours, vllms):
    method = plugin.padding.AmpereMxfp4MoEMethod(Backend.MARLIN)
    assert method.maybe_roundup_sizes(5120, 2304 // tp, None, None) == (5120, ours)
    assert method.columns_saved == vllms - ours
    planned = (footprint.Cut(tp, tp, multiple=m) for m in (footprint.OUR_MULTIPLE, footprint.STOCK_MULTIPLE))
    assert [cut.columns(ModelConfig()) for cut in planned] == [ours, vllms], "the planner counts what is held"
    assert StockMethod(Backend.MARLIN).maybe_roundup_sizes(5120, 2304 // tp) == (5120, vllms)


def test_other_backends_keep_vllms_rounding(plugin):
    method = plugin.padding.AmpereMxfp4MoEMethod(Backend.TRITON)
    assert method.maybe_roundup_sizes(5000, 576, None, None) == (5120, 640)
    assert method.columns_saved == 0


def configured(plugin, model_type):
    """The configuration that vLLM makes of a checkpoint: asked of the registry, then told the model."""
    plugin.registry.register()
    made = plugin.registered["deepseek_v4_fp8"].from_config({"quant_method": "fp8"})
    made.maybe_update_config("name", hf_config=types.SimpleNamespace(model_type=model_type))
    return made


def test_the_registry_makes_our_configuration(plugin):
    made = configured(plugin, "deepseek_v41")
    assert type(made) is plugin.padding.AmpereFP8Config
    assert made.made_of == {"quant_method": "fp8"}
    assert made.updates[0] == "name"
    chosen = plugin.registered["deepseek_v4_fp8"]
    assert chosen.override_quantization_method("q", None, hf_config="h") == ("overridden", "q", None, "h")
    assert chosen.get_config_filenames() == ["config.json"]
    assert type(chosen()) is plugin.padding.AmpereFP8Config
    plugin.registry.register()
    assert list(plugin.registered) == ["deepseek_v4_fp8"]


def test_only_routed_fp4_experts_are_replaced(plugin):
    made, layer = configured(plugin, "deepseek_v41"), types.SimpleNamespace(moe_config=Backend.MARLIN)
    method = made.get_quant_method(layer, "layers.3.ffn.experts")
    assert type(method) is plugin.padding.AmpereMxfp4MoEMethod
    assert (method.moe, method.activation_key) == (Backend.MARLIN, "key")
    assert made.get_quant_method(layer, "layers.3.attn.wq_b") == "layers.3.attn.wq_b"


@pytest.mark.parametrize("model_type", ["deepseek_v4", None])
def test_v4_has_the_same_method_and_keeps_vllms_experts(plugin, model_type):
    made, layer = configured(plugin, model_type), types.SimpleNamespace(moe_config=Backend.MARLIN)
    assert type(made.get_quant_method(layer, "layers.3.ffn.experts")) is StockMethod


def model_of(plugin, columns, layers, experts=384):
    """Layers of experts as vLLM leaves them behind: the method was asked for the size, which the configuration has."""
    found = [types.SimpleNamespace(quant_method="of a linear"), types.SimpleNamespace()]
    for _ in range(layers):
        method = plugin.padding.AmpereMxfp4MoEMethod(Backend.MARLIN)
        hidden, wide = method.maybe_roundup_sizes(5120, columns, None, None)
        moe = types.SimpleNamespace(hidden_dim=hidden, intermediate_size_per_partition=wide, num_local_experts=experts)
        found.append(types.SimpleNamespace(quant_method=method, moe_config=moe))
    return types.SimpleNamespace(modules=lambda: iter(found))


@pytest.mark.parametrize(
    ("columns", "layers", "experts", "expected"),
    [
        (576, 40, 384, "576 columns wide on this rank, with vLLM's rounding 640: 7.47 GiB saved in 40 layers."),
        (288, 40, 384, "320 columns wide on this rank, with vLLM's rounding 384: 7.47 GiB saved in 40 layers."),
        (288, 3, 128, "320 columns wide on this rank, with vLLM's rounding 384: 0.19 GiB saved in 3 layers."),
    ],
)
def test_a_model_says_what_its_rank_saves(plugin, columns, layers, experts, expected):
    plugin.padding.report_saved_memory(model_of(plugin, columns, layers, experts))
    assert len(plugin.lines) == 1
    assert plugin.lines[0].endswith(expected)


@pytest.mark.parametrize(("columns", "layers"), [(1152, 40), (2304, 40), (576, 0)])
def test_nothing_is_said_where_nothing_is_saved(plugin, columns, layers):
    plugin.padding.report_saved_memory(model_of(plugin, columns, layers))
    assert not plugin.lines
