"""An operator is one promise with two forms: launcher and reference take the same arguments and say what they are."""

import ast
import importlib
import inspect
import re

import pytest
import torch

from deepinfer_sm80 import ops
from deepinfer_sm80.errors import TensorContractError

KEYWORD_ONLY = inspect.Parameter.KEYWORD_ONLY
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = re.compile(r"\b(bfloat16|float32|float64|uint8|int8|int32|int64|bool)\b")
SHAPE = re.compile(r"\[[^\]]*\w[^\]]*\]")


def parameters(fn):
    return inspect.signature(fn).parameters.values()


@pytest.mark.parametrize("op", ops.OPS)
def test_launcher_and_reference_take_the_same_arguments(op):
    reference, launcher = ops.spec(op).reference, ops.launcher(op)
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


@pytest.mark.parametrize("op", ops.OPS)
def test_launcher_is_documented(op):
    module = importlib.import_module(ops.launcher(op).__module__)
    assert op in (module.__doc__ or ""), f"{op}: launch.py opens without saying what it launches"


@pytest.mark.parametrize("op", ops.OPS)
def test_launcher_refuses_a_wrong_dtype_and_names_the_argument(op):
    case = max(ops.spec(op).cases(DEVICE), key=lambda c: sum(v.numel() for v in c[1].values() if torch.is_tensor(v)))[1]
    for name, value in case.items():
        if not torch.is_tensor(value):
            continue
        wrong = {**case, name: value.to(torch.complex64)}
        with pytest.raises(TensorContractError, match=rf"{op}: {name} must be .*complex64"):
            ops.launcher(op)(**wrong)


@pytest.mark.parametrize("op", ops.OPS)
def test_no_assert_and_no_host_sync_in_the_launcher(op):
    tree = ast.parse(inspect.getsource(importlib.import_module(ops.launcher(op).__module__)))
    syncs = {"item", "tolist", "cpu", "numpy", "nonzero", "synchronize", "unique", "masked_select"}
    calls = {n.func.attr for n in ast.walk(tree) if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute)}
    assert not calls & syncs, f"{op} waits for the GPU: {sorted(calls & syncs)}"
    assert not [n for n in ast.walk(tree) if isinstance(n, ast.Assert)], "raise, never assert"
