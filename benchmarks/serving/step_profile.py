"""Where a step of an engine spends its time: steps one by one, and every kernel of some of them by its operator."""

from __future__ import annotations

import re
import statistics
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

WARM, STEPS, PROFILED = 8, 32, 16
CHUNK, REPEATS, PROFILED_CHUNKS = 2048, 5, 2
SLACK = 96
"""Tokens that the first requests of a batch may be ahead of the last one."""

GROUPS = (
    (r"moe.*marlin|marlin.*moe", "experts (Marlin)"),
    (r"marlin", "linear layers (Marlin)"),
    (r"mhc|hc_prenorm|hc_head|hc_collapse", "residual streams (vLLM's TileLang)"),
    (r"mqa_logits|smxx_.*logits|clean_logits", "index scores (DeepGEMM)"),
    (r"deep_gemm|sm90_.*gemm|fp8_gemm|m_grouped|einsum", "matrix products (DeepGEMM)"),
    (r"flash_?mla|sparse_attn|splitkv|get_mla_metadata", "attention (FlashMLA)"),
    (r"moe_|topkgating|grouped_topk|softplus|count_and_sort|act_and_mul|swiglu|silu|expert", "expert routing"),
    (r"engram|ngram|hash", "Engram (vLLM's)"),
    (r"rms_?norm|norm_quant|layer_?norm", "norms"),
    (r"quant|fp8|mxfp", "quantisation"),
    (r"gemm|cutlass|cublas|nvjet|xmma|gemv|splitk", "matrix products (cuBLAS)"),
    (r"topk|top_k|radix|candidate", "top-k (vLLM's)"),
    (r"argmax|softmax|sampl|gumbel|penalt|logprob|bad_words|min_p", "sampling"),
    (r"nccl|allreduce|all_reduce", "communication"),
    (r"memcpy|memset|copy_kernel|fill", "copies and fills"),
    (
        r"elementwise|vectorized|triton_poi|triton_red|triton_per|catarray|index|scatter|gather|reduce|scan|sort",
        "torch",
    ),
)
"""Patterns of kernel names, the first that is found counts. Ours are known by their whole name."""

OTHER = "other"


def our_kernels() -> dict[str, str]:
    """Name of each Triton kernel of this package -> the operators that launch it."""
    from deepinfer_sm80.ops.variants import all_variants

    found: dict[str, set[str]] = {}
    for variant in all_variants():
        found.setdefault(variant.kernel.rpartition(":")[2], set()).add(variant.op)
    return {name: ", ".join(sorted(operators)) for name, operators in found.items()}


def group_of(kernel: str, ours: dict[str, str]) -> str:
    if kernel in ours:
        return ours[kernel]
    return next((group for pattern, group in GROUPS if re.search(pattern, kernel, re.IGNORECASE)), OTHER)


def summarise(kernels: Iterable[tuple[str, float]], steps: int, ours: dict[str, str]) -> dict[str, Any]:
    """``kernels``: name and microseconds of everything that ran in ``steps`` steps."""
    times: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    names: Counter[str] = Counter()
    for name, us in kernels:
        group = group_of(name, ours)
        times[group] += us
        counts[group] += 1
        names[name] += us
    total = sum(times.values())
    return {
        "launches": round(counts.total() / steps, 1),
        "kernel_ms": round(total / steps / 1000, 4),
        "groups": {
            group: {
                "share": round(us / total, 4),
                "us": round(us / steps, 2),
                "launches": round(counts[group] / steps, 1),
            }
            for group, us in times.most_common()
        },
        "longest_kernels": {name[:160]: round(us / steps, 2) for name, us in names.most_common(25)},
    }


def profiled(work: Callable[[], None]) -> list[tuple[str, float]]:
    """Name and microseconds of every kernel, copy and fill on the GPU while ``work`` runs, those of graphs included."""
    import torch

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        work()
        torch.cuda.synchronize()
    events = [e for e in profile.events() if not getattr(e, "is_user_annotation", False)]
    on_gpu = [e for e in events if e.device_type == torch.autograd.DeviceType.CUDA]
    return [(e.name, e.time_range.elapsed_us()) for e in on_gpu if "Sync" not in e.name]


class GraphModes:
    """How vLLM ran each step: FULL, PIECEWISE or NONE (eager)."""

    def __init__(self) -> None:
        self.seen: Counter[str] = Counter()

    def install(self) -> None:
        """Wrap vLLM's model runner. Call before the engine is built."""
        from vllm.v1.worker.gpu.model_runner import GPUModelRunner

        prepare = GPUModelRunner.prepare_inputs

        def prepare_and_note(runner: Any, scheduled: Any, state: Any, descriptor: Any, *rest: Any, **named: Any) -> Any:
            self.seen[descriptor.cg_mode.name] += 1
            return prepare(runner, scheduled, state, descriptor, *rest, **named)

        GPUModelRunner.prepare_inputs = prepare_and_note

    def take(self) -> str:
        """What was seen since the last call."""
        seen = "+".join(sorted(self.seen)) or "unknown"
        self.seen.clear()
        return seen


def prompts_of(engine: Any, batch: int, length: int) -> list[list[int]]:
    """Prompts that begin at different places of the engine's text."""
    text = [token for prompt in engine.prompts for token in prompt]
    return [[text[(37 * i + j) % len(text)] for j in range(length)] for i in range(batch)]


def _start(engine: Any, prompts: list[list[int]], tokens: int, tag: str) -> None:
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    for i, ids in enumerate(prompts):
        engine.llm.llm_engine.add_request(f"{tag}-{i}", {"prompt_token_ids": ids}, params)


def decode_step(engine: Any, batch: int, context: int, modes: GraphModes, ours: dict[str, str]) -> dict[str, Any]:
    """One decode step of ``batch`` requests of about ``context`` tokens, when all of them decode."""
    import torch

    core = engine.llm.llm_engine
    _start(engine, prompts_of(engine, batch, context), WARM + STEPS + PROFILED + SLACK, f"decode-{batch}")
    begun: set[str] = set()
    while len(begun) < batch:
        begun |= {output.request_id for output in core.step() if output.outputs[0].token_ids}
    for _ in range(WARM):
        core.step()
    torch.cuda.synchronize()
    modes.take()
    start = time.perf_counter()
    for _ in range(STEPS):
        core.step()
    torch.cuda.synchronize()
    ms = 1000 * (time.perf_counter() - start) / STEPS
    graph = modes.take()

    def some_steps() -> None:
        for _ in range(PROFILED):
            core.step()

    kernels = profiled(some_steps)
    while core.has_unfinished_requests():
        core.step()
    return {"ms": round(ms, 4), "graph": graph, **summarise(kernels, PROFILED, ours)}


def prefill_chunk(engine: Any, modes: GraphModes, ours: dict[str, str]) -> dict[str, Any]:
    """A prompt of CHUNK tokens and its first token."""
    import torch

    core, prompt = engine.llm.llm_engine, prompts_of(engine, 1, CHUNK)

    def chunk(tag: str) -> None:
        _start(engine, prompt, 1, tag)
        while core.has_unfinished_requests():
            core.step()
        torch.cuda.synchronize()

    chunk("warm")
    modes.take()
    times = []
    for i in range(REPEATS):
        start = time.perf_counter()
        chunk(f"chunk-{i}")
        times.append(1000 * (time.perf_counter() - start))
    graph = modes.take()

    def some_chunks() -> None:
        for i in range(PROFILED_CHUNKS):
            chunk(f"profiled-{i}")

    found = summarise(profiled(some_chunks), PROFILED_CHUNKS, ours)
    return {"ms": round(statistics.median(times), 4), "graph": graph, **found}
