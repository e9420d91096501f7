"""What an operator is compared with. Imports of other packages happen here, late, and say why they did not succeed.

``ours`` is the kernel that serves; ``pytorch`` and ``pytorch-graph`` our vectorised form, eager and captured;
``unfused`` the textbook chain of ``unfused.py``; ``vllm`` vLLM 0.33.0's own kernel compiled as for the lowering,
``vllm-native`` the same as the GPU would have it; ``flashmla`` the attention of vLLM's FlashMLA extension.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib import import_module
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from deepinfer_sm80 import ops
from deepinfer_sm80.bench.unfused import CHAINS

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

FLASHMLA_FUNCTIONS = ("flash_mla_with_kvcache", "flash_mla_sparse_fwd", "get_mla_metadata")
PROVIDERS = ("ours", "pytorch", "pytorch-graph", "unfused", "vllm", "vllm-native", "flashmla")


@dataclass(frozen=True, slots=True)
class Arm:
    """One implementation under test. ``prepare(kwargs)`` returns the call: views and plans are made before timing.

    ``graphed``: timed as replays of a graph. ``eager_too``: its eager time is recorded in the same row.
    """

    provider: str
    prepare: Callable[[dict[str, Any]], Callable[[], Any]]
    graphed: bool = True
    eager_too: bool = False


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A provider that does not take part, and why."""

    provider: str
    reason: str


def arms(op: str, lowering: str, native_is_ampere: bool) -> tuple[list[Arm], list[LeftOut]]:
    """The implementations of ``op`` that can run here, ours first, and those that cannot.

    ``lowering``: sm80, sm86 or native. ``native_is_ampere``: the GPU itself is of that capability.
    """
    kernel = ops.kernel(op)
    found = [Arm("ours", _plain(kernel or ops.pytorch(op)))]
    left: list[LeftOut] = []
    if kernel is not None:
        found += [Arm("pytorch", _plain(ops.pytorch(op)), graphed=False), Arm("pytorch-graph", _plain(ops.pytorch(op)))]
    if op in CHAINS:
        found.append(Arm("unfused", _plain(CHAINS[op]), eager_too=True))
    else:
        left.append(LeftOut("unfused", "no chain is defined for this operator"))
    vllm = "vllm" if lowering != "native" or native_is_ampere else "vllm-native"
    for provider, adapters in ((vllm, _VLLM), ("flashmla", _FLASHMLA)):
        try:
            if op in adapters:
                found.append(Arm(provider, adapters[op]()))
            else:
                left.append(LeftOut(provider, "it has no kernel of this shape, or no adapter is written"))
        except Exception as error:  # an extension that cannot load raises whatever it likes
            left.append(LeftOut(provider, f"{type(error).__name__}: {error}"))
    return found, left


def _plain(function: Callable[..., Any]) -> Callable[[dict[str, Any]], Callable[[], Any]]:
    return lambda kwargs: lambda: function(**kwargs)


def _positional(module: str, name: str) -> Callable[[], Callable[[dict[str, Any]], Callable[[], Any]]]:
    """An adapter for a function that takes our arguments in our order."""

    def load() -> Callable[[dict[str, Any]], Callable[[], Any]]:
        function = getattr(import_module(module), name)
        return lambda kwargs: lambda: function(*kwargs.values())

    return load


@cache
def flashmla() -> SimpleNamespace:
    """vLLM's FlashMLA functions, or raises ImportError.

    Asked for before another lowering is entered, which may put refusals in their place.
    """
    module = import_module("vllm.v1.attention.ops.flashmla")
    available, reason = module._is_flashmla_available()
    if not available:
        raise ImportError(reason)
    return SimpleNamespace(**{name: getattr(module, name) for name in FLASHMLA_FUNCTIONS})


def _flashmla_decode() -> Callable[[dict[str, Any]], Callable[[], Any]]:
    module = flashmla()

    def prepare(kwargs: dict[str, Any]) -> Callable[[], Any]:
        extra = kwargs.get("extra_k_cache")
        fixed = {
            "q": kwargs["q"].unsqueeze(1),
            "k_cache": kwargs["swa_k_cache"].unsqueeze(-2),
            "block_table": None,
            "cache_seqlens": None,
            "head_dim_v": kwargs["q"].shape[-1],
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


def _flashmla_prefill() -> Callable[[dict[str, Any]], Callable[[], Any]]:
    module = flashmla()

    def prepare(kwargs: dict[str, Any]) -> Callable[[], Any]:
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


_CACHE_OPERATIONS = "vllm.models.deepseek_v41.common.ops.cache_utils"
_VLLM = {
    "combine_topk_swa_indices": _positional(_CACHE_OPERATIONS, "combine_topk_swa_indices"),
    "global_topk_indices": _positional(_CACHE_OPERATIONS, "compute_global_topk_indices_and_lens"),
    "dequantize_and_gather_k_cache": _positional(_CACHE_OPERATIONS, "dequantize_and_gather_k_cache"),
    "mhc_post": _positional("vllm.model_executor.kernels.mhc.tilelang", "mhc_post_tilelang"),
}
_FLASHMLA = {"sparse_mla_decode": _flashmla_decode, "sparse_mla_prefill": _flashmla_prefill}
