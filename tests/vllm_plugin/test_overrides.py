"""Every name of vLLM that the plugin replaces or extends is there, with the parameters the plugin was written for."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import sys
import types
from pathlib import Path

import pytest

from deepinfer_sm80.errors import OverrideTargetError
from deepinfer_sm80.vllm_plugin import overrides
from deepinfer_sm80.vllm_plugin.activation import ARCHITECTURES
from deepinfer_sm80.vllm_plugin.overrides import OVERRIDES, Override

_spec = importlib.util.spec_from_file_location("vllm_source", Path(__file__).with_name("vllm_source.py"))
source = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(source)

PLUGIN = Path(overrides.__file__).parent


@pytest.mark.parametrize("override", OVERRIDES, ids=lambda o: o.name)
def test_vllm_has_what_is_replaced(override):
    assert source.parameters(override.module, override.name) == override.parameters


@pytest.mark.parametrize("override", OVERRIDES, ids=lambda o: o.name)
def test_replacement_takes_the_same_parameters(override):
    module, _, name = override.replacement.partition(":")
    tree = ast.parse((PLUGIN / f"{module.rpartition('.')[2]}.py").read_text())
    found = next(node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == name)
    assert tuple(a.arg for a in found.args.args) == override.parameters
    assert override.reason
    assert override.remove_when


def imported_from_vllm():
    for path in PLUGIN.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vllm."):
                yield from ((path.stem, node.module, alias.name) for alias in node.names)


@pytest.mark.parametrize(("file", "module", "name"), sorted(set(imported_from_vllm())))
def test_vllm_has_what_is_imported(file, module, name):
    names = set(source.wheel().namelist())
    if f"{module.replace('.', '/')}/{name}.py" in names:
        return
    tree = source.module(module)
    defined = {n.name for n in tree.body if isinstance(n, ast.FunctionDef | ast.ClassDef)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            defined |= {t.id for t in targets if isinstance(t, ast.Name)}
        if isinstance(node, ast.Import | ast.ImportFrom):
            defined |= {a.asname or a.name for a in node.names}
    assert name in defined, f"{file}.py imports {name} from {module}"


OVERRIDDEN_METHODS = {
    ("attention", "AmpereAttention"): "vllm.models.deepseek_v41.attention:DeepseekV4Attention",
    (
        "attention",
        "AmpereSWAMetadataBuilder",
    ): "vllm.v1.attention.backends.mla.sparse_swa:DeepseekSparseSWAMetadataBuilder",
    ("indexer", "AmpereIndexer"): "vllm.models.deepseek_v41.attention:DeepseekV4Indexer",
    ("indexer", "AmpereSparseAttnIndexer"): "vllm.model_executor.layers.sparse_attn_indexer:SparseAttnIndexer",
    ("model", "DeepseekV41ForCausalLM"): "vllm.models.deepseek_v41.nvidia.vl_model:DeepseekV41ForCausalLM",
    ("model", "DSparkDeepseekV4ForCausalLM"): "vllm.models.deepseek_v41.nvidia.dspark:DSparkDeepseekV4ForCausalLM",
}
OURS = {
    "_decode",
    "_prefill",
    "_topk_width",
    "_max_gathered_rows",
    "_prefill_workspace",
    "_select",
    "_key_workspace",
    "_reserve",
    "DSparkDeepseekV4ForCausalLM.process_weights_after_loading",
}


@pytest.mark.parametrize(("file", "name"), OVERRIDDEN_METHODS)
def test_overridden_methods_keep_vllms_parameters(file, name):
    module, _, base = OVERRIDDEN_METHODS[file, name].partition(":")
    tree = ast.parse((PLUGIN / f"{file}.py").read_text())
    ours = next(node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == name)
    for method in (node for node in ours.body if isinstance(node, ast.FunctionDef)):
        if {method.name, f"{name}.{method.name}"} & OURS:
            continue
        if method.args.kwarg or method.name == "supports_compute_capability":
            continue
        theirs = source.parameters(module, f"{base}.{method.name}")
        assert tuple(a.arg for a in (*method.args.args, *method.args.kwonlyargs)) == theirs, f"{name}.{method.name}"


def test_the_loader_calls_the_models_hook_at_the_end_of_every_start():
    loader = "vllm.model_executor.model_loader"
    ends = ast.unparse(source.definition(f"{loader}.base_loader", "BaseModelLoader.load_model"))
    assert "process_weights_after_loading(model, model_config, target_device)" in ends
    hook = ast.unparse(source.definition(f"{loader}.utils", "process_weights_after_loading")).split()
    call = "if hasattr(model, 'process_weights_after_loading'): model.process_weights_after_loading()"
    assert call in " ".join(hook)


def test_architecture_strings_are_vllms_own():
    registry = ast.unparse(source.module("vllm.model_executor.models.registry"))
    for architecture in ARCHITECTURES:
        assert f"'{architecture}'" in registry


def fake_vllm(monkeypatch, function):
    target, replacement = types.ModuleType("fake_target"), types.ModuleType("fake_replacement")
    target.pick, replacement.pick = function, lambda config: "ours"
    monkeypatch.setitem(sys.modules, "fake_target", target)
    monkeypatch.setitem(sys.modules, "fake_replacement", replacement)
    monkeypatch.setattr(overrides, "_originals", {})
    override = Override("fake_target", "pick", ("config",), "fake_replacement:pick", "a test", "never")
    monkeypatch.setattr(overrides, "OVERRIDES", (override,))
    return target


def test_apply_replaces_once_and_keeps_the_original(monkeypatch):
    target = fake_vllm(monkeypatch, lambda config: "theirs")
    overrides.apply_overrides()
    overrides.apply_overrides()
    assert target.pick(None) == "ours"
    assert overrides.original("fake_target.pick")(None) == "theirs"


@pytest.mark.parametrize(
    ("function", "found"),
    [(lambda config, more: None, "(config, more)"), (None, "no such name")],
    ids=["changed", "gone"],
)
def test_a_changed_vllm_is_refused_and_left_alone(monkeypatch, function, found):
    target = fake_vllm(monkeypatch, function)
    with pytest.raises(OverrideTargetError, match=r"fake_target\.pick.*expected parameters \(config\)") as caught:
        overrides.apply_overrides()
    assert found in str(caught.value)
    assert target.pick is function
    assert inspect.ismodule(target)


def test_a_replacement_that_cannot_be_imported_replaces_nothing(monkeypatch):
    target = fake_vllm(monkeypatch, lambda config: "theirs")
    target.other = lambda config: "theirs"
    second = Override("fake_target", "other", ("config",), "no_such_module:other", "a test", "never")
    monkeypatch.setattr(overrides, "OVERRIDES", (*overrides.OVERRIDES, second))
    for _ in range(2):
        with pytest.raises(ModuleNotFoundError, match="no_such_module"):
            overrides.apply_overrides()
        assert target.pick(None) == "theirs"


def test_stock_vllm_has_no_path_on_any_8x_gpu():
    """So nothing is taken away where the plugin acts, 8.9 included: what FlashMLA and DeepGEMM have code for."""
    for module, name, families in (
        ("vllm.v1.attention.ops.flashmla", "is_flashmla_sparse_supported", {90, 100}),
        ("vllm.platforms.cuda", "CudaPlatformBase.support_deep_gemm", {90, 100, 120}),
    ):
        constants = [n.value for n in ast.walk(source.definition(module, name)) if isinstance(n, ast.Constant)]
        assert {value for value in constants if type(value) is int} == families
