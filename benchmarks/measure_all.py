#!/usr/bin/env python3
"""Everything that is measured on a GPU, in one call that ends by itself: operators, whole steps, summary, charts.

    python3 benchmarks/measure_all.py --seconds 560 [--model DIR] [--commit SHA] [--results DIR] [--logs DIR]

The jobs are processes with a share of the time that is left; one that hangs is ended with all that it started. Rows are
on the disk as they come, so a call that is cut short has lost nothing, and a repeated call adds to it. With two GPUs
the whole steps (which need --model, a checkpoint's folder) run on the first and the operators on the second. On a GPU
that is not compute capability 8.x, code for an Ampere GPU needs the test aid ``ampere_disguise`` and vLLM importable;
without it only ``native`` is measured.
"""

import argparse
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from deepinfer_sm80 import hardware
from deepinfer_sm80.bench import rows
from deepinfer_sm80.bench.lowering import AID
from deepinfer_sm80.cli import needs

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
RESOURCES = HERE.parent / "docs/resources.md"
LEAST_S = 30  # a job with less time than that is not begun
BEFORE_END_S = 25  # a microbenchmark is told to begin nothing so long before its end
TAIL = 12
RUNNING = set()  # processes that lead a group of their own
STARTING, STOPPING = threading.RLock(), threading.Event()


class Job:
    """One process: its name, its command for a number of seconds, the weight of its share, and the arms that it has."""

    def __init__(self, name, weight, command):
        self.name, self.weight, self.command = name, weight, command


def operators(lowering, args):
    script = [sys.executable, str(HERE / "microbench.py"), f"--lowering={lowering}", *common(args)]
    return lambda seconds: [*script, f"--seconds={max(seconds - BEFORE_END_S, 1):.0f}"]


def step(arm, args, capability):
    script = [sys.executable, str(HERE / "serving/step.py"), f"--model={args.model}", f"--arm={arm}", *common(args)]
    script += [f"--capability={capability}"] if capability else []
    return lambda seconds: [*script, f"--limit={seconds:.0f}"]


def common(args):
    return [f"--results={args.results}", *([f"--commit={args.commit}"] if args.commit else [])]


def jobs(args, is_ampere, has_aid):
    """(whole steps, operators), each in the order of their value."""
    code = "native" if is_ampere or not has_aid else "sm80"
    of_operators = [Job(f"operators-{code}", 3, operators(code, args))]
    if code == "sm80":
        of_operators.append(Job("operators-native", 2, operators("native", args)))
    of_steps = []
    if args.model and (is_ampere or has_aid):
        of_steps.append(Job("step-kernels", 2, step("kernels", args, None if is_ampere else "8.0")))
    if args.model and not is_ampere:
        of_steps.append(Job("step-stock", 2, step("stock", args, None)))
    return of_steps, of_operators


def run_lane(lane, end, logs, environment):
    """The jobs of one GPU, one after the other; names and exit codes, None for one that had no time."""
    ended = {}
    for place, job in enumerate(lane):
        left = end - time.monotonic()
        seconds = left * job.weight / sum(later.weight for later in lane[place:])
        ended[job.name] = run(job, seconds, logs, environment) if seconds >= LEAST_S else None
        print(f"{job.name}: {describe(ended[job.name])}", flush=True)
    return ended


def describe(code):
    return {None: "no time was left", 0: "done", -9: "ended: its time was over"}.get(code, f"FAILED with {code}")


def run(job, seconds, logs, environment):
    with (logs / f"{job.name}.log").open("wb") as log:
        with STARTING:
            if STOPPING.is_set():
                return None
            process = subprocess.Popen(
                job.command(seconds), stdout=log, stderr=subprocess.STDOUT, env=environment, start_new_session=True
            )
            RUNNING.add(process)
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            return -9
        finally:
            end_group(process)
            RUNNING.discard(process)


def end_group(process):
    """End a process and whatever it started; it is the leader of their group."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        if number == signal.SIGTERM:
            time.sleep(2)
    process.wait()


def conclude(args, ended):
    """The last lines of every log, then the summary of all rows. Returns the exit code."""
    for name in ended:
        path = args.logs / f"{name}.log"
        if path.exists():
            print(f"\n== {name}: {describe(ended[name])} ==")
            print("\n".join(path.read_text(encoding="utf-8", errors="replace").splitlines()[-TAIL:]))
    written = rows.write_summary(args.results, RESOURCES)
    counts = {name: len(rows.read_all(args.results, name)) for name in (rows.ROWS, rows.STEPS)}
    print(f"\n{written}: " + ", ".join(f"{count} rows in {name}" for name, count in counts.items()))
    print(
        "python3 benchmarks/generate_charts.py draws the charts; benchmarks/serving/step.py --report writes the page."
    )
    return 0 if ended and all(code == 0 for code in ended.values()) else 1


def give_up(number, frame):
    """SIGTERM: end what was started, then this process, without the jobs that would come next."""
    STOPPING.set()
    with STARTING:
        running = list(RUNNING)
    for process in running:
        end_group(process)
    os._exit(128 + number)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=560, help="for everything; default %(default)s")
    parser.add_argument("--model", type=Path, help="folder of a checkpoint; without it no whole step is measured")
    parser.add_argument("--commit", default="", help="commit for the rows, where the sources lie outside git")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--logs", type=Path, default=Path("logs"))
    parser.add_argument("--gpus", type=int, choices=(1, 2), help="default: two if there are")
    args = parser.parse_args(argv)
    needs.folder(parser, "--results", args.results)
    needs.folder(parser, "--logs", args.logs)
    if args.model and not (args.model / "config.json").is_file():
        parser.error(
            f"--model must be the folder of a checkpoint, found {args.model}, which has no config.json: write one with "
            "deepinfer-sm80 make-checkpoint"
        )
    end = time.monotonic() + args.seconds
    gpu = hardware.current_gpu()
    if gpu is None:
        print("No GPU is visible here: nothing was measured.")
        return 1
    args.results, args.logs = args.results.resolve(), args.logs.resolve()
    args.logs.mkdir(parents=True, exist_ok=True)
    lanes = jobs(args, hardware.is_ampere_family(gpu.capability), find_spec(AID) is not None)
    two = hardware.current_gpu(1) is not None if args.gpus is None else args.gpus == 2
    if two and all(lanes):
        ended = in_parallel(lanes, end, args.logs)
    else:
        steps, of_operators = lanes
        ended = run_lane([*of_operators[:1], *steps, *of_operators[1:]], end, args.logs, dict(os.environ))
    return conclude(args, ended)


def in_parallel(lanes, end, logs):
    """Each lane on a GPU of its own."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")
    with ThreadPoolExecutor(len(lanes)) as pool:
        running = [
            pool.submit(run_lane, lane, end, logs, {**os.environ, "CUDA_VISIBLE_DEVICES": device})
            for lane, device in zip(lanes, visible, strict=False)
        ]
        return {name: code for lane in running for name, code in lane.result().items()}


def entry():
    signal.signal(signal.SIGTERM, give_up)
    return main()


if __name__ == "__main__":
    sys.exit(entry())
