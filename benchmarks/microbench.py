"""What the three microbenchmark scripts share: arguments, the run, the rows and the summary."""

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

from deepinfer_sm80.bench import report, rows, runner
from deepinfer_sm80.bench.lowering import LOWERINGS
from deepinfer_sm80.errors import BenchmarkError
from deepinfer_sm80.hardware import torch_sees_a_gpu

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks/results"
RESOURCES = ROOT / "docs/resources.md"


def parse(operators, description, argv):
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--op", action="append", choices=operators, help="only this operator; may be repeated")
    parser.add_argument("--quick", action="store_true", help="one case an operator, fewer rounds; nothing is recorded")
    parser.add_argument("--lowering", choices=LOWERINGS, help="default: sm80 where it can be had, else native")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    parser.add_argument("--commit", default="", help="commit for the rows, where the sources lie outside git")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the rows and of the summary")
    return parser.parse_args(argv)


def main(operators, description, argv=None, device=None):
    """Measure ``operators``, append the rows, write the summary anew. Returns the exit code."""
    args = parse(operators, description, argv)
    chosen = args.op or operators
    if device is None:
        if not torch_sees_a_gpu():
            return without_gpu(chosen, args.json)
        from deepinfer_sm80.bench.gpu import CudaDevice

        device = CudaDevice()
    try:
        found = runner.run_operators(
            chosen,
            device,
            args.lowering,
            quick=args.quick,
            commit=args.commit,
            say=(lambda _: None) if args.json else lambda text: print(text, flush=True),
        )
    except BenchmarkError as error:
        print(error, file=sys.stderr)
        return 2
    if args.json:
        print(json.dumps({"gpu": device.name, "rows": found.rows, "left_out": found.left_out}, indent=1))
    else:
        print(report.absences(found.left_out))
    if not args.quick:
        rows.append_rows(args.results, found.rows)
        written = rows.write_summary(args.results, RESOURCES)
        print(f"\n{len(found.rows)} rows recorded; {written}", file=sys.stderr)
    return 0 if any(row["provider"] == "ours" for row in found.rows) else 1


def without_gpu(operators, as_json):
    resources = [r for r in rows.read_resources(RESOURCES) if r["op"] in operators]
    if as_json:
        print(json.dumps({"gpu": None, "rows": [], "resources": resources}, indent=1))
    else:
        print(report.NO_GPU)
        print(report.resource_table(resources))
    return 0
