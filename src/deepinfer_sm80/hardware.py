"""What an Ampere SM holds, and which GPU is in this machine. Nothing heavy is imported with this module.

Limits: CUDA C++ Programming Guide, table "Technical Specifications per Compute Capability".
"""

from __future__ import annotations

import ctypes
import os
import sys
from dataclasses import dataclass

from deepinfer_sm80.errors import UnknownArchitectureError

Capability = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Limits:
    """What one SM offers. Sizes in bytes, registers in 32-bit words."""

    smem_per_cta: int
    smem_per_sm: int
    threads_per_sm: int
    ctas_per_sm: int
    registers_per_sm: int = 65_536
    registers_per_thread: int = 255

    @property
    def warps_per_sm(self) -> int:
        return self.threads_per_sm // 32

    def ctas_that_fit(self, smem: int, registers_per_thread: int, warps: int) -> int:
        """CTAs resident on one SM; 0: the kernel does not launch.

        ``smem``: bytes of shared memory per CTA, to which CUDA adds 1,024 of its own. Registers are given out to a
        warp in blocks of 256.
        """
        if smem > self.smem_per_cta or registers_per_thread > self.registers_per_thread:
            return 0
        per_warp = -(-32 * registers_per_thread // 256) * 256
        by_registers = self.registers_per_sm // (per_warp * warps) if per_warp else self.ctas_per_sm
        return min(self.smem_per_sm // (smem + 1024), by_registers, self.warps_per_sm // warps, self.ctas_per_sm)


LIMITS: dict[Capability, Limits] = {
    (8, 0): Limits(smem_per_cta=166_912, smem_per_sm=167_936, threads_per_sm=2048, ctas_per_sm=32),
    (8, 6): Limits(smem_per_cta=101_376, smem_per_sm=102_400, threads_per_sm=1536, ctas_per_sm=16),
    (8, 7): Limits(smem_per_cta=166_912, smem_per_sm=167_936, threads_per_sm=1536, ctas_per_sm=16),
    (8, 9): Limits(smem_per_cta=101_376, smem_per_sm=102_400, threads_per_sm=1536, ctas_per_sm=24),
}
BUILT_FOR: tuple[Capability, ...] = ((8, 0), (8, 6))
"""What kernels are laid out for. Elsewhere in 8.x they compile and fit; stock vLLM 0.33.0 has no path for
DeepSeek-V4.1 on 8.7 and 8.9 either, so the plugin acts there and says that nothing has run."""


def limits(capability: Capability) -> Limits:
    """The limits of a compute capability such as (8, 0). Raises UnknownArchitectureError for one not in LIMITS."""
    if capability not in LIMITS:
        known = ", ".join(f"{major}.{minor}" for major, minor in LIMITS)
        raise UnknownArchitectureError(found=f"{capability[0]}.{capability[1]}", known=known)
    return LIMITS[capability]


def is_ampere_family(capability: Capability) -> bool:
    """True for 8.x: no native e4m3 before 8.9, and one code path serves the family."""
    return capability[0] == 8


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU of this machine. ``memory`` in bytes."""

    name: str
    capability: Capability
    memory: int


def current_capability(index: int = 0) -> Capability | None:
    """Compute capability of visible GPU ``index``, None when there is none. See ``current_gpu``."""
    gpu = current_gpu(index)
    return gpu.capability if gpu else None


def current_gpu(index: int = 0) -> Gpu | None:
    """The GPU a process here would see as ``cuda:index``, or None.

    NVML answers without a CUDA context, which a process about to fork workers must not make. Torch is asked only
    where CUDA runs already, or where NVML is absent. Like vLLM, this reads CUDA_VISIBLE_DEVICES in PCI order
    (CUDA_DEVICE_ORDER=PCI_BUS_ID); that matters only with different GPUs in one machine.
    """
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return _gpu_from_torch(index)
    visible = _visible_device(index)
    if visible is None:
        return None
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return _gpu_from_torch(index)
    return _gpu_from_nvml(nvml, visible)


def _visible_device(index: int) -> int | str | None:
    """Number or UUID of visible device ``index``. CUDA stops reading its list at the first bad entry."""
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if listed is None:
        return index
    entries = []
    for entry in (part.strip() for part in listed.split(",")):
        if not (entry.isdigit() or entry.startswith(("GPU-", "MIG-"))):
            break
        entries.append(int(entry) if entry.isdigit() else entry)
    return entries[index] if index < len(entries) else None


class _NvmlMemory(ctypes.Structure):
    _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]


def _gpu_from_nvml(nvml: ctypes.CDLL, device: int | str) -> Gpu | None:
    if nvml.nvmlInit_v2() != 0:
        return None
    try:
        handle = ctypes.c_void_p()
        if isinstance(device, int):
            found = nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(device), ctypes.byref(handle))
        else:
            found = nvml.nvmlDeviceGetHandleByUUID(device.encode(), ctypes.byref(handle))
        if found != 0:
            return None
        major, minor, name, memory = ctypes.c_int(), ctypes.c_int(), ctypes.create_string_buffer(96), _NvmlMemory()
        failed = (
            nvml.nvmlDeviceGetCudaComputeCapability(handle, ctypes.byref(major), ctypes.byref(minor)),
            nvml.nvmlDeviceGetName(handle, name, ctypes.c_uint(96)),
        )
        if any(failed):
            return None
        nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory))  # a MIG slice may refuse: memory stays 0
        return Gpu(name.value.decode(), (major.value, minor.value), memory.total)
    finally:
        nvml.nvmlShutdown()


def _gpu_from_torch(index: int) -> Gpu | None:
    try:
        import torch
    except ImportError:
        return None
    if not torch.cuda.is_available() or torch.version.hip or index >= torch.cuda.device_count():
        return None
    found = torch.cuda.get_device_properties(index)
    return Gpu(found.name, (found.major, found.minor), found.total_memory)


def torch_sees_a_gpu() -> bool:
    """Whether torch is installed and can use a CUDA GPU; CUDA is not initialised."""
    try:
        import torch
    except ImportError:
        return False
    return bool(torch.cuda.is_available())
