"""The contract, for every operator and every case: the launcher agrees with its reference."""

import pytest
import torch

from deepinfer_sm80 import ops
from deepinfer_sm80.testing.cloning import clone_arguments, storage_bytes
from deepinfer_sm80.testing.compare import assert_agrees
from deepinfer_sm80.testing.poison import poisoned_empty

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CASES = [pytest.param(op, kwargs, id=f"{op}-{case}") for op in ops.OPS for case, kwargs in ops.spec(op).cases(DEVICE)]


@pytest.mark.parametrize(("op", "kwargs"), CASES)
def test_matches_reference(op, kwargs):
    spec = ops.spec(op)
    for_reference, for_launcher = clone_arguments(kwargs), clone_arguments(kwargs)
    with poisoned_empty():
        actual = ops.launcher(op)(**for_launcher)
    expected = spec.reference(**for_reference)
    named = list(zip(spec.outputs, _outputs(op, spec, actual), _outputs(op, spec, expected), strict=True))
    named += [(name, for_launcher[name], for_reference[name]) for name in spec.mutates]
    for name, got, want in named:
        tolerance = spec.tolerance_of(name)
        assert_agrees(f"{op}.{name}", got, want, tolerance if DEVICE == "cuda" else tolerance.interpreted())
    for name, value in kwargs.items():
        if not isinstance(value, torch.Tensor):
            continue
        # mutated: bytes outside the view (padding of a page, rows of other owners) are nobody's to write
        before, after = storage_bytes(kwargs, name), storage_bytes(for_launcher, name)
        if name in spec.mutates:
            after, want = after.clone(), storage_bytes(for_reference, name)
            if spec.tolerance_of(name).ulps == 0:
                assert torch.equal(after, want), f"{op} wrote {name} outside what the reference writes"
        else:
            assert torch.equal(before, after), f"{op} changed its input {name}"


def _outputs(op, spec, value):
    values = () if value is None else value if isinstance(value, tuple) else (value,)
    assert len(values) == len(spec.outputs), f"{op} returned {len(values)} values, its contract names {spec.outputs}"
    return values
