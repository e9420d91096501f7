"""A question that torch does not answer, put to NVIDIA's driver library: what a captured graph holds."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

_WORK = {0, 1, 2}
"""Of CUgraphNodeType: kernel, copy, fill. Others (empty, events, host) put nothing on the device."""


@cache
def _library() -> Any:
    return ctypes.CDLL("libcuda.so.1")


def _succeed(code: int, what: str) -> None:
    if code != 0:
        raise OSError(f"{what}: CUDA driver error {code}")


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
