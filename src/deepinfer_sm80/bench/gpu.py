"""The CUDA device that benchmarks run on: graphs, times, launches, ceilings, occupancy."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from deepinfer_sm80.bench import cuda_driver, occupancy
from deepinfer_sm80.bench.ceilings import Ceilings, measure_ceilings
from deepinfer_sm80.hardware import Capability, Limits
from deepinfer_sm80.ops import variants, warmup

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

_CYCLES_PER_S = 2e9
"""At least as fast as any Ampere or Hopper GPU counts, so that a wait in cycles is not too short."""

_HEAD_START_S = 200e-6
"""What the GPU spins beyond the host's own time for a replay, which must be handed over before the clock starts."""

_WARM_UP_S = 0.3
"""Of matrix products before anything is timed: an idle GPU clocks down."""


@dataclass(frozen=True, slots=True)
class Timed:
    """Calls that can be run again: ``elapsed_us()`` of all of them once; ``results`` of the first and the last.

    Whatever the L2 cache held is read out of it before each time. ``launches``: what one call puts on the device,
    kernels, copies and fills, None where that cannot be told.
    """

    elapsed_us: Callable[[], float]
    results: tuple[Any, Any]
    launches: float | None = None


class Device(Protocol):
    """What a measurement needs of a device. ``kind``: torch's name of it."""

    kind: str
    name: str
    sms: int
    l2_bytes: int
    driver: str
    capability: Capability

    def free_bytes(self) -> int:
        """Memory that copies of arguments may take."""
        ...

    def capture(self, calls: Sequence[Callable[[], Any]]) -> Timed:
        """All calls as one graph."""
        ...

    def eager(self, calls: Sequence[Callable[[], Any]]) -> Timed:
        """All calls one after the other, as Python makes them."""
        ...

    def prepare(self, operators: Collection[str]) -> str:
        """Compile the kernels of ``operators``; a sentence about it."""
        ...

    def ceilings(self) -> Ceilings:
        """Measured now."""
        ...

    def alive(self) -> bool:
        """Whether it still takes work: a kernel that reads where it may not ends that for this process."""
        ...

    def limit_occupancy(self, keys: Sequence[str], capability: Capability) -> str:
        """Hold the variants with these keys to ``capability``'s CTAs per SM; its name, or native if nothing changed."""
        ...


class CudaDevice:
    """Device 0. See ``Device``."""

    kind = "cuda"

    def __init__(self) -> None:
        found: Any = torch.cuda.get_device_properties(0)
        self.name: str = found.name
        self.sms: int = found.multi_processor_count
        self.l2_bytes: int = found.L2_cache_size
        self.capability: Capability = (found.major, found.minor)
        self.driver = driver_version()
        self._sm = Limits(
            smem_per_cta=found.shared_memory_per_block_optin,
            smem_per_sm=found.shared_memory_per_multiprocessor,
            threads_per_sm=found.max_threads_per_multi_processor,
            ctas_per_sm=32,
            registers_per_sm=found.regs_per_multiprocessor,
        )
        self._limited: dict[tuple[str, Capability], bool] = {}
        self._sweep = torch.zeros(4 * self.l2_bytes // 4, dtype=torch.int32, device=self.kind)
        self._swept = torch.zeros((), dtype=torch.int64, device=self.kind)

    def free_bytes(self) -> int:
        gc.collect()
        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info()[0]) * 2 // 5

    def alive(self) -> bool:
        try:
            torch.cuda.synchronize()
        except RuntimeError:
            return False
        return True

    def capture(self, calls: Sequence[Callable[[], Any]]) -> Timed:
        calls[0]()
        graph, results = self._graph(calls)
        graph.replay()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        graph.replay()
        head_start = time.perf_counter() - begin + _HEAD_START_S
        launches = _launches(graph)
        each = launches / len(calls) if launches else None
        return Timed(lambda: self._elapsed_us(graph.replay, head_start), (results[0], results[-1]), each)

    def eager(self, calls: Sequence[Callable[[], Any]]) -> Timed:
        results = (calls[0](), calls[-1]())
        launches: float | None = None
        with contextlib.suppress(RuntimeError):  # a call that waits for the device cannot be captured
            launches = _launches(self._graph(calls[:1])[0])

        def once() -> None:
            for call in calls:
                call()

        return Timed(lambda: self._elapsed_us(once), results, launches)

    def _graph(self, calls: Sequence[Callable[[], Any]]) -> tuple[torch.cuda.CUDAGraph, list[Any]]:
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        with torch.cuda.graph(graph):
            results = [call() for call in calls]  # all alive, so that each call writes memory of its own
        return graph, results

    def prepare(self, operators: Collection[str]) -> str:
        wanted = [variant for variant in variants.all_variants() if variant.op in operators]
        try:
            count, seconds = warmup.Warmup(wanted).wait()
        except Exception as error:  # its operator will say so again; the others are worth their time
            return f"not every kernel compiles: {type(error).__name__}: {error}"
        return f"{count} kernels compiled in {seconds:.1f} s"

    def ceilings(self) -> Ceilings:
        copied = min(max(1 << 30, 8 * self.l2_bytes), self.free_bytes() // 4)
        some = torch.randn((4096, 4096), device=self.kind).bfloat16()
        begin = time.perf_counter()
        while time.perf_counter() - begin < _WARM_UP_S:
            torch.mm(some, some)
            torch.cuda.synchronize()
        return measure_ceilings(lambda work: self._elapsed_us(work, _HEAD_START_S), self.kind, copied, 8192)

    def limit_occupancy(self, keys: Sequence[str], capability: Capability) -> str:
        for variant in variants.all_variants():
            if variant.key in keys and (variant.key, capability) not in self._limited:
                self._limited[variant.key, capability] = occupancy.limit(variant, capability, self._sm)
        changed = any(self._limited[key, capability] for key in keys)
        return f"sm_{capability[0]}{capability[1]}" if changed else "native"

    def _elapsed_us(self, work: Callable[[], Any], head_start: float = 0.0) -> float:
        """Microseconds of ``work`` on the device; ``head_start``: seconds for the host to hand all of it over."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.sum(self._sweep, 0, dtype=torch.int64, out=self._swept)
        torch.cuda.synchronize()
        if head_start:
            torch.cuda._sleep(int(head_start * _CYCLES_PER_S))
        begin.record()
        work()
        end.record()
        torch.cuda.synchronize()
        return float(begin.elapsed_time(end)) * 1000


def _launches(graph: torch.cuda.CUDAGraph) -> int | None:
    try:
        return cuda_driver.work_nodes(graph.raw_cuda_graph())
    except (OSError, AttributeError, RuntimeError):  # a time without the count is worth more than none
        return None


def driver_version() -> str:
    """NVIDIA's driver release as NVML says it, "unknown" where it does not answer."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return "unknown"
    if nvml.nvmlInit_v2() != 0:
        return "unknown"
    try:
        text = ctypes.create_string_buffer(96)
        failed = nvml.nvmlSystemGetDriverVersion(text, ctypes.c_uint(96))
        return "unknown" if failed else text.value.decode()
    finally:
        nvml.nvmlShutdown()
