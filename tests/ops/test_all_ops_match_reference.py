"""The contract, for every operator and every case: PyTorch, and on a GPU the kernel, agrees with the reference.

Without a GPU kernels run in Triton's interpreter: each operator's own file chooses cases that fit its speed.
"""

import pytest
import torch

from deepinfer_sm80 import ops
from deepinfer_sm80.testing.agreement import stray_bytes
from deepinfer_sm80.testing.cloning import clone_arguments
from deepinfer_sm80.testing.compare import assert_agrees
from deepinfer_sm80.testing.poison import poisoned_empty

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CASES = [pytest.param(op, kwargs, id=f"{op}-{case}") for op in ops.OPS for case, kwargs in ops.spec(op).cases(DEVICE)]


@pytest.mark.parametrize(("op", "kwargs"), CASES)
@pytest.mark.parametrize("implementation", ["pytorch", "kernel"] if DEVICE == "cuda" else ["pytorch"])
def test_matches_reference(op, kwargs, implementation):
    spec, run = ops.spec(op), getattr(ops, implementation)(op)
    if run is None:
        return  # a matrix product: PyTorch is its implementation
    for_reference, for_launcher = clone_arguments(kwargs), clone_arguments(kwargs)
    with poisoned_empty():
        actual = run(**for_launcher)
    expected = spec.reference(**for_reference)
    named = list(zip(spec.outputs, _outputs(op, spec, actual), _outputs(op, spec, expected), strict=True))
    named += [(name, for_launcher[name], for_reference[name]) for name in spec.mutates]
    for name, got, want in named:
        tolerance = spec.tolerance_of(name)
        assert_agrees(f"{op}.{name}", got, want, tolerance if DEVICE == "cuda" else tolerance.interpreted())
    assert stray_bytes(op, kwargs, for_launcher, for_reference) == [], f"{op} wrote outside its results"


def _outputs(op, spec, value):
    values = () if value is None else value if isinstance(value, tuple) else (value,)
    assert len(values) == len(spec.outputs), f"{op} returned {len(values)} values, its contract names {spec.outputs}"
    return values
