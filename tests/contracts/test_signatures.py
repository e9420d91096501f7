"""An operator is one promise with two forms: launcher and reference take the same arguments and say what they are."""

import ast
import importlib
import inspect
import re

import pytest
import torch

from deepinfer_sm80 import ops
from deepinfer_sm80.errors import EnvironmentValueError, TensorContractError

KEYWORD_ONLY = inspect.Parameter.KEYWORD_ONLY
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = re.compile(r"\b(bfloat16|float32|float64|uint8|int8|int32|int64|bool)\b")
SHAPE = re.compile(r"\[[^\]]*\w[^\]]*\]")


def parameters(fn):
    return inspect.signature(fn).parameters.values()


LAUNCHERS = [
    pytest.param(op, fn, id=f"{op}-{kind}")
    for op in ops.OPS
    for kind, fn in (("pytorch", ops.pytorch(op)), ("kernel", ops.kernel(op)))
    if fn is not None
]


@pytest.mark.parametrize(("op", "launcher"), LAUNCHERS)
def test_launcher_and_reference_take_the_same_arguments(op, launcher):
    reference = ops.spec(op).reference
    assert reference.__name__ == launcher.__name__ == op
    want = [(p.name, p.default) for p in parameters(reference)]
    assert not [p.name for p in parameters(reference) if p.kind is KEYWORD_ONLY], "extras belong to the launcher"
    assert [(p.name, p.default) for p in parameters(launcher) if p.kind is not KEYWORD_ONLY] == want
    extras = [p for p in parameters(launcher) if p.kind is KEYWORD_ONLY]
    assert all(p.default is not inspect.Parameter.empty for p in extras), "a keyword-only extra needs a default"
    assert {p.name for p in extras} <= {"out", "config"}


@pytest.mark.parametrize("op", ops.OPS)
def test_contract_names_real_arguments(op):
    spec = ops.spec(op)
    names = {p.name for p in parameters(spec.reference)}
    assert set(spec.mutates) <= names
    assert set(spec.tolerances) <= {*spec.outputs, *spec.mutates}
    assert spec.outputs or spec.mutates, "an operator that returns nothing and writes nothing"
    assert {p.name for p in parameters(spec.cost)} == names


@pytest.mark.parametrize("op", ops.OPS)
def test_reference_documents_every_argument(op):
    spec = ops.spec(op)
    module = inspect.getmodule(spec.reference)
    text = f"{module.__doc__}\n{spec.reference.__doc__ or ''}"
    missing = [p.name for p in parameters(spec.reference) if not re.search(rf"\b{re.escape(p.name)}\b", text)]
    assert not missing, f"{op}: the definition does not say what {missing} are"
    assert DTYPE.search(text), f"{op}: the definition names no dtype"
    assert SHAPE.search(text), f"{op}: the definition gives no shape"


@pytest.mark.parametrize(("op", "launcher"), LAUNCHERS)
def test_launcher_is_documented(op, launcher):
    module = importlib.import_module(launcher.__module__)
    assert op in (module.__doc__ or ""), f"{op}: {module.__name__} opens without saying what it launches"


@pytest.mark.parametrize(("op", "launcher"), LAUNCHERS)
def test_launcher_refuses_a_wrong_dtype_and_names_the_argument(op, launcher):
    case = max(ops.spec(op).cases(DEVICE), key=lambda c: sum(v.numel() for v in c[1].values() if torch.is_tensor(v)))[1]
    for name, value in case.items():
        if not torch.is_tensor(value):
            continue
        wrong = {**case, name: value.to(torch.complex64)}
        with pytest.raises(TensorContractError, match=rf"{op}: {name} must be .*complex64"):
            launcher(**wrong)


@pytest.mark.parametrize(("op", "launcher"), LAUNCHERS)
def test_no_assert_and_no_host_sync_in_the_launcher(op, launcher):
    tree = ast.parse(inspect.getsource(importlib.import_module(launcher.__module__)))
    syncs = {"item", "tolist", "cpu", "numpy", "nonzero", "synchronize", "unique", "masked_select"}
    calls = {n.func.attr for n in ast.walk(tree) if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute)}
    assert not calls & syncs, f"{op} waits for the GPU: {sorted(calls & syncs)}"
    assert not [n for n in ast.walk(tree) if isinstance(n, ast.Assert)], "raise, never assert"


def test_the_gpu_runs_kernels_and_a_named_operator_stays_pytorch(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("DEEPINFER_PYTORCH_OPERATORS", "indexer_topk")
    chosen = {op: ops.launcher.__wrapped__(op) for op in ops.OPS}
    assert chosen["indexer_topk"] is ops.pytorch("indexer_topk")
    assert chosen["sparse_mla_decode"] is ops.kernel("sparse_mla_decode")
    assert {op for op in ops.OPS if ops.kernel(op) is None} == {"grouped_output_projection"}
    monkeypatch.setenv("DEEPINFER_PYTORCH_OPERATORS", "all")
    assert all(ops.launcher.__wrapped__(op) is ops.pytorch(op) for op in ops.OPS)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("DEEPINFER_PYTORCH_OPERATORS")
    assert all(ops.launcher.__wrapped__(op) is ops.pytorch(op) for op in ops.OPS)


def test_a_name_that_is_no_operator_is_refused(monkeypatch):
    monkeypatch.setenv("DEEPINFER_PYTORCH_OPERATORS", "sparse_mla")
    with pytest.raises(EnvironmentValueError, match=r"DEEPINFER_PYTORCH_OPERATORS must be all, or .* got 'sparse_mla'"):
        ops.launcher.__wrapped__("mhc_post")
