"""The CUDA device that benchmarks run on: graphs, times, launches, ceilings, occupancy."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from deepinfer_sm80.bench import occupancy
from deepinfer_sm80.bench.ceilings import Ceilings, measure_ceilings
from deepinfer_sm80.hardware import Capability, Limits
from deepinfer_sm80.ops import variants

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_HEAD_START = 200_000
"""Cycles that the GPU spins before a timed replay, so that the host has handed it over before the clock starts."""


@dataclass(frozen=True, slots=True)
class Timed:
    """Calls that can be run again: ``elapsed_us()`` of all of them once; ``results`` of the first and the last."""

    elapsed_us: Callable[[], float]
    results: tuple[Any, Any]


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

    def launches(self, call: Callable[[], Any]) -> int | None:
        """What one call puts on the device: kernels, copies and fills. None where no profiler answers."""
        ...

    def ceilings(self) -> Ceilings:
        """Measured now."""
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

    def free_bytes(self) -> int:
        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info()[0]) * 2 // 5

    def capture(self, calls: Sequence[Callable[[], Any]]) -> Timed:
        calls[0]()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = [call() for call in calls]  # all alive, so that each call writes memory of its own
        return Timed(lambda: self._elapsed_us(graph.replay, head_start=True), (results[0], results[-1]))

    def eager(self, calls: Sequence[Callable[[], Any]]) -> Timed:
        results = (calls[0](), calls[-1]())

        def once() -> None:
            for call in calls:
                call()

        return Timed(lambda: self._elapsed_us(once), results)

    def launches(self, call: Callable[[], Any]) -> int | None:
        call()
        torch.cuda.synchronize()
        activities = [torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profile:
            call()
            torch.cuda.synchronize()
        events = [e for e in profile.events() or () if str(e.device_type).endswith("CUDA")]
        return sum("Sync" not in e.name for e in events) or None

    def ceilings(self) -> Ceilings:
        copied = min(max(1 << 30, 8 * self.l2_bytes), self.free_bytes() // 4)
        return measure_ceilings(lambda work: self._elapsed_us(work, head_start=True), self.kind, copied, 8192)

    def limit_occupancy(self, keys: Sequence[str], capability: Capability) -> str:
        for variant in variants.all_variants():
            if variant.key in keys and (variant.key, capability) not in self._limited:
                self._limited[variant.key, capability] = occupancy.limit(variant, capability, self._sm)
        changed = any(self._limited[key, capability] for key in keys)
        return f"sm_{capability[0]}{capability[1]}" if changed else "native"

    def _elapsed_us(self, work: Callable[[], Any], head_start: bool = False) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        if head_start:
            torch.cuda._sleep(_HEAD_START)
        begin.record()
        work()
        end.record()
        torch.cuda.synchronize()
        return float(begin.elapsed_time(end)) * 1000


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
