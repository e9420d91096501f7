"""What is compiled while vLLM reads the weights, by how many threads, and from where on each rank begins."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
from pathlib import Path

import pytest

_spec = importlib.util.spec_from_file_location("stand_in", Path(__file__).with_name("stand_in.py"))
stand_in = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(stand_in)

Space = types.SimpleNamespace
PLUGIN = "deepinfer_sm80.vllm_plugin.kernels"


@pytest.fixture
def kernels(monkeypatch):
    """Eight variants of an operator that launches its kernel, two of one that does not; ``said`` is the log."""
    said = []
    logger = Space(info=lambda text, *values: said.append(text % values))
    stand_in.put(monkeypatch, {"vllm.logger": {"init_logger": lambda name: logger}})
    monkeypatch.delitem(sys.modules, PLUGIN, raising=False)
    module = importlib.import_module(PLUGIN)
    variants = [Space(op="mine", number=n) for n in range(8)] + [Space(op="pytorchs", number=n) for n in range(2)]
    monkeypatch.setattr(module, "all_variants", lambda: variants)
    found = {"mine": object(), "pytorchs": object()}
    launchers = {**found, "pytorchs": object()}
    monkeypatch.setattr(module, "ops", Space(launcher=launchers.get, kernel=found.get))
    monkeypatch.setattr(module, "Warmup", lambda *args, **named: (*args, named))
    monkeypatch.setattr(module.os, "cpu_count", lambda: 12)
    module.said = said
    yield module
    sys.modules.pop(PLUGIN, None)


def config(rank=0, world=1, local=1, wanted=True):
    parallel = Space(rank=rank, world_size=world, local_world_size=local)
    return Space(kernel_config=Space(enable_jit_warmup=wanted), parallel_config=parallel)


def test_only_kernels_that_are_launched_are_compiled(kernels):
    variants, workers, named = kernels.start_warmup(config())
    assert [(v.op, v.number) for v in variants] == [("mine", n) for n in range(8)]
    assert (workers, named) == (12, {"first": 0})


@pytest.mark.parametrize(
    ("rank", "world", "local", "workers", "first"), [(1, 4, 4, 3, 2), (7, 8, 4, 3, 7), (3, 16, 16, 1, 1)]
)
def test_ranks_share_the_cores_and_begin_apart(kernels, rank, world, local, workers, first):
    assert kernels.start_warmup(config(rank, world, local))[1:] == (workers, {"first": first})


def test_no_more_threads_than_sixteen(kernels, monkeypatch):
    monkeypatch.setattr(kernels.os, "cpu_count", lambda: 128)
    assert kernels.start_warmup(config())[1] == 16


def test_nothing_is_compiled_where_vllm_was_told_so(kernels):
    assert kernels.start_warmup(config(wanted=False)) is None
    kernels.finish_warmup(None)
    assert kernels.said == []


def test_the_end_says_how_long_it_took(kernels):
    kernels.finish_warmup(Space(wait=lambda: (40, 6.125)))
    assert kernels.said == ["DeepInfer-SM80: 40 Triton kernels ready in 6.1 s on 12 cores."]
