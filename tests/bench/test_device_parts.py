"""What a GPU run is made of, as far as it can be checked without one: the dot, the copies, the padding."""

from collections import namedtuple
from types import SimpleNamespace

import pytest
import torch

from deepinfer_sm80.bench import ceilings, occupancy
from deepinfer_sm80.hardware import LIMITS, Limits
from deepinfer_sm80.ops import resources, warmup
from deepinfer_sm80.ops.variants import Variant

HOPPER = Limits(smem_per_cta=232_448, smem_per_sm=233_472, threads_per_sm=2048, ctas_per_sm=32)
VARIANT = Variant("mhc_post", "x", "module:kernel", {}, num_warps=4)


def test_the_dot_multiplies():
    g = torch.Generator().manual_seed(0)
    a, b = (torch.randn((256, 256), generator=g).bfloat16() for _ in range(2))
    want = a.float() @ b.float().T
    variant = next(ceilings.dot_variants())
    out = torch.full((256, 256), float("nan")).bfloat16()
    ceilings.dot(variant, a, b, out)
    assert (out.float() - want).abs().max() <= want.abs().max() * 2**-7


def test_ceilings_divide_work_by_time(monkeypatch):
    done = []
    monkeypatch.setattr(ceilings, "dot", lambda variant, a, b, out: done.append(variant.name))
    times = {"n": 0}

    def elapsed_us(work):
        work()
        times["n"] += 1
        return 50.0 if done and done[-1] == "128x256x32" else 100.0

    found = ceilings.measure_ceilings(elapsed_us, "cpu", 1000, 256)
    assert found.copy == pytest.approx(2 * 1000 / 100e-6)
    assert found.dot == pytest.approx(2 * 256**3 / 50e-6), "the best tile counts"
    assert times["n"] == 13 * 4


@pytest.mark.slow
@pytest.mark.parametrize("variant", list(ceilings.dot_variants()), ids=lambda v: v.name)
@pytest.mark.parametrize("capability", [(8, 0), (8, 6)])
def test_the_dot_compiles_for_ampere(variant, capability):
    """About 3 s a variant: it fits, does not spill and holds no instruction of a newer GPU."""
    found = resources.compile_variant(variant, capability)
    assert found.ctas_per_sm >= 1
    assert found.spill_bytes == 0
    assert not found.foreign


@pytest.mark.parametrize("ctas", [1, 2, 3, 7, 16, 31])
@pytest.mark.parametrize("sm", [HOPPER, LIMITS[8, 6]])
def test_padding_lets_exactly_so_many_ctas_in(ctas, sm):
    padded = occupancy.padded_bytes(128, ctas, sm)
    assert sm.ctas_that_fit(padded, 16, 1) == min(ctas, sm.ctas_per_sm)


def test_padding_never_takes_memory_away():
    assert occupancy.padded_bytes(70_000, 3, HOPPER) >= 70_000
    assert occupancy.padded_bytes(200_000, 2, HOPPER) == 200_000


def compiled_kernel(shared):
    target = namedtuple("Target", "backend arch warp_size")("cuda", 80, 32)
    made = namedtuple("Metadata", "num_warps num_ctas shared target")(4, 1, shared, target)
    return SimpleNamespace(metadata=made, packed_metadata=(4, 1, shared), module="loaded", function="f", _run="r")


@pytest.mark.parametrize(("shared", "ctas", "padded"), [(50_176, 3, True), (0, 16, False), (82_816, 2, False)])
def test_a_launch_asks_for_more_where_this_gpu_would_hold_more(shared, ctas, padded, monkeypatch):
    kernel = compiled_kernel(shared)
    wanted = SimpleNamespace(ctas_per_sm=ctas, registers=32)
    monkeypatch.setattr(resources, "compile_variant", lambda variant, capability: wanted)
    monkeypatch.setattr(warmup, "compile_variant", lambda variant: kernel)
    assert occupancy.limit(VARIANT, (8, 0), HOPPER) is padded
    if padded:
        assert kernel.metadata.shared > shared
        assert kernel.packed_metadata == (4, 1, kernel.metadata.shared)
        assert HOPPER.ctas_that_fit(kernel.metadata.shared, 32, 4) == ctas
        assert kernel.module is None
        assert kernel._run is None, "loaded again, with the larger limit"
    else:
        assert kernel.packed_metadata == (4, 1, shared)
        assert kernel.module == "loaded"
