#!/usr/bin/env python3
"""Prove that stock vLLM serves DeepSeek-V4.1 through this plugin, stage by stage, on the GPU that is here.

    python3 benchmarks/serving/prove_ampere.py --stage NAME [--stage NAME ...] --model DIR --out DIR
    python3 benchmarks/serving/prove_ampere.py --report --out DIR

Every stage is a process of its own, writes OUT/<stage>.json and takes less than nine minutes; finished stages are
skipped unless --again. On a GPU that is not compute capability 8.x the plugin stages need --capability 8.0 and the
test aid ``ampere_disguise`` importable (PYTHONPATH); the stage ``logprobs-stock`` then runs vLLM's own path as the
oracle. Without --model the tiny checkpoint is written to OUT/tiny. --together runs the given stages at once on a GPU
with room for all (about 16 GB each): every engine then gets a fixed KV cache of 4 GiB through vLLM's own options.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import subprocess
import sys
import time
import traceback
from concurrent.futures import ThreadPoolExecutor

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

PLUGIN_STAGES = ("register", "eager", "graphs", "chunked", "prefix", "dspark", "serve", "logprobs-plugin")
STOCK_STAGES = ("logprobs-stock",)
STAGES = ("checkpoint", *PLUGIN_STAGES, *STOCK_STAGES, "compare")


def run_stage(name: str, args: argparse.Namespace) -> int:
    """Run one stage in a fresh process and store its JSON, also when it fails."""
    path = args.out / f"{name}.json"
    if path.exists() and not args.again and json.loads(path.read_text()).get("ok"):
        print(f"{name}: done before", flush=True)
        return 0
    environment = dict(os.environ)
    environment.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    if name in STOCK_STAGES:
        environment["DEEPINFER_DISABLE"] = "1"
        environment.pop("AMPERE_DISGUISE", None)
    elif args.capability and name in PLUGIN_STAGES:
        environment["AMPERE_DISGUISE"] = args.capability
    command = [sys.executable, __file__, "--inside", name, "--model", str(args.model), "--out", str(args.out)]
    start = time.time()
    with (args.out / f"{name}.log").open("w") as log:
        code = subprocess.call(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
    result = json.loads(path.read_text()) if path.exists() else {"ok": False, "error": f"exit code {code}, no result"}
    result["ok"] = bool(result.get("ok")) and code == 0
    result["wall_s"] = round(time.time() - start, 1)
    path.write_text(json.dumps(result, indent=1))
    print(f"{name}: {'ok' if result['ok'] else 'FAILED'} in {result['wall_s']} s  {summary(result)}", flush=True)
    if not result["ok"]:
        print(result.get("error", ""), *(args.out / f"{name}.log").read_text().splitlines()[-args.tail :], sep="\n")
    return 0 if result["ok"] else 1


def run_together(names: tuple[str, ...], args: argparse.Namespace) -> int:
    """The checkpoint first, the comparison last, everything between at once."""
    first, last = [n for n in names if n == "checkpoint"], [n for n in names if n == "compare"]
    between = [n for n in names if n not in ("checkpoint", "compare")]
    failed = sum(run_stage(name, args) for name in first)
    os.environ["PROVE_SHARED_GPU"] = "1"
    with ThreadPoolExecutor(len(between) or 1) as pool:
        failed += sum(pool.map(lambda name: run_stage(name, args), between))
    return failed + sum(run_stage(name, args) for name in last)


def inside(name: str, args: argparse.Namespace) -> None:
    """The stage itself, in its own process."""
    import stages

    start = time.time()
    try:
        result = stages.FUNCTIONS[name](args.model, args.out)
        result.setdefault("ok", True)
    except Exception:
        result = {"ok": False, "error": traceback.format_exc(limit=-6)}
    result["stage_s"] = round(time.time() - start, 1)
    (args.out / f"{name}.json").write_text(json.dumps(result, indent=1))


def summary(result: dict) -> str:
    return ", ".join(f"{key} {value}" for key, value in result.get("facts", {}).items())


def report(out: pathlib.Path) -> str:
    """A markdown table of every stage that has a result."""
    rows = ["| stage | result | seconds | what was seen |", "|---|---|---|---|"]
    gpu = ""
    for name in STAGES:
        path = out / f"{name}.json"
        if path.exists():
            result = json.loads(path.read_text())
            gpu = result.get("gpu", gpu)
            rows.append(f"| {name} | {'ok' if result['ok'] else 'FAILED'} | {result['wall_s']} | {summary(result)} |")
    return "\n".join([f"GPU: {gpu}", "", *rows])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage", action="append", choices=(*STAGES, "all"))
    parser.add_argument("--inside", choices=STAGES, help=argparse.SUPPRESS)
    parser.add_argument("--model", type=pathlib.Path)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--capability", help="8.0 or 8.6: prove on a newer GPU in the Ampere disguise")
    parser.add_argument("--together", action="store_true", help="run the given stages at once")
    parser.add_argument("--again", action="store_true", help="repeat stages that are done")
    parser.add_argument("--tail", type=int, default=25, help="log lines shown of a failed stage")
    parser.add_argument("--report", action="store_true")
    args = parser.parse_args()
    args.out = args.out.resolve()
    args.out.mkdir(parents=True, exist_ok=True)
    args.model = args.model or args.out / "tiny"
    if args.inside:
        inside(args.inside, args)
        return 0
    wanted = STAGES if args.stage and "all" in args.stage else tuple(args.stage or ())
    failed = run_together(wanted, args) if args.together else sum(run_stage(name, args) for name in wanted)
    if args.report or wanted:
        print(report(args.out))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
