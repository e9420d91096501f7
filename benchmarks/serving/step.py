#!/usr/bin/env python3
"""A whole step inside vLLM: its time, its launches for each layer, and the share of every operator.

    python3 benchmarks/serving/step.py --model DIR [--arm kernels --arm stock] [--capability 8.0] [--batch N ...]
    python3 benchmarks/serving/step.py --report > docs/step-times.md

Decode steps at batch 1, 8 and 64 and a prompt of 2,048 tokens, with vLLM's CUDA graphs. ``kernels`` is this plugin;
on a GPU that is not compute capability 8.x it needs --capability 8.0 and the test aid ``ampere_disguise`` importable.
``stock`` is vLLM's own path for the GPU that is there. Each arm is a process of its own; every step is appended to
benchmarks/results/<gpu>/step.jsonl when it is measured. Kernels are timed in steps of their own, as a profiler slows
the host.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "src")]

import step_profile  # noqa: E402  (found through the path above)
import timing  # noqa: E402
from running import require_checkpoint, require_engine  # noqa: E402

from deepinfer_sm80.bench import report, rows  # noqa: E402
from deepinfer_sm80.cli import needs  # noqa: E402

RESULTS = HERE.parent / "results"
ARMS = ("kernels", "stock")
BATCHES = (1, 8, 64)
LIMIT_S = 540

INTRODUCTION = """# A whole step, and where its time goes

Written by `benchmarks/serving/step.py --report` from `benchmarks/results/*/step.jsonl`; do not edit. `kernels` is
stock vLLM 0.33.0 with this plugin, `stock` its own path for the GPU that is named. Lowering `sm80`: the code of an
A100 on the GPU that is named, not an A100's time. `ms` is a step by the clock, `kernels ms` the sum of what ran on the
GPU (side streams overlap), launches are kernels, copies and fills of a step. Where `ms` is far above `kernels ms`, the
host was the limit: such a clock says nothing about the kernels."""


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=pathlib.Path)
    parser.add_argument("--arm", action="append", choices=ARMS)
    parser.add_argument("--batch", action="append", type=int)
    parser.add_argument("--context", type=int, default=1024, help="prompt tokens of every decoding request")
    parser.add_argument("--no-prefill", action="store_true")
    parser.add_argument("--capture", default="1,8,64", help="sizes of vLLM's CUDA graphs; 2048 adds the prefill's")
    parser.add_argument("--capability", help="8.0 or 8.6: run the plugin on a newer GPU in the Ampere disguise")
    parser.add_argument("--results", type=pathlib.Path, default=RESULTS)
    parser.add_argument("--commit", default="", help="commit for the rows, where the sources lie outside git")
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds for one arm")
    parser.add_argument("--report", action="store_true")
    parser.add_argument("--inside", choices=ARMS, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if not args.report:
        needs.folder(parser, "--results", args.results)
        require_checkpoint(parser, args.model)
        require_engine(parser)
    return args


def environment_of(arm: str, capability: str | None) -> dict[str, str]:
    environment = dict(os.environ)
    environment.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the profiler sees the process that it is in
    environment.pop("AMPERE_DISGUISE", None)
    if arm == "stock":
        environment["DEEPINFER_DISABLE"] = "1"
    elif capability:
        environment["AMPERE_DISGUISE"] = capability
    return environment


def inside(arm: str, args: argparse.Namespace, build: object = None) -> list[dict[str, object]]:
    """Measure one arm in this process; the rows, which are appended one by one."""
    import stages

    from deepinfer_sm80.bench.gpu import driver_version
    from deepinfer_sm80.model.checkpoint_files import read_config

    modes = step_profile.GraphModes()
    stages.apply_disguise()
    modes.install()
    sizes = [int(size) for size in args.capture.split(",")]
    options = {"compilation_config": {"cudagraph_capture_sizes": sizes}, "enable_prefix_caching": False}
    with timing.turn(alone=False):
        engine = (build or stages.Engine)(args.model, **options)
    print(f"{arm}: engine up in {engine.boot_s} s", flush=True)
    layers = read_config(args.model).num_hidden_layers
    machine = stages.facts_of_machine()
    common = {
        "arm": arm,
        "checkpoint": args.model.name,
        "layers": layers,
        **{key: machine[key] for key in ("gpu", "lowering")},
        **report.facts(driver_version(), args.commit),
    }
    ours = step_profile.our_kernels()
    found = []

    def record(name: str, context: int, measured: dict[str, object]) -> None:
        per_layer = round(measured["launches"] / layers, 2)
        row = {"step": name, "context": context, **common, **measured, "launches_per_layer": per_layer}
        path = args.results / rows.gpu_folder(common["gpu"]) / rows.STEPS
        path.parent.mkdir(parents=True, exist_ok=True)
        rows.append_line(path, row)
        found.append(row)
        top = ", ".join(f"{group} {facts['share']:.0%}" for group, facts in list(measured["groups"].items())[:4])
        print(f"{arm} {name}: {measured['ms']} ms, {per_layer} launches a layer, {top}", flush=True)

    with timing.turn(alone=True):
        for batch in args.batch or BATCHES:
            record(f"decode-{batch}", args.context, step_profile.decode_step(engine, batch, args.context, modes, ours))
        if not args.no_prefill:
            record(f"prefill-{step_profile.CHUNK}", 0, step_profile.prefill_chunk(engine, modes, ours))
    return found


def in_order(measured: list[dict[str, object]]) -> list[dict[str, object]]:
    """By step and its size."""
    return sorted(measured, key=lambda row: (row["step"].split("-")[0], int(row["step"].split("-")[1])))


def table(measured: list[dict[str, object]]) -> list[str]:
    """Lines of Markdown."""
    lines = ["", "| step | context | arm | lowering | ms | kernels ms | launches | a layer | graph |"]
    lines += ["|---|---:|---|---|---:|---:|---:|---:|---|"]
    for r in measured:
        lines.append(
            f"| {r['step']} | {r['context'] or ''} | {r['arm']} | {r['lowering']} | {r['ms']:.2f} | "
            f"{r['kernel_ms']:.2f} | {r['launches']:.0f} | {r['launches_per_layer']:.1f} | {r['graph'].lower()} |"
        )
    return lines


def place_of(row: dict[str, object]) -> tuple[object, object]:
    """Whose step it is: GPU and checkpoint."""
    return row["gpu"], row["checkpoint"]


def page(measured: list[dict[str, object]]) -> str:
    """The page docs/step-times.md."""
    later, together = in_order(rows.alone(measured)), in_order(rows.beside(measured))
    lines = [INTRODUCTION]
    for place in dict.fromkeys(map(place_of, [*together, *later])):
        here = [row for row in together if place_of(row) == place]
        since = [row for row in later if place_of(row) == place]
        lines += ["", f"## {place[0]}, checkpoint `{place[1]}` ({[*here, *since][0]['layers']} layers)"]
        if here:
            commits = ", ".join(sorted({str(row["commit"])[:12] for row in here}))
            lines += ["", f"Commit {commits}.", *table(here)]
        for arm in dict.fromkeys(row["arm"] for row in here):
            mine = [row for row in here if row["arm"] == arm]
            groups = list(dict.fromkeys(group for row in mine for group in row["groups"]))
            lines += ["", f"Share of `{arm}`'s kernel time, by operator:", ""]
            lines += [f"| operator | {' | '.join(row['step'] for row in mine)} |", "|---|" + "---:|" * len(mine)]
            for group in groups:
                shares = [row["groups"].get(group, {}).get("share") for row in mine]
                cells = ["" if share is None else f"{share:.1%}" for share in shares]
                lines.append(f"| {group} | {' | '.join(cells)} |")
        for commit in dict.fromkeys(row["commit"] for row in since):
            lines += [
                "",
                f"Commit {str(commit)[:12]}, an arm without the other: a clock of another run, to be read alone.",
            ]
            lines += table([row for row in since if row["commit"] == commit])
    return "\n".join(lines) + "\n"


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    if args.report:
        print(page(rows.read_all(args.results, rows.STEPS)), end="")
        return 0
    if args.inside:
        inside(args.inside, args)
        return 0
    failed = 0
    given = sys.argv[1:] if argv is None else argv
    for arm in args.arm or ARMS:
        command = [sys.executable, __file__, *given, "--inside", arm]
        try:
            code = subprocess.run(command, env=environment_of(arm, args.capability), timeout=args.limit).returncode
        except subprocess.TimeoutExpired:
            code = -9
        if code:
            print(f"{arm}: FAILED with {code}", flush=True)
        failed += bool(code)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
