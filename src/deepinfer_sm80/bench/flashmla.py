"""The sparse attention of vLLM's FlashMLA extension behind our operators' arguments; imported late, as ``adapters``."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from deepinfer_sm80.ops.kv_cache.layout import HEAD_DIM

if TYPE_CHECKING:
    import torch

    from deepinfer_sm80.bench.adapters import Adapter, Call, Prepare

FUNCTIONS = ("flash_mla_with_kvcache", "flash_mla_sparse_fwd", "get_mla_metadata")


@cache
def functions() -> SimpleNamespace:
    """vLLM's FlashMLA functions, or raises ImportError.

    Asked for before another lowering is entered, which may put refusals in their place.
    """
    module = import_module("vllm.v1.attention.ops.flashmla")
    available, reason = module._is_flashmla_available()
    if not available:
        raise ImportError(reason)
    return SimpleNamespace(**{name: getattr(module, name) for name in FUNCTIONS})


def _decode() -> Prepare:
    module = functions()

    def prepare(kwargs: dict[str, Any]) -> Call:
        extra = kwargs.get("extra_k_cache")
        fixed = {
            "q": kwargs["q"].unsqueeze(1),
            "k_cache": kwargs["swa_k_cache"].unsqueeze(-2),
            "block_table": None,
            "cache_seqlens": None,
            "head_dim_v": HEAD_DIM,
            "tile_scheduler_metadata": module.get_mla_metadata()[0],
            "softmax_scale": kwargs["softmax_scale"],
            "is_fp8_kvcache": True,
            "indices": kwargs["swa_indices"].unsqueeze(1),
            "topk_length": kwargs["swa_lens"],
            "attn_sink": kwargs["attn_sink"],
        }
        if extra is not None:
            fixed |= {
                "extra_k_cache": extra.unsqueeze(-2),
                "extra_indices_in_kvcache": kwargs["extra_indices"].unsqueeze(1),
                "extra_topk_length": kwargs["extra_lens"],
            }

        def call() -> torch.Tensor:
            found: torch.Tensor = module.flash_mla_with_kvcache(**fixed)[0]
            return found.squeeze(1)

        call()  # its scheduler's plan is made by the first call and serves every layer of a step
        return call

    return prepare


def _prefill() -> Prepare:
    module = functions()

    def prepare(kwargs: dict[str, Any]) -> Call:
        keys, indices = kwargs["kv"].unsqueeze(1), kwargs["indices"].unsqueeze(1)
        return lambda: module.flash_mla_sparse_fwd(
            q=kwargs["q"],
            kv=keys,
            indices=indices,
            sm_scale=kwargs["softmax_scale"],
            attn_sink=kwargs["attn_sink"],
            topk_length=kwargs["lens"],
        )[0]

    return prepare


FLASHMLA: dict[str, Adapter] = {"sparse_mla_decode": _decode, "sparse_mla_prefill": _prefill}
