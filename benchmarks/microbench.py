"""Every operator at once, and what the three microbenchmark scripts share: arguments, run, rows and summary.

python3 benchmarks/microbench.py [--quick] [--json] [--op OPERATOR] [--lowering sm80|sm86|native] [--seconds N]

The measuring is done by a process of its own, which writes down every case before and after it. Where it dies, or the
GPU refuses further work in it, another one goes on with the cases that had not begun.
"""

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

from deepinfer_sm80.cli import needs

try:
    from deepinfer_sm80 import ops
    from deepinfer_sm80.bench import report, rows, runner
    from deepinfer_sm80.bench.lowering import LOWERINGS
    from deepinfer_sm80.bench.measure import DeviceLostError
except ModuleNotFoundError as error:
    needs.leave(sys.argv[0], error)

from deepinfer_sm80.errors import BenchmarkError
from deepinfer_sm80.hardware import torch_sees_a_gpu

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks/results"
RESOURCES = ROOT / "docs/resources.md"
SECONDS = 165
GRACE = 20  # seconds that the last case may take beyond SECONDS
LOST = 70  # exit code of a process whose GPU refuses further work


def parse(operators, description, argv):
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--op", action="append", choices=operators, help="only this operator; may be repeated")
    parser.add_argument("--quick", action="store_true", help="one case an operator, fewer rounds; nothing is recorded")
    parser.add_argument("--lowering", choices=LOWERINGS, help="default: sm80 where it can be had, else native")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    parser.add_argument("--commit", default="", help="commit for the rows, where the sources lie outside git")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the rows and of the summary")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="no case begins later; default %(default)s")
    parser.add_argument("--journal", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    needs.folder(parser, "--results", args.results)
    return args


class Journal(runner.Saying):
    """Rows are recorded, and the journal says what began and how it ended, as it happens."""

    def __init__(self, args):
        super().__init__(printer(args))
        self.args, self.start = args, time.monotonic()

    def begin(self, case):
        rows.append_line(self.args.journal, {"begun": [case.op, case.name]})
        print(f"[{time.monotonic() - self.start:6.1f} s] {case.op} {case.name}", file=sys.stderr, flush=True)

    def end(self, case, outcome):
        if not self.args.quick:
            rows.append_rows(self.args.results, outcome.rows)
        ended = {"ended": [case.op, case.name], "rows": outcome.rows, "left_out": outcome.left_out}
        rows.append_line(self.args.journal, ended)
        super().end(case, outcome)


def printer(args):
    return (lambda _: None) if args.json else lambda text: print(text, flush=True)


def main(operators, description, argv=None, device=None):
    """Measure ``operators``, append the rows, write the summary anew. Returns 0 if ours has a row for every case.

    ``device``: measure in this process, on that.
    """
    args = parse(operators, description, argv)
    if device is None and not torch_sees_a_gpu():
        return without_gpu(args.op or operators, args.json)
    if args.journal:
        from deepinfer_sm80.bench.gpu import CudaDevice

        return measure_here(args, operators, device or CudaDevice())
    with tempfile.TemporaryDirectory() as folder:
        args.journal = Path(folder) / "journal.jsonl"
        args.journal.touch()
        code = measure_here(args, operators, device) if device else in_processes(args, sys.argv[0])
        return 2 if code == 2 else conclude(args, runner.listed(args.op or operators, args.quick))


def measure_here(args, operators, device):
    skip = {tuple(line["begun"]) for line in rows.read_rows(args.journal) if "begun" in line}
    try:
        runner.run_operators(
            args.op or operators,
            device,
            args.lowering,
            quick=args.quick,
            commit=args.commit,
            say=printer(args),
            watch=Journal(args),
            skip=skip,
            seconds=args.seconds,
        )
    except BenchmarkError as error:
        print(error, file=sys.stderr)
        return 2
    except DeviceLostError as error:
        print(error, file=sys.stderr)
        return LOST
    return 0


def in_processes(args, script):
    """Measure in one process after the other until all is done or the time is over. Returns the last exit code."""
    end = time.monotonic() + args.seconds
    given = [text for op in args.op or () for text in ("--op", op)]
    for name in ("lowering", "commit", "results", "journal"):
        given += [f"--{name}={getattr(args, name)}"] if getattr(args, name) else []
    given += [f"--{name}" for name in ("quick", "json") if getattr(args, name)]
    while True:
        before = args.journal.stat().st_size
        left = end - time.monotonic()
        before_term = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
        child = subprocess.Popen([sys.executable, script, *given, f"--seconds={left}"])
        try:
            code = child.wait(left + GRACE)
        except subprocess.TimeoutExpired:
            return -signal.SIGKILL
        finally:  # reached by a SIGTERM as well: no child is left behind
            child.kill()
            child.wait()
            signal.signal(signal.SIGTERM, before_term)
        if code in (0, 2) or args.journal.stat().st_size == before or time.monotonic() > end:
            return code
        print(f"the process that measured ended with {code}; another goes on", file=sys.stderr, flush=True)


def conclude(args, cases):
    """Say what has no row, write the summary; 1 where ours lacks a row of some case."""
    journal = rows.read_rows(args.journal)
    ended = [line for line in journal if "ended" in line]
    found = [row for line in ended for row in line["rows"]]
    left_out = [item for line in ended for item in line["left_out"]]
    begun = {tuple(line["begun"]) for line in journal if "begun" in line}
    over = {tuple(line["ended"]) for line in ended}
    for case in cases:
        if (case.op, case.name) not in over:
            why = "its process ended" if (case.op, case.name) in begun else "it did not begin"
            left_out.append({"op": case.op, "case": case.name, "provider": "ours", "reason": why})
    if args.json:
        gpu = found[0]["gpu"] if found else None
        print(json.dumps({"gpu": gpu, "rows": found, "left_out": left_out}, indent=1))
    else:
        print("\n" + report.absences(left_out))
    ours = {(row["op"], row["case"]) for row in found if row["provider"] == "ours"}
    print(f"\nours: {len(ours)} of {len(cases)} cases have a row", file=sys.stderr)
    if not args.quick:
        written = rows.write_summary(args.results, RESOURCES)
        print(f"{len(found)} rows recorded; {written}", file=sys.stderr)
    return 0 if len(ours) == len(cases) else 1


def without_gpu(operators, as_json):
    resources = [r for r in rows.read_resources(RESOURCES) if r["op"] in operators]
    if as_json:
        print(json.dumps({"gpu": None, "rows": [], "resources": resources}, indent=1))
    else:
        print(report.NO_GPU)
        print(report.resource_table(resources))
    return 0


if __name__ == "__main__":
    sys.exit(main(list(ops.OPS), __doc__))
