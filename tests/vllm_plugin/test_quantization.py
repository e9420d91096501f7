"""The expert padding: our arithmetic, the seam in vLLM's source, and the class's behaviour over a stand-in of vLLM."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import sys
import types
from pathlib import Path

import pytest

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
    expert_dtype = "fp4"

    def get_quant_method(self, layer, prefix):
        return StockMethod(layer.moe_config, activation_key="key") if prefix.endswith("experts") else prefix


@pytest.fixture
def plugin(monkeypatch):
    """The module over a stand-in of vLLM, what it registered, and the lines it logged."""
    registered, lines = {}, []
    register = lambda name: lambda cls: registered.setdefault(name, cls)  # noqa: E731
    logger = types.SimpleNamespace(info_once=lambda line, *args: lines.append(line % args))
    names = {
        "vllm.logger": {"init_logger": lambda name: logger},
        ORACLE: {"Mxfp4MoeBackend": Backend},
        QUANTIZATION: {"register_quantization_config": register},
        MXFP4: {"Mxfp4MoEMethod": StockMethod},
        CONFIG: {"DeepseekV4FP8Config": StockConfig},
    }
    for name, content in names.items():
        module = types.ModuleType(name)
        module.__dict__.update(content)
        monkeypatch.setitem(sys.modules, name, module)
    for name in ("vllm", "vllm.model_executor", "vllm.models"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    target = "deepinfer_sm80.vllm_plugin.quantization"
    monkeypatch.delitem(sys.modules, target, raising=False)
    module = importlib.import_module(target)
    yield module, registered, lines
    sys.modules.pop(target, None)


def test_vllm_has_the_seam():
    assert source.parameters(MXFP4, "Mxfp4MoEMethod.maybe_roundup_sizes") == ROUND_UP
    assert source.parameters(MXFP4, "Mxfp4MoEMethod.__init__") == ("self", "moe", "activation_key")
    assert source.parameters(CONFIG, "DeepseekV4FP8Config.get_quant_method") == ("self", "layer", "prefix")
    assert source.parameters(QUANTIZATION, "register_quantization_config") == ("quantization",)
    assert "'deepseek_v4_fp8'" in ast.unparse(source.definition(CONFIG, "DeepseekV4FP8Config.get_name"))


def test_vllm_still_rounds_marlin_to_128_and_needs_64():
    """When this fails the override has done its work: vLLM rounds to the need itself."""
    rounding = ast.unparse(
        source.definition(
            "vllm.model_executor.layers.fused_moe.oracle.mxfp4", "mxfp4_round_up_hidden_size_and_intermediate_size"
        )
    )
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
    method = plugin[0].AmpereMxfp4MoEMethod(Backend.MARLIN)
    assert method.maybe_roundup_sizes(5120, 2304 // tp, None, None) == (5120, ours)
    assert StockMethod(Backend.MARLIN).maybe_roundup_sizes(5120, 2304 // tp) == (5120, vllms)


def test_other_backends_keep_vllms_rounding(plugin):
    method = plugin[0].AmpereMxfp4MoEMethod(Backend.TRITON)
    assert method.maybe_roundup_sizes(5000, 576, None, None) == (5120, 640)


def test_only_routed_fp4_experts_are_replaced(plugin):
    module, registered, _ = plugin
    assert registered == {"deepseek_v4_fp8": module.AmpereFP8Config}
    layer = types.SimpleNamespace(moe_config=Backend.MARLIN)
    method = module.AmpereFP8Config().get_quant_method(layer, "layers.3.ffn.experts")
    assert type(method) is module.AmpereMxfp4MoEMethod
    assert (method.moe, method.activation_key) == (Backend.MARLIN, "key")
    assert module.AmpereFP8Config().get_quant_method(layer, "layers.3.attn.wq_b") == "layers.3.attn.wq_b"


def configuration(config, tp=4, dp=1, ep=False, layers=40):
    return types.SimpleNamespace(
        quant_config=config,
        parallel_config=types.SimpleNamespace(
            tensor_parallel_size=tp, data_parallel_size=dp, enable_expert_parallel=ep
        ),
        model_config=types.SimpleNamespace(
            hf_text_config=types.SimpleNamespace(moe_intermediate_size=2304, hidden_size=5120, n_routed_experts=384),
            get_num_layers=lambda parallel: layers,
        ),
    )


@pytest.mark.parametrize(("tp", "ours", "vllms"), [(4, 576, 640), (8, 320, 384)])
def test_adopting_keeps_the_object_and_says_what_is_saved(plugin, tp, ours, vllms):
    module, _, lines = plugin
    config = StockConfig()
    config.resolved = "kept"
    for _ in range(2):
        module.adopt(configuration(config, tp))
    assert type(config) is module.AmpereFP8Config
    assert config.resolved == "kept"
    assert lines[0].endswith(f"{ours} columns wide on this rank instead of {vllms}: 7.47 GiB saved in 40 layers.")


@pytest.mark.parametrize(("tp", "ep"), [(2, False), (8, True)])
def test_nothing_is_said_where_nothing_is_saved(plugin, tp, ep):
    module, _, lines = plugin
    module.adopt(configuration(StockConfig(), tp, ep=ep))
    assert not lines


def test_another_quantisation_is_left_alone(plugin):
    other = object()
    module, _, lines = plugin
    module.adopt(configuration(other))
    assert type(other) is object
    assert not lines
