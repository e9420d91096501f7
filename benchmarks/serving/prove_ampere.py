#!/usr/bin/env python3
"""Prove that stock vLLM serves DeepSeek-V4.1 through this plugin, stage by stage, on the GPU that is here.

    python3 benchmarks/serving/prove_ampere.py --stage NAME [--stage NAME ...] --model DIR --out DIR
    python3 benchmarks/serving/prove_ampere.py --report --out DIR

Every stage is a process of its own, writes OUT/<stage>.json and takes less than nine minutes (--limit stops it before);
finished stages are skipped unless --again. --stage all is all of them, --stage experts those about the width of the
experts. On a GPU that is not compute capability 8.x the plugin stages need --capability 8.0 and the test aid
``ampere_disguise`` importable (PYTHONPATH); the stage ``logprobs-stock`` then runs vLLM's own path as the oracle. The
spec stages read what the logprobs and generated stages saved and run ``model/`` instead of vLLM, without a GPU as well.
Without --model the checkpoint of --preset is written to OUT/PRESET. --together runs the given stages at once on a GPU
with room for all (about 16 GB each for ``tiny``): every engine then gets a fixed KV cache of 2 GiB through vLLM's own
options, and the stages that take times take them one after the other.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import sys
import time
from concurrent.futures import ThreadPoolExecutor

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import agreement_page  # noqa: E402  (found through the path above)
from running import (  # noqa: E402
    LIMIT_S,
    failure,
    require_checkpoint,
    require_engine,
    require_results,
    run_process,
    said,
    summary,
)

from deepinfer_sm80.cli import needs  # noqa: E402

GENERATING = ("eager", "graphs", "chunked-eager", "chunked", "dspark-eager", "dspark", "serve")
RECORDED = ("generated-whole", "generated-chunks")
SERVED = ("in-process", "http")
EXPERTS = ("experts-ours", "experts-stock")
TIMED = ("warm-up", "mixed", "times-kernels", "times-pytorch")
PLUGIN_STAGES = (
    "register",
    *GENERATING,
    *SERVED,
    *RECORDED,
    "experts-padding",
    *EXPERTS,
    "experts-draft",
    *TIMED,
    "logprobs-plugin",
)
STOCK_STAGES = ("times-stock", "logprobs-stock")
ENVIRONMENT = {"times-pytorch": {"DEEPINFER_PYTORCH_OPERATORS": "all"}}
ARMS = ("logprobs-plugin", "logprobs-stock")
# stages that read what others wrote
AFTER = {
    "compare": ARMS,
    "spec-full": ARMS,
    "spec-replay": RECORDED,
    "http-compare": SERVED,
    "experts-engines": EXPERTS,
}
STAGES = ("checkpoint", *PLUGIN_STAGES, *STOCK_STAGES, *AFTER)
SETS = {"experts": ("experts-padding", *EXPERTS, "experts-draft", "experts-engines")}

INTRODUCTION = """# Stock vLLM serving DeepSeek-V4.1 through this plugin

Written by `benchmarks/serving/prove_ampere.py --report`; do not edit. No Ampere GPU was at hand: the plugin's stages
ran on a newer GPU that takes an A100's decisions and runs an A100's code (PTX for sm_80). That shows the code, not an
Ampere GPU's time or memory limits. The checkpoint is the preset `{preset}`: random weights in the released format.
`stock` is vLLM's own path for the GPU that is there, without this plugin; both arms of the comparison compute every
layer for every token (`--no-swa-bounded-replay`). `spec` is the plain PyTorch model in `src/deepinfer_sm80/model`, run
by itself on the same checkpoint and tokens."""


def run_stage(name: str, args: argparse.Namespace) -> int:
    """Run one stage in a fresh process with the environment of its arm."""
    environment = dict(os.environ)
    environment.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    environment.update(ENVIRONMENT.get(name, {}))
    if name in STOCK_STAGES or name in AFTER:
        environment["DEEPINFER_DISABLE"] = "1"
        environment.pop("AMPERE_DISGUISE", None)
    elif args.capability and name in PLUGIN_STAGES:
        environment["AMPERE_DISGUISE"] = args.capability
    environment["PROVE_PRESET"] = args.preset
    return run_process(__file__, name, args, environment, preset=args.preset)


def run_together(names: tuple[str, ...], args: argparse.Namespace) -> int:
    """The checkpoint first, then everything at once; what compares starts as soon as the stages it reads are done."""
    failed = sum(run_stage(name, args) for name in names if name == "checkpoint")
    os.environ["PROVE_SHARED_GPU"] = "1"
    os.environ.setdefault("PROVE_TURN", str(args.out / ".turn"))

    def run_after(name: str) -> int:
        for earlier in AFTER[name]:
            if earlier in running:
                running[earlier].result()
        return run_stage(name, args)

    with ThreadPoolExecutor(len(STAGES)) as pool:
        first = [name for name in names if name not in ("checkpoint", *AFTER)]
        running = {name: pool.submit(run_stage, name, args) for name in first}
        comparing = [pool.submit(run_after, name) for name in names if name in AFTER]
        return failed + sum(stage.result() for stage in (*running.values(), *comparing))


def inside(name: str, args: argparse.Namespace) -> None:
    """The stage itself, in its own process."""
    import stages

    start = time.time()
    try:
        result = stages.FUNCTIONS[name](args.model, args.out)
        result.setdefault("ok", True)
    except Exception:
        result = failure()
    result["stage_s"] = round(time.time() - start, 1)
    said(args.out, name).write_text(json.dumps(result, indent=1))


def report(out: pathlib.Path) -> str:
    """The page docs/serving-proof.md: a table of every stage that has a result, and the largest differences."""
    results = {
        name: json.loads((out / f"{name}.json").read_text()) for name in STAGES if (out / f"{name}.json").exists()
    }
    machine = next((r for r in results.values() if "gpu" in r), {})
    lines = [
        INTRODUCTION.format(preset=next((r["preset"] for r in results.values() if "preset" in r), "tiny")),
        "",
        f"GPU: {machine.get('gpu')}; torch {machine.get('torch')}, Triton {machine.get('triton')}. Commit "
        f"{', '.join(sorted({r['commit'] for r in results.values() if r.get('commit')}))}.",
        "",
    ]
    lines += ["| stage | lowering | result | seconds | what was seen |", "|---|---|---|---|---|"]
    for name, result in results.items():
        verdict = "ok" if result["ok"] else "FAILED"
        lines.append(f"| {name} | {result.get('lowering', '')} | {verdict} | {result['wall_s']} | {summary(result)} |")
    missing = [name for name in STAGES if name not in results and name != "checkpoint"]
    if missing:
        lines += ["", f"No result yet: {', '.join(missing)}."]
    largest = results.get("compare", {}).get("largest", [])
    if largest:
        lines += ["", "The largest differences, and what the two paths chose differently in that row:", ""]
        lines += [
            "| prompt | position | difference | experts flipped in layers | top-k flipped in layers |",
            "|---|---|---|---|---|",
        ]
        for row in largest:
            flips = [", ".join(map(str, row[f"{kind}_flipped_in_layers"])) or "none" for kind in ("experts", "topk")]
            lines.append(f"| {row['prompt']} | {row['position']} | {row['difference']} | {flips[0]} | {flips[1]} |")
    lines += agreement_page.full(results.get("spec-full", {})) + agreement_page.replay(results.get("spec-replay", {}))
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage", action="append", choices=(*STAGES, *SETS, "all"))
    parser.add_argument("--inside", choices=STAGES, help=argparse.SUPPRESS)
    parser.add_argument("--model", type=pathlib.Path)
    parser.add_argument("--preset", default="tiny", choices=("tiny", "layer"), help="the checkpoint (default: tiny)")
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--capability", help="8.0 or 8.6: prove on a newer GPU in the Ampere disguise")
    parser.add_argument("--together", action="store_true", help="run the given stages at once")
    parser.add_argument("--commit", default="", help="recorded with the results")
    parser.add_argument("--again", action="store_true", help="repeat stages that are done")
    parser.add_argument("--limit", type=int, default=LIMIT_S, help="seconds for each stage (default %(default)s)")
    parser.add_argument("--tail", type=int, default=25, help="log lines shown of a failed stage")
    parser.add_argument("--report", action="store_true")
    args = parser.parse_args()
    args.out = args.out.resolve()
    if args.report and not args.stage:
        require_results(parser, args.out, STAGES)
    needs.folder(parser, "--out", args.out)
    args.out.mkdir(parents=True, exist_ok=True)
    args.model = args.model or args.out / args.preset
    if args.inside:
        inside(args.inside, args)
        return 0
    named = [stage for name in args.stage or () for stage in SETS.get(name, (name,))]
    wanted = STAGES if "all" in named else tuple(dict.fromkeys(named))
    if not wanted and not args.report:
        parser.error("nothing to do: name a stage with --stage, or print the page with --report")
    if set(wanted) & {*PLUGIN_STAGES, *STOCK_STAGES}:
        require_engine(parser)
        if "checkpoint" not in wanted:
            require_checkpoint(parser, args.model)
    failed = run_together(wanted, args) if args.together else sum(run_stage(name, args) for name in wanted)
    if args.report or wanted:
        print(report(args.out), end="")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
