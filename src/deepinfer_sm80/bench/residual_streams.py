"""The two operators of the residual streams: what is timed, and vLLM's implementations behind our arguments."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from importlib import import_module
from typing import TYPE_CHECKING, Any

from deepinfer_sm80.bench.builder import BenchCase, Builder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Call = Callable[[], Any]
    Prepare = Callable[[dict[str, Any]], Call]

HIDDEN = 5120
GEOMETRY = (2, 8, 128)
"""Columns of the projection a tile, parts of the hidden size, threads: vLLM's choice below 16 tokens."""
FUSED_TOKENS = 32  # vLLM fuses post and pre up to so many
_KERNELS = "vllm.model_executor.kernels.mhc"


def mhc(tokens: int) -> BenchCase:
    def build(b: Builder) -> dict[str, Any]:
        return {
            "x": b.randn(tokens, HIDDEN).bfloat16(),
            "residual": b.randn(tokens, 4, HIDDEN).bfloat16(),
            "post_mix": b.randn(tokens, 4),
            "comb": b.randn(tokens, 4, 4),
        }

    return BenchCase("mhc_post", f"T{tokens}-H{HIDDEN}", build, quick=tokens == 8)


def mhc_fused(tokens: int) -> BenchCase:
    """The coefficients that a sublayer leaves: post up to 2, rows of the combination that sum to 1."""

    def build(b: Builder) -> dict[str, Any]:
        return {
            "x": b.randn(tokens, HIDDEN).bfloat16(),
            "residual": b.randn(tokens, 4, HIDDEN).bfloat16(),
            "post_mix": 2 * b.randn(tokens, 4).sigmoid(),
            "comb": b.randn(tokens, 4, 4).softmax(-1),
            "fn": b.pool("fn", lambda: b.randn(24, 4 * HIDDEN) * (4 * HIDDEN) ** -0.5),
            "scale": 1 + b.randn(3) / 4,
            "base": b.randn(24),
            "pre_mix": b.randn(tokens, 4).sigmoid(),
            "norm_weight": (1 + b.randn(HIDDEN) / 4).bfloat16(),
            "rms_eps": 1e-20,
            "hc_eps": 1e-6,
            "norm_eps": 1e-20,
            "sinkhorn_iters": 20,
        }

    return BenchCase("mhc_fused_post_pre_delayed", f"T{tokens}-H{HIDDEN}", build, ("fn",), tokens == 8)


def fused(geometry: tuple[int, int, int] | None = None) -> Callable[[], Prepare]:
    """vLLM's fused post and delayed pre; with ``geometry`` instead of the one that it chooses by the tokens."""

    def load() -> Prepare:
        function = import_module(f"{_KERNELS}.tilelang").mhc_fused_post_pre_delayed_tilelang
        kernels = import_module(f"{_KERNELS}.tilelang_kernels")

        def prepare(kwargs: dict[str, Any]) -> Call:
            tokens = kwargs["x"].shape[0]
            if geometry and tokens > FUSED_TOKENS:
                raise ValueError(f"vLLM fuses up to {FUSED_TOKENS} tokens, here are {tokens}")
            a, eps = kwargs, kwargs["hc_eps"]
            mixed = (a["x"], a["residual"], a["post_mix"].unsqueeze(-1), a["comb"], a["fn"], a["scale"], a["base"])
            behind = (a["rms_eps"], eps, eps, 2.0, a["sinkhorn_iters"], a["pre_mix"], a["norm_weight"], a["norm_eps"])

            def call() -> Any:
                with _choosing(kernels, geometry) if geometry else nullcontext():
                    return function(*mixed, *behind)

            return call

        return prepare

    return load


def finish(kwargs: dict[str, Any], result: Any) -> Any:
    """vLLM's results in the contract's form: post without its last axis of one, no auxiliary stream mean."""
    del kwargs
    streams, post, *others = result[:5]
    return (streams, post.squeeze(-1), *others)


@contextmanager
def _choosing(kernels: Any, geometry: tuple[int, int, int]) -> Iterator[None]:
    """vLLM's choice replaced meanwhile by ``geometry``."""
    choose = kernels.mhc_fused_post_pre_split_config
    kernels.mhc_fused_post_pre_split_config = lambda *_: geometry
    try:
        yield
    finally:
        kernels.mhc_fused_post_pre_split_config = choose
