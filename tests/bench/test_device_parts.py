"""What a GPU run is made of, as far as it can be checked without one: the dot, the copies, the padding."""

import contextlib
import json
import os
import subprocess
import sys
from collections import namedtuple
from types import SimpleNamespace

import pytest
import torch

from deepinfer_sm80.bench import ceilings, cuda_driver, gpu, occupancy
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


COMPILE = """
import json, triton
from dataclasses import asdict
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from deepinfer_sm80.bench import occupancy
from deepinfer_sm80.bench.ceilings import dot_variants
from deepinfer_sm80.ops.resources import compile_variant
found = [asdict(compile_variant(v, c)) for v in dot_variants() for c in ((8, 0), (8, 6))]
v = next(dot_variants())
signature = {**v.arguments, **dict.fromkeys(v.constants, "constexpr")}
source = ASTSource(fn=v.function(), signature=signature, constexprs=dict(v.constants), attrs={})
kernel = triton.compile(source, target=GPUTarget("cuda", 80, 32))
occupancy._replace_shared(kernel, 123_392)
print(json.dumps([found, kernel.metadata.shared, list(kernel.packed_metadata)]))
"""


@pytest.mark.slow
def test_the_dot_compiles_for_ampere_and_a_compiled_kernel_can_be_padded():
    """About 10 s: it fits, does not spill, holds no instruction of a newer GPU; a launch would ask for what is said."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)
    done = subprocess.run([sys.executable, "-c", COMPILE], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-800:]
    found, shared, packed = json.loads(done.stdout)
    assert len(found) == 6
    assert all(r["ctas_per_sm"] >= 1 and r["spill_bytes"] == 0 and not r["foreign"] for r in found)
    assert shared == 123_392
    assert 123_392 in packed


@pytest.mark.parametrize("ctas", [1, 2, 3, 7, 16, 31])
@pytest.mark.parametrize("sm", [HOPPER, LIMITS[8, 6]])
def test_padding_lets_exactly_so_many_ctas_in(ctas, sm):
    padded = occupancy.padded_bytes(128, ctas, sm)
    assert sm.ctas_that_fit(padded, 16, 1) == min(ctas, sm.ctas_per_sm)


def test_padding_never_takes_memory_away():
    assert occupancy.padded_bytes(70_000, 3, HOPPER) >= 70_000
    assert occupancy.padded_bytes(200_000, 2, HOPPER) == 200_000


def compiled_kernel(shared, registers):
    target = namedtuple("Target", "backend arch warp_size")("cuda", 80, 32)
    made = namedtuple("Metadata", "num_warps num_ctas shared target")(4, 1, shared, target)
    kernel = SimpleNamespace(metadata=made, packed_metadata=(4, 1, shared), module="loaded", function="f", _run="r")
    kernel.asm = {"ptx": ".target sm_80"}
    kernel._init_handles = lambda: setattr(kernel, "n_regs", registers)
    return kernel


@pytest.mark.parametrize(
    ("shared", "registers", "here", "ctas"),
    [
        (50_176, 32, 32, 3),  # shared memory: four here, three there
        (0, 32, 32, None),
        (82_816, 32, 32, None),  # two on both
        (1_024, 80, 64, 6),  # registers: eight here, six there
    ],
)
def test_a_launch_asks_for_more_where_this_gpu_would_hold_more(shared, registers, here, ctas, monkeypatch):
    kernel = compiled_kernel(shared, here)
    monkeypatch.setattr(resources, "assemble", lambda ptx, arch: (0, 0, registers) if arch == 80 else None)
    monkeypatch.setattr(warmup, "compile_variant", lambda variant: kernel)
    assert occupancy.limit(VARIANT, (8, 0), HOPPER) is bool(ctas)
    if ctas:
        assert kernel.metadata.shared > shared
        assert kernel.packed_metadata == (4, 1, kernel.metadata.shared)
        assert HOPPER.ctas_that_fit(kernel.metadata.shared, here, 4) == ctas
        assert kernel.module is None
        assert kernel._run is None, "loaded again, with the larger limit"
    else:
        assert kernel.packed_metadata == (4, 1, shared)
        assert kernel.module == "loaded"


class Driver:
    """Answers as NVIDIA's library does: 0 for success, results through pointers."""

    nodes = (0, 0, 1, 5, 2, 3)  # two kernels, a copy, an empty node, a fill, a host call

    def __init__(self, code=0):
        self.code = code

    def cuGraphGetNodes(self, graph, nodes, count):
        assert graph.value == 77
        if nodes is not None:
            nodes[:] = range(1, 1 + len(self.nodes))
        count._obj.value = len(self.nodes)
        return self.code

    def cuGraphNodeGetType(self, node, kind):
        kind._obj.value = self.nodes[node.value - 1]
        return self.code


def test_launches_are_the_nodes_that_put_work_on_the_device(monkeypatch):
    monkeypatch.setattr(cuda_driver, "_library", Driver)
    assert cuda_driver.work_nodes(77) == 4
    monkeypatch.setattr(cuda_driver, "_library", lambda: Driver(code=201))
    with pytest.raises(OSError, match="cuGraphGetNodes: CUDA driver error 201"):
        cuda_driver.work_nodes(77)


class Graph:
    """Replays what was called while it was captured; one kernel and one copy a call."""

    def __init__(self, keep_graph):
        assert keep_graph, "its nodes are asked for"

    def raw_cuda_graph(self):
        return 77

    def replay(self):
        LOG.append("replay")


LOG = []


class Event:
    """Of a clock that moves by 2 ms a replay and by 5 ms a call."""

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        self.at = 2.0 * LOG.count("replay") + 5.0 * LOG.count("call")

    def elapsed_time(self, other):
        return other.at - self.at


@pytest.fixture
def device(monkeypatch):
    """The CUDA device with torch's CUDA functions replaced."""
    LOG.clear()
    found = SimpleNamespace(name="NVIDIA Test", multi_processor_count=4, L2_cache_size=1 << 10, major=9, minor=0)
    found.shared_memory_per_block_optin, found.shared_memory_per_multiprocessor = 232_448, 233_472
    found.max_threads_per_multi_processor, found.regs_per_multiprocessor = 2048, 65_536
    replaced = {
        "get_device_properties": lambda _: found,
        "synchronize": lambda: LOG.append("wait"),
        "empty_cache": lambda: None,
        "mem_get_info": lambda: (1000, 2000),
        "CUDAGraph": Graph,
        "graph": lambda graph: contextlib.nullcontext(),
        "Event": Event,
        "_sleep": lambda cycles: LOG.append(f"sleep {cycles > 0}"),
    }
    for name, value in replaced.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(gpu.CudaDevice, "kind", "cpu")
    monkeypatch.setattr(cuda_driver, "work_nodes", lambda graph: 8)
    return gpu.CudaDevice()


def call(value):
    def made():
        LOG.append("call")
        return value

    return made


def test_a_graph_is_timed_behind_a_swept_cache_and_a_head_start(device, monkeypatch):
    sums = []
    monkeypatch.setattr(torch, "sum", lambda swept, *_, **__: sums.append(swept.nbytes))
    timed = device.capture([call("first"), call("between"), call("last")])
    assert timed.results == ("first", "last")
    assert timed.launches == pytest.approx(8 / 3)
    LOG.clear()
    assert timed.elapsed_us() == pytest.approx(2000.0)
    assert LOG == ["wait", "sleep True", "replay", "wait"]
    assert sums == [4 << 10], "four times the L2 cache"


def test_eager_calls_have_no_head_start_and_need_no_graph(device, monkeypatch):
    def refuse(graph):
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(torch.cuda, "graph", refuse)
    timed = device.eager([call("first"), call("last")])
    assert timed.results == ("first", "last")
    assert timed.launches is None
    LOG.clear()
    assert timed.elapsed_us() == pytest.approx(10_000.0)
    assert LOG == ["wait", "call", "call", "wait"]


def test_the_device_says_what_it_has(device, monkeypatch):
    assert (device.capability, device.sms, device.free_bytes()) == ((9, 0), 4, 400)
    assert device.alive()

    def lost():
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "synchronize", lost)
    assert not device.alive()


def test_kernels_are_compiled_before_and_one_that_is_not_says_so(device, monkeypatch):
    compiled = []
    monkeypatch.setattr(
        warmup, "Warmup", lambda chosen: SimpleNamespace(wait=lambda: (compiled.extend(chosen) or len(chosen), 1.25))
    )
    assert device.prepare(["mhc_post"]) == f"{len(compiled)} kernels compiled in 1.2 s"
    assert {variant.op for variant in compiled} == {"mhc_post"}

    def fail(chosen):
        raise ValueError("type fp8e4nv not supported")

    monkeypatch.setattr(warmup, "Warmup", fail)
    assert device.prepare(["mhc_post"]) == "not every kernel compiles: ValueError: type fp8e4nv not supported"
