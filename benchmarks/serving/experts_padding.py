"""Stages of prove_ampere.py about the width of routed experts: this plugin's rounding against vLLM's.

``experts-padding``: vLLM's MoE layer at the released widths, once per rounding, on ranks of a TP4 and of a TP8 server.
Two sets of weights. ``exact``: small integers and powers of two, whose sums fp32 holds in any order, so that the two
roundings must give the same bits. ``random``: sums round, and Marlin splits them over thread blocks by the number of
columns; there the roundings may differ by less than either differs from float64.

``experts-ours``, ``experts-stock``: a whole engine on a checkpoint with experts 320 wide, which vLLM alone pads to 384;
``experts-engines`` compares them. ``experts-draft``: the same with DSpark, whose experts are narrowed too.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import statistics
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import parting
from limits import MEAN, TIE
from running import failure

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Callable, Iterator

    import torch

DEVICE = "cuda"
HIDDEN, INTERMEDIATE, EXPERTS, TOPK, LAYERS = 5120, 2304, 384, 6, 40
WIDTHS = {4: (576, 640), 8: (288, 384)}  # of a rank: in the checkpoint, as vLLM rounds
RANKS = {4: (0, 3), 8: (0, 7)}
KINDS = ("exact", "random")
TOKENS = (1, 7, 64, 1000)
JUDGED = 64  # tokens compared with float64 too
TIMED = (64, 1000)
ROUNDS = 20  # of timing, each with another routing
QUANTISATION = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [32, 32]}
ENGINE_WIDTH = 320
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def experts_padding(model: pathlib.Path, out: pathlib.Path) -> dict[str, Any]:
    """Every rank's row is written to OUT/experts-padding.rows as it comes; one that fails does not stop the others."""
    import stages
    import torch

    stages.apply_disguise()
    torch.set_default_device(DEVICE)
    journal = out / "experts-padding.rows"
    journal.write_text("")
    rows: list[dict[str, Any]] = []
    with vllm_ready(torch.device(DEVICE, 0)):
        for kind in KINDS:
            for row in kind_of_weights(kind):
                rows.append(row)
                with journal.open("a") as lines:
                    lines.write(json.dumps(row) + "\n")
    failed = [row for row in rows if not row["ok"]]
    expected = len(KINDS) * sum(map(len, RANKS.values()))
    error = "\n".join(f"{row['kind']} TP{row['tp']} rank {row['rank']}: {row}" for row in failed)
    if len(rows) != expected:
        error += f"\n{len(rows)} rows instead of {expected}"
    return {"ok": not error, "error": error, "facts": facts_of(rows), "rows": rows, **stages.facts_of_machine()}


def facts_of(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """What the page shows: of the ranks that were judged, failed ones included."""
    facts: dict[str, Any] = {}
    whole = [row for row in rows if "elements" in row]
    for tp in RANKS:
        for row in [row for row in whole if row["tp"] == tp and row["kind"] == "random"][:1]:
            facts[f"TP{tp}_columns"] = f"{row['columns']} for {row['stock_columns']}"
            facts[f"TP{tp}_saved_GiB"] = round(row["saved_GiB"], 2)
            facts[f"TP{tp}_time"] = row["time"]
    exact, random = ([row for row in whole if row["kind"] == kind] for kind in KINDS)
    if exact:
        facts["exact_differing"] = f"{sum(row['different'] for row in exact)} of {sum(r['elements'] for r in exact):,}"
    if random:
        facts["random_differing"] = f"{max(row['different'] / row['elements'] for row in random):.3%} at most"
        facts["random_difference"] = float(f"{max(row['difference'] for row in random):.3g}")
        facts["random_error"] = [float(f"{max(r[name] for r in random):.3g}") for name in ("error", "stock_error")]
    return facts


@contextlib.contextmanager
def vllm_ready(device: torch.device) -> Iterator[None]:
    """What a worker sets up before it builds a layer: a configuration, the workspace, this plugin's overrides."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.v1.worker.workspace import init_workspace_manager, reset_workspace_manager

    from deepinfer_sm80.vllm_plugin.overrides import apply_overrides

    with set_current_vllm_config(VllmConfig()):
        apply_overrides()
        init_workspace_manager(device)
        try:
            yield
        finally:
            reset_workspace_manager()


def kind_of_weights(kind: str) -> Iterator[dict[str, Any]]:
    """Both roundings on every rank of ``RANKS``: a row a rank."""
    pairs = {(tp, rank): (build("ours", tp, rank), build("stock", tp, rank)) for tp in RANKS for rank in RANKS[tp]}
    for expert in range(EXPERTS):
        weights = expert_weights(kind, expert)
        for pair in pairs.values():
            for layer in pair:
                load(layer, expert, weights)
    for (tp, rank), pair in pairs.items():
        row = {"kind": kind, "tp": tp, "rank": rank}
        try:
            for layer in pair:
                layer.quant_method.process_weights_after_loading(layer)
            yield row | judge(kind, tp, rank, *pair)
        except Exception:
            yield row | failure()


def build(rounding: str, tp: int, rank: int) -> Any:
    """vLLM's routed experts of one rank, with the quantisation method its configuration gives them."""
    import torch
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig, FusedMoEParallelConfig, RoutingMethodType
    from vllm.model_executor.layers.fused_moe.expert_map_manager import ExpertMapManager
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

    parallel = dataclasses.replace(FusedMoEParallelConfig.make_no_parallel(), tp_size=tp, tp_rank=rank)
    experts = ExpertMapManager(
        max_num_batched_tokens=max(TOKENS),
        top_k=TOPK,
        global_num_experts=EXPERTS,
        num_redundant_experts=0,
        num_expert_group=None,
        moe_parallel_config=parallel,
        placement_strategy="linear",
        enable_eplb=False,
    )
    config = FusedMoEConfig(
        num_experts=EXPERTS,
        experts_per_token=TOPK,
        hidden_dim=HIDDEN,
        intermediate_size=INTERMEDIATE,
        num_local_experts=EXPERTS,
        num_logical_experts=EXPERTS,
        activation=MoEActivation.SILU,
        device=str(torch.get_default_device()),
        routing_method=RoutingMethodType.DeepseekV4,
        moe_parallel_config=parallel,
        in_dtype=torch.bfloat16,
        max_num_tokens=max(TOKENS),
        swiglu_limit=10.0,
    )
    return RoutedExperts(
        f"layers.3.ffn.experts.{rounding}",
        torch.bfloat16,
        config,
        quantisation(rounding),
        experts,
        ckpt_gate_proj_name="w1",
        ckpt_down_proj_name="w2",
        ckpt_up_proj_name="w3",
        scoring_func="sqrtsoftplus",
        swiglu_limit=10.0,
    )


def quantisation(rounding: str) -> Any:
    """``ours``: what vLLM's registry makes once the plugin is registered; ``stock``: vLLM's own class."""
    from vllm.model_executor.layers.quantization import get_quantization_config
    from vllm.models.deepseek_v41.quant_config import DeepseekV4FP8Config

    from deepinfer_sm80.vllm_plugin import quantization

    quantization.register()
    chosen = get_quantization_config(quantization.METHOD) if rounding == "ours" else DeepseekV4FP8Config
    found = chosen.from_config(QUANTISATION)
    found.maybe_update_config("", hf_config=SimpleNamespace(model_type="deepseek_v41"))
    return found


def expert_weights(kind: str, expert: int) -> dict[str, torch.Tensor]:
    """One expert as the checkpoint has it: packed FP4 codes and a scale byte for 32 of them, whole, before cutting.

    ``exact``: gate rows are all +1 or all -1 so that the clamp makes them 10 or 0, up rows are multiples of 2, and the
    down projection then adds multiples of 2.5 below 2^21.
    """
    import torch

    random = torch.Generator(DEVICE).manual_seed(expert)

    def draw(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=random, dtype=torch.uint8, device=DEVICE)

    scales = {"exact": ((132, 133), (129, 131), (125, 130)), "random": ((120, 123), (120, 123), (119, 124))}[kind]
    shapes = ((INTERMEDIATE, HIDDEN), (INTERMEDIATE, HIDDEN), (HIDDEN, INTERMEDIATE))
    weights = {}
    for name, (rows, columns), (low, high) in zip(("w1", "w3", "w2"), shapes, scales, strict=True):
        weights[name] = draw(0, 256, rows, columns // 2)
        weights[f"{name}_scale"] = draw(low, high, rows, columns // 32)
    if kind == "exact":
        weights["w1"] = (0x22 + 0x88 * draw(0, 2, INTERMEDIATE, 1)).expand(-1, HIDDEN // 2).contiguous()
    return weights


def load(layer: Any, expert: int, weights: dict[str, torch.Tensor]) -> None:
    """Through the layer's own loader, as vLLM's model does."""
    for shard in ("w1", "w2", "w3"):
        place = "w2" if shard == "w2" else "w13"
        for suffix, name in (("weight", shard), ("weight_scale", f"{shard}_scale")):
            parameter = getattr(layer, f"{place}_{suffix}")
            parameter.weight_loader(
                parameter, weights[name], f"experts.{place}_{suffix}", shard_id=shard, expert_id=expert
            )


def judge(kind: str, tp: int, rank: int, ours: Any, stock: Any) -> dict[str, Any]:
    """Widths, memory, outputs at every size in ``TOKENS`` and, for random weights, the distance from float64."""
    import torch
    from vllm.model_executor.layers.fused_moe.oracle.mxfp4 import Mxfp4MoeBackend

    columns, stock_columns = (layer.moe_config.intermediate_size_per_partition for layer in (ours, stock))
    held, stock_held = (sum(p.nbytes for p in layer.parameters()) for layer in (ours, stock))
    row: dict[str, Any] = {
        "columns": columns,
        "stock_columns": stock_columns,
        "saved_GiB": (stock_held - held) * LAYERS / 2**30,
        "backend": [layer.quant_method.mxfp4_backend.name for layer in (ours, stock)],
        "elements": 0,
        "different": 0,
        "difference": 0.0,
    }
    for tokens in TOKENS:
        inputs = routed(kind, tokens)
        mine, theirs = run(ours, *inputs), run(stock, *inputs)
        row["elements"] += mine.numel()
        row["different"] += int((mine != theirs).sum())
        row["difference"] = max(row["difference"], distance(mine, theirs))
        row["repeats"] = row.get("repeats", True) and torch.equal(mine, run(ours, *inputs))
        if not (mine.isfinite().all() and mine.any()):
            raise AssertionError(f"{kind} TP{tp} rank {rank}, {tokens} tokens: zeros or not finite")
        if kind == "random" and tokens == JUDGED:
            truth = reference(tp, rank, *inputs)
            row["error"], row["stock_error"] = distance(mine, truth), distance(theirs, truth)
    expected = (-(-WIDTHS[tp][0] // 64) * 64, WIDTHS[tp][1])
    row["ok"] = (columns, stock_columns) == expected and row["repeats"]
    row["ok"] &= row["backend"] == [Mxfp4MoeBackend.MARLIN.name] * 2
    if kind == "exact":
        row["ok"] &= row["different"] == 0
    else:
        row["ok"] &= row["difference"] <= row["stock_error"] and row["error"] <= 1.05 * row["stock_error"]
        row["time"] = {tokens: round(time_ratio(ours, stock, tokens), 3) for tokens in TIMED}
    return row


def routed(kind: str, tokens: int, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states [T, 5120] bf16, weights [T, 6] fp32 and expert ids [T, 6] int32."""
    import torch

    random = torch.Generator(DEVICE).manual_seed(seed * 10_000 + tokens)
    if kind == "exact":
        hidden = torch.zeros(tokens, HIDDEN, device=DEVICE)
        places = torch.rand(tokens, HIDDEN, generator=random, device=DEVICE).topk(12).indices
        hidden.scatter_(1, places, torch.randint(1, 3, places.shape, generator=random, device=DEVICE).float())
    else:
        hidden = torch.randn(tokens, HIDDEN, generator=random, device=DEVICE)
    ids = torch.rand(tokens, EXPERTS, generator=random, device=DEVICE).topk(TOPK).indices.int()
    weights = torch.rand(tokens, TOPK, generator=random, device=DEVICE)
    return hidden.bfloat16(), weights / weights.sum(-1, keepdim=True), ids


def run(layer: Any, hidden: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    output: torch.Tensor = layer.quant_method.apply(layer, hidden, weights, ids, None, None)
    return output.clone()


def reference(tp: int, rank: int, hidden: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The rank's share of the experts' output in float64, nothing rounded on the way."""
    import torch

    width = INTERMEDIATE // tp
    part = slice(rank * width, (rank + 1) * width)
    x, total = hidden.double(), torch.zeros(hidden.shape, dtype=torch.float64, device=DEVICE)
    for expert in ids.unique().tolist():
        raw = expert_weights("random", expert)
        w1, w2, w3 = (dequantised(raw[name], raw[f"{name}_scale"]) for name in ("w1", "w2", "w3"))
        token, slot = (ids == expert).nonzero(as_tuple=True)
        gate, up = x[token] @ w1[part].T, x[token] @ w3[part].T
        inner = torch.nn.functional.silu(gate.clamp(max=10.0)) * up.clamp(-10.0, 10.0)
        total.index_add_(0, token, (inner @ w2[:, part].T) * weights[token, slot, None].double())
    return total


def dequantised(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    import torch

    nibbles = torch.stack((codes & 15, codes >> 4), -1).flatten(-2)
    table = torch.tensor((*E2M1, *(-value for value in E2M1)), dtype=torch.float64, device=codes.device)
    return table[nibbles.int()] * torch.exp2(scales.double() - 127).repeat_interleave(32, -1)


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """RMS of the difference over the RMS of ``b``."""
    return float((a.double() - b.double()).norm() / b.double().norm())


def time_ratio(ours: Any, stock: Any, tokens: int) -> float:
    """Median time of ``ours`` over that of ``stock``, with another routing in every round."""
    import torch

    times: dict[str, list[float]] = {"ours": [], "stock": []}
    for seed in range(2, 2 + ROUNDS):
        inputs = routed("random", tokens, seed)
        for name, layer in (("ours", ours), ("stock", stock)):
            events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            run(layer, *inputs)
            events[0].record()
            for _ in range(5):
                run(layer, *inputs)
            events[1].record()
            torch.cuda.synchronize()
            times[name].append(events[0].elapsed_time(events[1]))
    return statistics.median(times["ours"]) / statistics.median(times["stock"])


@contextlib.contextmanager
def noted_widths(rounding: str) -> Iterator[list[int]]:
    """The columns of every expert layer that is built meanwhile; ``stock``: the plugin's method rounds as vLLM's."""
    from deepinfer_sm80.vllm_plugin.expert_padding import AmpereMxfp4MoEMethod

    original: Callable[..., tuple[int, int]] = AmpereMxfp4MoEMethod.maybe_roundup_sizes
    parent: Callable[..., tuple[int, int]] = AmpereMxfp4MoEMethod.__mro__[1].maybe_roundup_sizes
    widths: list[int] = []

    def note(method: Any, *args: Any, **named: Any) -> tuple[int, int]:
        sizes = (original if rounding == "ours" else parent)(method, *args, **named)
        widths.append(sizes[1])
        return sizes

    AmpereMxfp4MoEMethod.maybe_roundup_sizes = note
    try:
        yield widths
    finally:
        AmpereMxfp4MoEMethod.maybe_roundup_sizes = original


def checkpoint(folder: pathlib.Path) -> pathlib.Path:
    """The preset ``tiny`` with experts ``ENGINE_WIDTH`` wide, written once."""
    import fcntl

    from deepinfer_sm80.model.checkpoint import write_checkpoint
    from deepinfer_sm80.model.config import preset

    path = folder / f"tiny-{ENGINE_WIDTH}"
    with (folder / "experts.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (path / "config.json").exists():
            write_checkpoint(path, dataclasses.replace(preset("tiny"), moe_intermediate_size=ENGINE_WIDTH), seed=0)
    return path


def _engine(out: pathlib.Path, rounding: str) -> dict[str, Any]:
    import stages
    import torch

    path = checkpoint(out)
    stages.apply_disguise()
    with noted_widths(rounding) as widths:
        engine = stages.Engine(
            path, enforce_eager=True, enable_prefix_caching=False, swa_bounded_replay=False, max_num_batched_tokens=8192
        )
    expected = {"ours": ENGINE_WIDTH, "stock": -(-ENGINE_WIDTH // 128) * 128}[rounding]
    if set(widths) != {expected}:
        raise AssertionError(f"experts are {widths} columns wide, expected {expected}")
    scored = engine.generate(engine.prompts[1:], 1, prompt_logprobs=0)
    outputs = engine.generate(engine.prompts, logprobs=2)
    stages.require_finite(outputs)
    saved = {
        "logprobs": [
            [step[token].logprob for token, step in zip(ids[1:], found.prompt_logprobs[1:], strict=True)]
            for ids, found in zip(engine.prompts[1:], scored, strict=True)
        ],
        "tokens": stages.tokens_of(outputs),
        "top": parting.kept(outputs),
    }
    torch.save(saved, out / f"experts-{rounding}.pt")
    count = sum(map(len, saved["logprobs"]))
    return engine.result(columns=expected, layers=len(widths), prompt_tokens=count)


def experts_ours(model: pathlib.Path, out: pathlib.Path) -> dict[str, Any]:
    return _engine(out, "ours")


def experts_stock(model: pathlib.Path, out: pathlib.Path) -> dict[str, Any]:
    return _engine(out, "stock")


def experts_draft(model: pathlib.Path, out: pathlib.Path) -> dict[str, Any]:
    """DSpark on the same checkpoint: the draft's experts are as narrow, and it generates."""
    import stages

    path = checkpoint(out)
    stages.apply_disguise()
    with noted_widths("ours") as widths:
        engine = stages.Engine(path, speculative_config={"method": "dspark", "num_speculative_tokens": 5})
    looked_at = stages.require_finite(engine.generate(engine.prompts))
    layers = 8 + 3
    if widths != [ENGINE_WIDTH] * layers:
        raise AssertionError(f"experts are {widths} columns wide, expected {layers} layers of {ENGINE_WIDTH}")
    return engine.result(columns=ENGINE_WIDTH, layers=len(widths), logprobs_finite=looked_at)


def experts_engines(model: pathlib.Path, out: pathlib.Path) -> dict[str, Any]:
    """Prompt log-probabilities and greedy tokens of the two roundings.

    Equal bits are counted; the gate is that of two layouts of one model, because Marlin sums in another order.
    """
    import torch

    ours, stock = (torch.load(out / f"experts-{arm}.pt") for arm in ("ours", "stock"))
    gaps = [
        abs(a - b) for x, y in zip(ours["logprobs"], stock["logprobs"], strict=True) for a, b in zip(x, y, strict=True)
    ]
    equal, leads = 0, []
    for mine, theirs, top in zip(ours["tokens"], stock["tokens"], stock["top"], strict=True):
        at = parting.first_difference(mine, theirs)
        equal += at is None
        if at is not None:
            leads.append(round(parting.lead(top[at], mine[at]), 5))
    mean = statistics.fmean(gaps)
    facts = {
        "prompt_tokens": len(gaps),
        "equal_bits": f"{sum(gap == 0 for gap in gaps) / len(gaps):.1%}",
        "mean": round(mean, 5),
        "largest": round(max(gaps), 4),
        "greedy_equal": f"{equal} of {len(ours['tokens'])}",
        "leads_where_they_part": leads,
    }
    return {"ok": mean <= MEAN and all(lead <= TIE for lead in leads), "facts": facts, "allowed_mean": MEAN}


STAGES: dict[str, Callable[[pathlib.Path, pathlib.Path], dict[str, Any]]] = {
    "experts-padding": experts_padding,
    "experts-ours": experts_ours,
    "experts-stock": experts_stock,
    "experts-draft": experts_draft,
    "experts-engines": experts_engines,
}
