"""What the loader leaves out, with vLLM's own filter code and a stand-in for its process groups."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
import sys
import types
from pathlib import Path

import pytest

_spec = importlib.util.spec_from_file_location("vllm_source", Path(__file__).with_name("vllm_source.py"))
source = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(source)

FILTER = "vllm.model_executor.model_loader.ep_weight_filter"
LOADER = "vllm.model_executor.model_loader.default_loader"
STATE = "vllm.distributed.parallel_state"
EXPERT = "layers.7.ffn.experts.{}.w1.{}"


@pytest.fixture
def left_out(monkeypatch):
    """The function under test, for rank 1 of 4."""
    monkeypatch.setitem(sys.modules, "regex", re)
    modules = {name: types.ModuleType(name) for name in (FILTER, STATE)}
    exec(ast.unparse(source.module(FILTER)), modules[FILTER].__dict__)
    modules[STATE].get_ep_group = lambda: types.SimpleNamespace(world_size=4, rank_in_group=1)
    for name in ("vllm", "vllm.distributed", "vllm.model_executor", "vllm.model_executor.model_loader"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    target = "deepinfer_sm80.vllm_plugin.expert_filter"
    monkeypatch.delitem(sys.modules, target, raising=False)
    yield importlib.import_module(target).left_out_on_this_rank
    sys.modules.pop(target, None)


def configuration(ep=True, weight_filter=True, eplb=False):
    return types.SimpleNamespace(
        parallel_config=types.SimpleNamespace(
            enable_expert_parallel=ep, enable_ep_weight_filter=weight_filter, enable_eplb=eplb
        ),
        model_config=types.SimpleNamespace(get_num_experts=lambda: 384),
    )


def test_weights_of_other_ranks_experts_and_nothing_else(left_out):
    skips = left_out(configuration())
    assert [e for e in range(384) if not skips(EXPERT.format(e, "weight"))] == list(range(96, 192))
    assert not any(skips(EXPERT.format(e, "scale")) for e in range(384))
    assert not skips("layers.7.ffn.shared_experts.w1.weight")


@pytest.mark.parametrize("off", [{"ep": False}, {"weight_filter": False}, {"eplb": True}], ids=str)
def test_nothing_is_left_out_without_the_filter(left_out, off):
    skips = left_out(configuration(**off))
    assert not any(skips(EXPERT.format(e, "weight")) for e in range(384))


def test_the_loader_asks_the_same_questions():
    text = ast.unparse(source.definition(LOADER, "DefaultModelLoader._init_ep_weight_filter"))
    for question in (
        "parallel_config.enable_expert_parallel and parallel_config.enable_ep_weight_filter",
        "if parallel_config.enable_eplb:",
        "model_config.get_num_experts()",
    ):
        assert question in text
