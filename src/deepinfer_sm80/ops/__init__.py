"""The operators, in forward-pass order: ``from deepinfer_sm80.ops import mhc_post``.

``ops/<family>/<op>/`` is one operator's room: ``reference.py`` (the spec: equation, cases,
tolerance, cost), ``launch.py`` (checks, picks a configuration, allocates, launches), ``device.py``
(device code) and ``tuning.py`` (numbers with their measurement). What the shared contract cannot
say is in ``tests/ops/<family>/test_<op>.py``. Nothing heavy is imported here.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from deepinfer_sm80.errors import UnknownOpError

if TYPE_CHECKING:
    from collections.abc import Callable

    from deepinfer_sm80.ops.contract import OpSpec

OPS: dict[str, str] = {
    "engram_lookup": "engram",
    "mhc_post": "mhc",
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


def launcher(op: str) -> Callable[..., Any]:
    """Return the Ampere implementation of ``op``; same signature as its reference."""
    fn: Callable[..., Any] = getattr(import_module(f"{_room(op)}.launch"), op)
    return fn


def __getattr__(name: str) -> Callable[..., Any]:
    if name not in OPS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return launcher(name)


def _room(op: str) -> str:
    if op not in OPS:
        raise UnknownOpError(op=op, known=", ".join(OPS))
    return f"{__name__}.{OPS[op]}.{op}"
