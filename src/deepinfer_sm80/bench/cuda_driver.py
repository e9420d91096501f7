"""Two questions that torch does not answer, put to NVIDIA's driver library: what an SM holds, what a graph holds."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

ATTRIBUTES = {
    "threads_per_sm": 39,
    "smem_per_sm": 81,
    "registers_per_sm": 82,
    "smem_per_cta": 97,
    "ctas_per_sm": 106,
}
"""Numbers of CUdevice_attribute, by the field of ``hardware.Limits`` that they fill."""

_WORK = {0, 1, 2}
"""Of CUgraphNodeType: kernel, copy, fill. Others (empty, events, host) put nothing on the device."""


@cache
def _library() -> Any:
    library = ctypes.CDLL("libcuda.so.1")
    _succeed(library.cuInit(0), "cuInit")
    return library


def _succeed(code: int, what: str) -> None:
    if code != 0:
        raise OSError(f"{what}: CUDA driver error {code}")


def sm_limits(device: int = 0) -> dict[str, int]:
    """ATTRIBUTES of CUDA device ``device``. Raises OSError where the driver does not answer."""
    handle, found = ctypes.c_int(), {}
    _succeed(_library().cuDeviceGet(ctypes.byref(handle), device), "cuDeviceGet")
    for name, number in ATTRIBUTES.items():
        value = ctypes.c_int()
        _succeed(_library().cuDeviceGetAttribute(ctypes.byref(value), number, handle), f"cuDeviceGetAttribute {name}")
        found[name] = value.value
    return found


def work_nodes(graph: int) -> int:
    """Kernels, copies and fills in the graph with this handle (cudaGraph_t). Raises OSError."""
    count = ctypes.c_size_t()
    _succeed(_library().cuGraphGetNodes(ctypes.c_void_p(graph), None, ctypes.byref(count)), "cuGraphGetNodes")
    nodes = (ctypes.c_void_p * count.value)()
    _succeed(_library().cuGraphGetNodes(ctypes.c_void_p(graph), nodes, ctypes.byref(count)), "cuGraphGetNodes")
    work = 0
    for node in nodes:
        kind = ctypes.c_int()
        _succeed(_library().cuGraphNodeGetType(ctypes.c_void_p(node), ctypes.byref(kind)), "cuGraphNodeGetType")
        work += kind.value in _WORK
    return work
