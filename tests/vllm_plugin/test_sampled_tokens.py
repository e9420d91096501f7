"""The broadcast of sampled tokens is ordered against the stream in use, not the one of the handler's construction."""

import ast
import importlib.util
from pathlib import Path
from types import SimpleNamespace

import pytest

from deepinfer_sm80.vllm_plugin import overrides, sampled_tokens

_spec = importlib.util.spec_from_file_location("vllm_source", Path(__file__).with_name("vllm_source.py"))
source = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(source)

CALLS = {
    "receive": ("batch", True),
    "broadcast": ("tokens", "sampled", "rejected", "batch"),
    "broadcast_drafts": ("drafts",),
    "get_prev_sampled_outputs": (),
}


@pytest.mark.parametrize("name", CALLS)
def test_the_stream_in_use_is_the_one_that_is_waited_for(name, monkeypatch):
    seen = []

    def vllms(self, *given):
        seen.append((self.main_stream, given))
        return {"sampled_tokens": 7} if name == "get_prev_sampled_outputs" else True

    monkeypatch.setitem(overrides._originals, f"vllm.v1.worker.gpu.pp_utils.PPHandler.{name}", vllms)
    monkeypatch.setattr("torch.cuda.current_stream", lambda device: f"stream in use on {device}")
    handler = SimpleNamespace(main_stream="stream when it was built", device="cuda:1")
    found = getattr(sampled_tokens, name)(handler, *CALLS[name])
    assert seen == [("stream in use on cuda:1", CALLS[name])]
    assert found == {"receive": True, "get_prev_sampled_outputs": {"sampled_tokens": 7}}.get(name)


def test_every_method_that_uses_the_stream_is_replaced():
    handler = source.definition("vllm.v1.worker.gpu.pp_utils", "PPHandler")
    using = {
        method.name
        for method in handler.body
        if isinstance(method, ast.FunctionDef)
        and any(isinstance(node, ast.Attribute) and node.attr == "main_stream" for node in ast.walk(method))
    }
    assert using - {"__init__"} == set(CALLS)
    assert {o.target.rpartition(".")[2] for o in overrides.OVERRIDES if "PPHandler" in o.target} == set(CALLS)
