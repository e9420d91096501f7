"""The operators, in forward-pass order: ``from deepinfer_sm80.ops import mhc_post``.

``ops/<family>/<op>/`` is one operator's room: ``reference.py`` (the spec: equation, cases,
tolerance, cost), ``launch.py`` (vectorised PyTorch, any device), ``kernel.py`` (the Triton launcher:
checks, picks a configuration, allocates, launches), ``device.py`` (device code) and ``tuning.py``
(numbers with their measurement). What the shared contract cannot say is in
``tests/ops/<family>/test_<op>.py``. Nothing heavy is imported here.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from deepinfer_sm80 import envs, hardware
from deepinfer_sm80.errors import UnknownOpError

if TYPE_CHECKING:
    from collections.abc import Callable

    from deepinfer_sm80.ops.contract import OpSpec

OPS: dict[str, str] = {
    "engram_lookup": "engram",
    "mhc_post": "mhc",
    "mhc_fused_post_pre_delayed": "mhc",
    "rope_quant_insert": "kv_cache",
    "dequantize_and_gather_k_cache": "kv_cache",
    "indexer_k_norm_rope_store": "indexer",
    "indexer_q_rope_quant": "indexer",
    "indexer_logits_prefill": "indexer",
    "indexer_logits_paged": "indexer",
    "select_candidate_blocks": "indexer",
    "indexer_topk": "indexer",
    "global_topk_indices": "attention",
    "combine_topk_swa_indices": "attention",
    "sparse_mla_decode": "attention",
    "sparse_mla_prefill": "attention",
    "inverse_rope_grouped": "projection",
    "grouped_output_projection": "projection",
    "stable_expert_order": "moe",
}


def spec(op: str) -> OpSpec:
    """Return the contract of ``op``: reference, cases, tolerance and cost."""
    found: OpSpec = import_module(f"{_room(op)}.reference").SPEC
    return found


def pytorch(op: str) -> Callable[..., Any]:
    """Return ``op`` in vectorised PyTorch; same signature as its reference, any device."""
    fn: Callable[..., Any] = getattr(import_module(f"{_room(op)}.launch"), op)
    return fn


def kernel(op: str) -> Callable[..., Any] | None:
    """Return the Triton implementation of ``op``, None where PyTorch is the implementation (a matrix product)."""
    if find_spec(f"{_room(op)}.kernel") is None:
        return None
    fn: Callable[..., Any] = getattr(import_module(f"{_room(op)}.kernel"), op)
    return fn


@cache
def launcher(op: str) -> Callable[..., Any]:
    """Return what runs ``op`` in this process: Triton where torch sees a CUDA GPU, PyTorch elsewhere.

    An operator named in DEEPINFER_PYTORCH_OPERATORS stays PyTorch; read when the operator is first asked for. Raises
    UnknownOpError, EnvironmentValueError.
    """
    stays = envs.DEEPINFER_PYTORCH_OPERATORS()
    compiled = kernel(op) if hardware.torch_sees_a_gpu() and not {"all", op} & stays else None
    return compiled or pytorch(op)


def __getattr__(name: str) -> Callable[..., Any]:
    if name not in OPS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return launcher(name)


def _room(op: str) -> str:
    if op not in OPS:
        raise UnknownOpError(op=op, known=", ".join(OPS))
    return f"{__name__}.{OPS[op]}.{op}"
