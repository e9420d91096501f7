#!/usr/bin/env python3
"""Tensor, pipeline and expert parallelism on the GPUs of one host, against one GPU, with this plugin in stock vLLM.

    python3 benchmarks/serving/prove_multi_gpu.py --model DIR --out DIR [--stage NAME ...] [--together]
    python3 benchmarks/serving/prove_multi_gpu.py --report --out DIR

Every stage is a process that starts an engine, takes prompt log-probabilities and greedy tokens, and writes
OUT/NAME.json; ``compare`` judges each layout against ``tp1``. --together starts the layouts at once, each with a
fixed KV cache of 2 GiB; the times come after them, one after the other. Without --stage all are run that the GPUs here
are enough for. On GPUs that are not compute capability 8.x, --capability 8.0 and the test aid ``ampere_disguise``
(PYTHONPATH) are needed. NVLink multicast stays off: its users are switched off here, and the variables that forbid it
are passed on as they are.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import pathlib
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import parting  # noqa: E402  (found through the path above)
from limits import MEAN, TIE  # noqa: E402
from running import (  # noqa: E402
    digest,
    failure,
    require_checkpoint,
    require_engine,
    require_results,
    run_process,
    said,
)

from deepinfer_sm80.cli import needs  # noqa: E402

if TYPE_CHECKING:
    from deepinfer_sm80.model.config import ModelConfig

DSPARK = {"method": "dspark", "num_speculative_tokens": 5}
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp1": {},
    "tp2": {"tensor_parallel_size": 2},
    "tp2-eager": {"tensor_parallel_size": 2, "enforce_eager": True},
    "tp2-ep": {"tensor_parallel_size": 2, "enable_expert_parallel": True},
    "tp2-dspark": {"tensor_parallel_size": 2, "speculative_config": DSPARK},
    "tp2-ring": {"tensor_parallel_size": 2, "disable_custom_all_reduce": True},
    "pp2": {"pipeline_parallel_size": 2},
    "pp2-eager": {"pipeline_parallel_size": 2, "enforce_eager": True},
    "tp2-pp2": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
    "tp2-pp2-eager": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "enforce_eager": True},
}
TIMED = {f"{name}-times": name for name in ("tp1", "tp2", "tp2-ep", "tp2-ring", "pp2", "tp2-pp2")}
CARDS = {"NVIDIA H200": "H200:141GB:4800GB/s:989TFLOPS"}  # as the planner takes a card it does not know
RANKS_PROMPT = 1500  # tokens of the prompt whose chosen rows and hand-overs every rank notes
ENVIRONMENT = {"tp2-ring": {"NCCL_ALGO": "Ring", "NCCL_PROTO": "Simple"}}
EVERYWHERE = {
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
    "VLLM_USE_NCCL_SYMM_MEM": "0",
    "NCCL_NVLS_ENABLE": "0",
}
LINKS = "links"
ALONE = (*TIMED, LINKS)  # one after the other, never together
STAGES = (*LAYOUTS, *ALONE, "compare")
TOP = 5  # log-probabilities kept of each greedy step: more than two may tie
JUDGED = "how far one GPU's best led the token that was taken"
VALUES = ("prompt_logprobs", "top")  # what ``compare`` needs and nobody reads: in OUT/NAME.values


def ways(name: str) -> tuple[int, int]:
    """Tensor-parallel ranks of a stage of the pipeline, and such stages, of a layout or of its times."""
    options = LAYOUTS[TIMED.get(name, name)]
    return options.get("tensor_parallel_size", 1), options.get("pipeline_parallel_size", 1)


def gpus_of(name: str) -> int:
    """GPUs that a stage of this script takes."""
    others = {LINKS: 2, "compare": 0}
    return others[name] if name in others else math.prod(ways(name))


def run_stage(name: str, args: argparse.Namespace) -> int:
    """Run one stage in a fresh process."""
    environment = {**os.environ, **EVERYWHERE, **ENVIRONMENT.get(TIMED.get(name, name), {})}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(HERE), environment.get("PYTHONPATH")]))
    environment["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # ranks.py asks the workers
    if name in ALONE:
        environment.pop("PROVE_SHARED_GPU", None)
    if args.capability:
        environment["AMPERE_DISGUISE"] = args.capability
    facts = {"checkpoint": args.model.name, "checkpoint_sha256": digest(args.model)} if args.model else {}
    return run_process(__file__, name, args, environment, **facts)


def layout(name: str, model: pathlib.Path, out: pathlib.Path) -> dict[str, Any]:
    """Prompt log-probabilities of every prompt, every layer for every token, and 64 greedy tokens with the best TOP."""
    import stages

    options: dict[str, Any] = {"swa_bounded_replay": False, "enable_prefix_caching": False, **LAYOUTS[name]}
    cut(options, model)
    engine = stages.Engine(model, **options)
    scored = engine.generate(engine.prompts[1:], 1, prompt_logprobs=0)
    prompt_logprobs = [
        [step[token].logprob for token, step in zip(ids[1:], found.prompt_logprobs[1:], strict=True)]
        for ids, found in zip(engine.prompts[1:], scored, strict=True)
    ]
    outputs = engine.generate(engine.prompts, logprobs=TOP)
    stages.require_finite(outputs)
    found = engine.result(gpus=gpus_of(name))
    if options.get("enforce_eager"):
        found |= asked_of_ranks(engine, config_of(model), ways(name)[1])
    return found | {
        "prompt_logprobs": prompt_logprobs,
        "tokens": stages.tokens_of(outputs),
        "top": parting.kept(outputs),
    }


def asked_of_ranks(engine: Any, config: ModelConfig, stages: int) -> dict[str, Any]:
    """Whether all ranks of each of the pipeline's ``stages`` choose the same rows, and the bytes per token that a stage
    hands over. Raises AssertionError for rows that differ, for bytes that are not the planner's, and where nothing was
    noted."""
    import ranks

    from deepinfer_sm80.topology.roofline import hop_bytes

    prompt = next(ids for ids in engine.prompts if len(ids) == RANKS_PROMPT)
    engine.llm.collective_rpc(ranks.watch)
    engine.generate([prompt], 1)
    answers = engine.llm.collective_rpc(ranks.noted)
    differing = ranks.differing(answers)
    if differing:
        raise AssertionError(f"the ranks chose different rows in layers {', '.join(differing)}: {answers}")
    lacking = ranks.missing(answers, config.index_source_layer_ids, stages)
    if lacking:
        raise AssertionError(f"the ranks did not note everything: {lacking}")
    hops = ranks.per_token(answers)
    if any(size != hop_bytes(config) for size in hops):
        raise AssertionError(f"a hop carries {hops} bytes a token, the planner says {hop_bytes(config)}")
    layers = len(config.index_source_layer_ids)
    equal = {"layers_with_equal_rows": layers} if len(answers) > stages else {}
    return {"ranks": len(answers), "hop_bytes": hops} | equal


def timed(name: str, model: pathlib.Path) -> dict[str, Any]:
    """Step and chunk times of a layout, alone on its GPUs, with graphs and vLLM's defaults."""
    import stages
    import timing

    options = dict(LAYOUTS[TIMED[name]])
    cut(options, model)
    engine = stages.Engine(model, compilation_config={"cudagraph_capture_sizes": list(timing.BATCHES)}, **options)
    result = engine.result(**timing.times(engine))
    card = CARDS.get(result["gpu"])
    return result | ({"planned": planned(name, config_of(model), card)} if card else {})


def joined(model: pathlib.Path) -> dict[str, Any]:
    """What an all-reduce and a hop take between two ranks, and the planner's constants that follow from it."""
    import links
    import stages

    from deepinfer_sm80.topology.roofline import hop_bytes

    config = config_of(model)
    engine = stages.Engine(model, tensor_parallel_size=2, enforce_eager=True)
    row, hop = 2 * config.hidden_size, hop_bytes(config)
    reduced = links.slowest(engine.llm.collective_rpc(links.all_reduces, args=(config.hidden_size,)))
    handed = links.slowest(engine.llm.collective_rpc(links.hops, args=(hop,)))
    hand_over = {"latency_us": round(handed["1"], 2)}  # of the hosts: the bytes of one row are none
    constants = {"all_reduce": links.fitted(reduced, row), "hop": hand_over}
    facts = {f"{name}_{key}": value for name, pair in constants.items() for key, value in pair.items()}
    return engine.result(**facts) | {"all_reduce_us": reduced, "hop_us": handed, "constants": constants}


def cut(options: dict[str, Any], model: pathlib.Path) -> None:
    """Tell vLLM where a pipeline is cut."""
    if "pipeline_parallel_size" in options:
        os.environ["VLLM_PP_LAYER_PARTITION"] = ",".join(map(str, split(model)))


def planned(name: str, config: ModelConfig, gpu: str) -> dict[str, float]:
    """What the planner expects of a timed layout on cards ``gpu``: milliseconds of a decode step of one request and
    of a chunk of a 64K prompt, and the bytes of a token that a hop carries."""
    from deepinfer_sm80.topology.cluster import cluster
    from deepinfer_sm80.topology.cuts import halves
    from deepinfer_sm80.topology.footprint import weights
    from deepinfer_sm80.topology.layout import Layout, Setting
    from deepinfer_sm80.topology.roofline import PROMPT, estimate, hop_bytes

    options, (tp, pp) = LAYOUTS[TIMED[name]], ways(name)
    layers = (config.num_hidden_layers,) if pp == 1 else halves(config)
    layout = Layout(layers, (tp,) * pp, ep=tp if options.get("enable_expert_parallel") else 1)
    setting = Setting(context=2048, streams=1, speculation=0)
    found = estimate(weights(config), layout, setting, cluster(f"{tp * pp}x{gpu}", link="nvlink"), PROMPT)
    chunk = 1e3 * setting.batched_tokens / found.replay_off
    return {"decode_ms_batch_1": found.decode_ms, "prefill_ms_2048": chunk, "hop_bytes": hop_bytes(config)}


def split(model: pathlib.Path) -> tuple[int, ...]:
    """Layers of the two stages: cut where stock vLLM allows it, as near to the middle as that gets."""
    from deepinfer_sm80.topology.cuts import halves

    return halves(config_of(model))


def config_of(model: pathlib.Path) -> ModelConfig:
    """The configuration of the checkpoint in ``model``."""
    from deepinfer_sm80.model.checkpoint_files import read_config

    return read_config(model)


def compare(out: pathlib.Path) -> dict[str, Any]:
    """Every layout against tp1: log-probabilities, and where greedy tokens part how far tp1's best led the other."""
    runs = {}
    for name in LAYOUTS:
        if (out / f"{name}.json").exists():
            runs[name] = json.loads((out / f"{name}.json").read_text())
            if runs[name]["ok"]:
                runs[name] |= json.loads((out / f"{name}.values").read_text())
    one, rows, ok = runs.pop("tp1"), {}, True
    for name, run in runs.items():
        if not run["ok"]:
            continue
        gaps = [
            abs(a - b)
            for x, y in zip(run["prompt_logprobs"], one["prompt_logprobs"], strict=True)
            for a, b in zip(x, y, strict=True)
        ]
        margins = [
            parting.lead(top[at], theirs[at])
            for theirs, own, top in zip(run["tokens"], one["tokens"], one["top"], strict=True)
            for at in [parting.first_difference(own, theirs)]
            if at is not None
        ]
        rows[name] = {
            "mean": round(sum(gaps) / len(gaps), 5),
            "largest": round(max(gaps), 4),
            "same_tokens": f"{len(one['tokens']) - len(margins)} of {len(one['tokens'])} prompts",
            "widest_gap_where_they_part": round(max(margins, default=0.0), 4),
        }
        ok &= rows[name]["mean"] <= MEAN and max(margins, default=0.0) <= TIE
    facts = {name: f"mean {row['mean']}" for name, row in rows.items()}
    ok &= bool(rows)
    return {"ok": ok, "facts": facts, "rows": rows, "allowed": {"mean": MEAN, "gap": TIE}, "judged": JUDGED}


def report(out: pathlib.Path) -> str:
    results = {
        name: json.loads((out / f"{name}.json").read_text()) for name in STAGES if (out / f"{name}.json").exists()
    }
    machine = results.get("tp1", {})
    lines = [
        "# Several GPUs",
        "",
        "Written by `benchmarks/serving/prove_multi_gpu.py --report`; do not edit. Stock vLLM 0.33.0 with this plugin,",
        "every layer computed for every token. Log-probabilities of the same prompts against one GPU, and greedy",
        f"tokens, 64 for each of eight prompts; where they part, {_judged(results)}.",
        "",
        f"GPUs: {_gpus(results)} x {machine.get('gpu')}, code for {machine.get('lowering')}; torch "
        f"{machine.get('torch')}, Triton {machine.get('triton')}. Commit {_all(results, 'commit') or 'not recorded'}.",
        "",
        _checkpoint(results),
        "",
        "| layout | result | boot, s | mean difference | largest | same tokens | widest gap where they part |",
        "|---|---|---|---|---|---|---|",
    ]
    rows = results.get("compare", {}).get("rows", {})
    for name in LAYOUTS:
        if name not in results:
            lines.append(f"| {name} | not run | | | | | |")
            continue
        row, run = rows.get(name, {}), results[name]
        cells = [row.get(k, "") for k in ("mean", "largest", "same_tokens", "widest_gap_where_they_part")]
        verdict = "ok" if run["ok"] else "FAILED"
        lines.append(
            f"| {name} | {verdict} | {run.get('facts', {}).get('boot_s', '')} | " + " | ".join(map(str, cells)) + " |"
        )
    lines += _times(results) + _links(results) + _ranks(results)
    wrong = [f"`{name}`: {named(run['error'])}." for name, run in results.items() if run.get("error")]
    lines += ["", *wrong] if wrong else []
    return "\n".join(lines) + "\n"


def _all(results: dict[str, Any], key: str) -> str:
    """What the results say under ``key``, every value once."""
    return ", ".join(sorted({run[key] for run in results.values() if run.get(key)}))


def _gpus(results: dict[str, Any]) -> int:
    return max((run.get("facts", {}).get("gpus", 1) for run in results.values()), default=0)


def _checkpoint(results: dict[str, Any]) -> str:
    name = _all(results, "checkpoint") or "tiny"
    known = _all(results, "checkpoint_sha256")
    if known:
        lacking = ", ".join(f"`{stage}`" for stage, run in results.items() if not run.get("checkpoint_sha256"))
        return f"Checkpoint `{name}`, SHA-256 of its files {known}" + (
            f"; not recorded of {lacking}." if lacking else "."
        )
    return f"Checkpoint `{name}`; no digest of it was recorded, and what another commit writes by that name may differ."


def _judged(results: dict[str, Any]) -> str:
    """What the gaps of a comparison are: since results have said so, of the token that was taken."""
    return str(results.get("compare", {}).get("judged", "the gap between one GPU's two best"))


def named(error: str) -> str:
    """The line of a traceback that names the exception; a message may go on below it. The last line without one."""
    lines = error.splitlines()
    return next((line for line in reversed(lines) if re.match(r"[\w.]*(Error|Exception|Interrupt)\b", line)), lines[-1])


def _times(results: dict[str, Any]) -> list[str]:
    """The table of the timed layouts, what the planner expects beside what was measured."""
    rows = {TIMED[name]: results[name] for name in TIMED if results.get(name, {}).get("ok")}
    if not rows:
        return []
    lines = [
        "",
        "Each layout alone on its GPUs, with graphs. Planned: `deepinfer-sm80 plan`'s formulas and constants of the",
        "row's commit, for these cards and one request; its chunk is one of a 64K prompt. Milliseconds; runs of",
        "different commits may be of different hosts.",
        "",
    ]
    lines += [
        "| layout | decode, 1 request | planned | 8 requests | 64 requests | 2,048-token prompt | planned | commit |"
    ]
    lines += ["|---|---|---|---|---|---|---|---|"]
    for name, run in rows.items():
        facts, plan = run["facts"], run.get("planned", {})
        steps = [facts[f"decode_ms_batch_{batch}"] for batch in (1, 8, 64)]
        cells = [steps[0], _rounded(plan.get("decode_ms_batch_1")), *steps[1:], facts["prefill_ms_2048"]]
        cells += [_rounded(plan.get("prefill_ms_2048")), run.get("commit", "")]
        lines.append(f"| {name} | {' | '.join(map(str, cells))} |")
    return lines


def _links(results: dict[str, Any]) -> list[str]:
    """What joins the GPUs, as measured between two ranks."""
    run = results.get(LINKS, {})
    if not run.get("ok"):
        return []
    lines = [
        "",
        "Between two ranks, microseconds: an all-reduce of a layer's rows in a CUDA graph, and half of a round trip of",
        "the rows that a pipeline's stage hands over, with vLLM's send and receive and their hosts.",
        "",
    ]
    lines += ["| rows | all-reduce | hop |", "|---|---|---|"]
    for count, took in run["all_reduce_us"].items():
        lines.append(f"| {int(count):,} | {took} | {run['hop_us'][count]} |")
    reduced, hop = run["constants"]["all_reduce"], run["constants"]["hop"]
    lines += [
        "",
        f"Constants for the planner: an all-reduce {reduced['latency_us']} us and {reduced['gb_s']} GB/s, the hosts of",
        f"a hop {hop['latency_us']} us. In a round trip bytes run while the hosts prepare the way back; the planner",
        "adds a hop's bytes in full, at the link's GB/s.",
    ]
    return lines


def _ranks(results: dict[str, Any]) -> list[str]:
    """What the eager layouts' ranks answered."""
    lines = []
    for name in LAYOUTS:
        run = results.get(name, {})
        if not run.get("ok") or "hop_bytes" not in run:
            continue
        if "layers_with_equal_rows" in run:
            rows = run["layers_with_equal_rows"]
            lines += ["", f"`{name}`: {run['ranks']} ranks chose the same rows in {rows} index source layers."]
        if run["hop_bytes"]:
            sizes = ", ".join(f"{size:,.0f}" for size in run["hop_bytes"])
            lines += ["", f"`{name}`: a hop carries {sizes} bytes a token, as the planner says."]
    return lines


def _rounded(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def gpus_here() -> int:
    """GPUs that torch sees; 0 without torch or a GPU."""
    from deepinfer_sm80.hardware import torch_sees_a_gpu

    if not torch_sees_a_gpu():
        return 0
    import torch

    return torch.cuda.device_count()


def inside(name: str, args: argparse.Namespace) -> None:
    try:
        if name == "compare":
            result = compare(args.out)
        elif name in TIMED:
            result = timed(name, args.model)
        elif name == LINKS:
            result = joined(args.model)
        else:
            result = layout(name, args.model, args.out)
        result.setdefault("ok", True)
    except Exception:
        result = failure()
    values = {key: result.pop(key) for key in VALUES if key in result}
    if values:
        (args.out / f"{name}.values").write_text(json.dumps(values))
    said(args.out, name).write_text(json.dumps(result, indent=1))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage", action="append", choices=STAGES)
    parser.add_argument("--inside", choices=STAGES, help=argparse.SUPPRESS)
    parser.add_argument("--model", type=pathlib.Path)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--capability", help="8.0 or 8.6: prove on newer GPUs in the Ampere disguise")
    parser.add_argument("--together", action="store_true", help="start every layout at once")
    parser.add_argument("--commit", default="", help="recorded with the results")
    parser.add_argument("--again", action="store_true", help="run stages that have a result")
    parser.add_argument("--tail", type=int, default=25, help="log lines shown of a failed stage")
    parser.add_argument("--report", action="store_true")
    args = parser.parse_args()
    if args.report:
        require_results(parser, args.out, STAGES)
        print(report(args.out), end="")
        return 0
    needs.folder(parser, "--out", args.out)
    args.out.mkdir(parents=True, exist_ok=True)
    if args.inside:
        inside(args.inside, args)
        return 0
    names = args.stage or list(STAGES)
    here = gpus_here()
    if args.stage is None and here:
        names = [name for name in STAGES if gpus_of(name) <= here]
    elif here and max(map(gpus_of, names)) > here:
        large = max(names, key=gpus_of)
        parser.error(
            f"--stage {large} takes {gpus_of(large)} GPUs, found {here}: leave it out, or use a larger machine"
        )
    if any(name != "compare" for name in names):
        require_checkpoint(parser, args.model)
        require_engine(parser)
        digest(args.model)  # once, before processes share the disk
    if args.together:
        os.environ["PROVE_SHARED_GPU"] = "1"
    with ThreadPoolExecutor(len(LAYOUTS) if args.together else 1) as pool:
        failed = sum(pool.map(lambda name: run_stage(name, args), [n for n in names if n in LAYOUTS]))
    failed += sum(run_stage(name, args) for name in names if name in ALONE)
    if "compare" in names:
        failed += run_stage("compare", args)
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
