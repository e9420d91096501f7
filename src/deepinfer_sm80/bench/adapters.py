"""vLLM's implementations behind our operators' arguments. Its modules are imported late.

An adapter is a function without parameters that imports and returns ``prepare(kwargs) -> call``. Views, index lists
and plans that one step makes for all its layers are made by ``prepare``. Where a call leaves open what a contract
states (columns behind a length, the order of a set), ``FINISH`` brings its result into that form after the timing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch

from deepinfer_sm80.bench import residual_streams
from deepinfer_sm80.ops.kv_cache.layout import NOPE_DIM, ROPE_DIM

if TYPE_CHECKING:
    from collections.abc import Callable

    Call = Callable[[], Any]
    Prepare = Callable[[dict[str, Any]], Call]
    Adapter = Callable[[], Prepare]

_V41 = "vllm.models.deepseek_v41.common.ops"
_CACHE_OPERATIONS = f"{_V41}.cache_utils"
_TRITON_ATTENTION = "vllm.v1.attention.ops.rocm_aiter_mla_sparse"
_DEEP_GEMM = "vllm.utils.deep_gemm"


def _positional(module: str, name: str, *more: Any) -> Adapter:
    """A function that takes our arguments in our order, and ``more`` behind them."""

    def load() -> Prepare:
        function = getattr(import_module(module), name)
        return lambda kwargs: lambda: function(*kwargs.values(), *more)

    return load


def _engram() -> Prepare:
    """The launch of ``ParallelEngramEmbedding.lookup`` for a table in GPU memory."""
    kernel = import_module("vllm.models.deepseek_v41.common.engram")._engram_lookup_kernel

    def prepare(kwargs: dict[str, Any]) -> Call:
        ids, heads = kwargs["ids"], kwargs["local_heads"]
        rows, dim = ids.shape[0] * heads, kwargs["weight"].shape[1]
        weight = kwargs["weight"].view(torch.float8_e4m3fn)
        grid = min(-(-rows // 16), torch.cuda.get_device_properties(ids.device).multi_processor_count)

        def call() -> torch.Tensor:
            out = torch.empty((ids.shape[0], heads, dim), dtype=torch.bfloat16, device=ids.device)
            kernel[(grid,)](
                weight,
                kwargs["scale"],
                ids,
                ids,
                out,
                kwargs["vocab_start"],
                kwargs["vocab_end"],
                rows,
                *ids.stride(),
                HEAD_START=kwargs["head_start"],
                LOCAL_HEADS=heads,
                TOTAL_HEADS=ids.shape[1],
                DIM=dim,
                QUANT_BLOCK=dim // kwargs["scale"].shape[1],
                BLOCK_R=16,
                GRID=grid,
                SORTED=False,
                PACKED=False,
                OUT_STRIDE=out.stride(0),
                PEER_ROWS=0,
            )
            return out

        return call

    return prepare


def _select_candidate_blocks() -> Prepare:
    function = import_module("vllm.model_executor.kernels.attention.dsa.candidate_blocks").select_candidate_blocks

    def prepare(kwargs: dict[str, Any]) -> Call:
        logits, topk_blocks = kwargs["logits"], kwargs["topk_blocks"]

        def call() -> torch.Tensor:
            out = torch.empty((logits.shape[0], topk_blocks), dtype=torch.int32, device=logits.device)
            function(logits, None, kwargs["row_lens"], topk_blocks, kwargs["block_size"], out)
            return out

        return call

    return prepare


def _topk(cooperative: bool) -> Adapter:
    """As vLLM chooses: cooperative (9.0 and newer) or persistent for a decode's rows, per row for a prompt's."""

    def load() -> Prepare:
        operations = import_module("vllm._custom_ops")
        limits = import_module("vllm.model_executor.layers.indexer_topk")

        def prepare(kwargs: dict[str, Any]) -> Call:
            logits, lens, topk = kwargs["logits"], kwargs["row_lens"], kwargs["topk"]
            rows, width = logits.shape
            starts = torch.zeros_like(lens)
            workspace = torch.empty(limits.RADIX_TOPK_WORKSPACE_SIZE, dtype=torch.uint8, device=logits.device)
            few = rows <= limits.AUTO_COOPERATIVE_MAX_ROWS
            decode = torch.ops._C.cooperative_topk if cooperative else torch.ops._C.persistent_topk

            def call() -> torch.Tensor:
                out = torch.empty((rows, topk), dtype=torch.int32, device=logits.device)
                if few:
                    decode(logits, lens, out, workspace, topk, width)
                else:
                    operations.top_k_per_row_prefill(logits, starts, lens, out, rows, *logits.stride(), topk)
                return out

            return call

        return prepare

    return load


def _inverse_rope() -> Prepare:
    function = import_module("vllm.models.deepseek_v4.common.ops.fused_inv_rope_fp8_quant").fused_inv_rope_fp8_quant

    def prepare(kwargs: dict[str, Any]) -> Call:
        o, groups = kwargs["o"], kwargs["num_groups"]
        options = {"nope_dim": NOPE_DIM, "rope_dim": ROPE_DIM, "quantize": False}
        fixed = (o, kwargs["positions"], kwargs["cos_sin_cache"], groups, o.shape[1] // groups)
        return lambda: function(*fixed, **options)[0]

    return prepare


def _grouped_projection() -> Prepare:
    """vLLM's form with bfloat16 weights: one batched product in place."""
    import_module("vllm.models.deepseek_v4.nvidia.ops.o_proj")

    def prepare(kwargs: dict[str, Any]) -> Call:
        x, weight = kwargs["x"].transpose(0, 1), kwargs["weight"].transpose(1, 2)
        shape = (kwargs["x"].shape[0], weight.shape[0], weight.shape[2])

        def call() -> torch.Tensor:
            out = torch.empty(shape, dtype=x.dtype, device=x.device)
            torch.bmm(x, weight, out=out.transpose(0, 1))
            return out

        return call

    return prepare


def _logits_prefill() -> Prepare:
    function = import_module(_DEEP_GEMM).fp8_fp4_mqa_logits

    def prepare(kwargs: dict[str, Any]) -> Call:
        q = (kwargs["q_codes"].view(torch.float8_e4m3fn), None)
        k = (kwargs["k_codes"].view(torch.float8_e4m3fn), kwargs["k_scale"])
        return lambda: function(q, k, kwargs["weights"], kwargs["row_start"], kwargs["row_end"], kwargs["max_k"])

    return prepare


def _logits_paged() -> Prepare:
    module = import_module(_DEEP_GEMM)

    def prepare(kwargs: dict[str, Any]) -> Call:
        cache = kwargs["kv_cache"]
        lens = kwargs["context_lens"].unsqueeze(1)
        sms = torch.cuda.get_device_properties(cache.device).multi_processor_count
        plan = module.get_paged_mqa_logits_metadata(lens, cache.shape[1], sms)
        q = (kwargs["q_codes"].view(torch.float8_e4m3fn).unsqueeze(1), None)
        fixed = (q, cache.unsqueeze(2), kwargs["weights"], lens, kwargs["block_table"], plan, kwargs["max_context_len"])
        return lambda: module.fp8_fp4_paged_mqa_logits(*fixed)

    return prepare


def _triton_prefill() -> Prepare:
    """The Triton attention that vLLM uses on AMD: the only one it has without FlashMLA. Ragged lists made before."""
    module = import_module(_TRITON_ATTENTION)

    def prepare(kwargs: dict[str, Any]) -> Call:
        kv = kwargs["kv"]
        lists = module.build_ragged_indices_from_dense(kwargs["indices"], kwargs["lens"], kv.shape[0])
        fixed = (kwargs["q"], kv, *lists, kwargs["softmax_scale"], kwargs["attn_sink"], NOPE_DIM, ROPE_DIM)
        return lambda: module._rocm_sparse_attn_prefill_ragged_triton(*fixed)

    return prepare


def _triton_decode() -> Prepare:
    module = import_module(_TRITON_ATTENTION)

    def prepare(kwargs: dict[str, Any]) -> Call:
        def lists(prefix: str) -> tuple[torch.Tensor, ...]:
            cache = kwargs[f"{prefix}_k_cache"]
            rows = cache.shape[0] * cache.shape[1]
            slots, lens = kwargs[f"{prefix}_indices"], kwargs[f"{prefix}_lens"]
            return (cache, *module.build_ragged_indices_from_dense(slots, lens, rows))

        extra = lists("extra") if kwargs.get("extra_k_cache") is not None else ()
        fixed = (kwargs["q"], *lists("swa"), kwargs["softmax_scale"], kwargs["attn_sink"], NOPE_DIM, ROPE_DIM, *extra)
        return lambda: module._rocm_sparse_attn_decode_ragged_triton(*fixed)

    return prepare


def _ascending(kwargs: dict[str, Any], result: torch.Tensor) -> torch.Tensor:
    """A set of columns in any order as the contract writes it: ascending, then -1."""
    del kwargs
    last = torch.iinfo(torch.int32).max
    ordered = result.masked_fill(result < 0, last).sort(-1).values
    return ordered.masked_fill(ordered == last, -1)


def _closed(first: str | None, last: str) -> Callable[[dict[str, Any], torch.Tensor], torch.Tensor]:
    """-inf in the columns behind each row's length, which DeepGEMM leaves open."""

    def finish(kwargs: dict[str, Any], result: torch.Tensor) -> torch.Tensor:
        lens = kwargs[last] - kwargs[first] if first else kwargs[last]
        column = torch.arange(result.shape[1], device=result.device)
        return result.float().masked_fill(column >= lens[:, None], float("-inf"))

    return finish


def _bytes_and_weights(kwargs: dict[str, Any], result: Any) -> tuple[torch.Tensor, torch.Tensor]:
    del kwargs
    codes, weights = result
    return codes.view(torch.uint8), weights


FINISH: dict[str, Callable[[dict[str, Any], Any], Any]] = {
    "mhc_fused_post_pre_delayed": residual_streams.finish,
    "indexer_topk": _ascending,
    "select_candidate_blocks": _ascending,
    "indexer_logits_prefill": _closed("row_start", "row_end"),
    "indexer_logits_paged": _closed(None, "context_lens"),
    "indexer_q_rope_quant": _bytes_and_weights,
}

VLLM: dict[str, Adapter] = {
    "engram_lookup": _engram,
    "mhc_post": _positional("vllm.model_executor.kernels.mhc.tilelang", "mhc_post_tilelang"),
    "mhc_fused_post_pre_delayed": residual_streams.fused(),
    "rope_quant_insert": _positional(f"{_V41}.fused_compress_quant_cache", "rope_quant_insert"),
    "dequantize_and_gather_k_cache": _positional(_CACHE_OPERATIONS, "dequantize_and_gather_k_cache_triton"),
    "indexer_k_norm_rope_store": _positional(f"{_V41}.indexer_k_store", "indexer_k_norm_rope_store", False),
    "indexer_q_rope_quant": _positional(
        "vllm.models.deepseek_v4.common.ops.fused_indexer_q", "fused_indexer_q_rope_quant"
    ),
    "select_candidate_blocks": _select_candidate_blocks,
    "indexer_topk": _topk(cooperative=False),
    "global_topk_indices": _positional(_CACHE_OPERATIONS, "compute_global_topk_indices_and_lens"),
    "combine_topk_swa_indices": _positional(_CACHE_OPERATIONS, "combine_topk_swa_indices"),
    "sparse_mla_decode": _triton_decode,
    "sparse_mla_prefill": _triton_prefill,
    "inverse_rope_grouped": _inverse_rope,
    "grouped_output_projection": _grouped_projection,
}
"""On an Ampere GPU. Those of a native FP8 type do not compile there; the reason is then said."""

VLLM_NATIVE: dict[str, Adapter] = VLLM | {
    "dequantize_and_gather_k_cache": _positional(_CACHE_OPERATIONS, "dequantize_and_gather_k_cache"),
    "indexer_logits_prefill": _logits_prefill,
    "indexer_logits_paged": _logits_paged,
    "indexer_topk": _topk(cooperative=True),
}
"""On the GPU that is there: with DeepGEMM, CuTeDSL and clusters where vLLM takes them."""

GEOMETRY: dict[str, Adapter] = {"mhc_fused_post_pre_delayed": residual_streams.fused(residual_streams.GEOMETRY)}
"""vLLM's own kernel in the geometry that it takes for few tokens, whatever their number."""
