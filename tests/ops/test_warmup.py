"""Warm-up compiles the closed list once, and what it compiled is what the launchers launch."""

import pytest
import torch
import triton

from deepinfer_sm80 import ops
from deepinfer_sm80.ops import warmup
from deepinfer_sm80.ops.variants import all_variants
from deepinfer_sm80.testing.cloning import clone_arguments


@pytest.mark.parametrize("first", [0, 7, 1000])
def test_every_variant_once_wherever_a_rank_begins(first, monkeypatch):
    compiled = []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: compiled.append(device))
    monkeypatch.setattr(warmup, "compile_variant", lambda variant: compiled.append(variant.key))
    listed = [v.key for v in all_variants()]
    count, seconds = warmup.Warmup(workers=1, first=first).wait()
    assert (count, compiled[::2]) == (len(listed), [3] * len(listed))
    start = first % len(listed)
    assert compiled[1::2] == listed[start:] + listed[:start]
    assert seconds > 0


def test_a_kernel_that_does_not_compile_is_not_silent(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(warmup, "compile_variant", lambda variant: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        warmup.Warmup().wait()


@pytest.mark.gpu
def test_nothing_compiles_after_warmup(monkeypatch):
    warmup.Warmup().wait()
    compiled = []
    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", lambda **kwargs: compiled.append(kwargs["key"]))
    for op in ops.OPS:
        run = ops.kernel(op)
        for _, kwargs in ops.spec(op).cases("cuda") if run else ():
            run(**clone_arguments(kwargs))
    assert compiled == []
