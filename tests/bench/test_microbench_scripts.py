"""The three scripts and ``deepinfer-sm80 bench`` on a fake device and without a GPU; rows, summary and baseline."""

import argparse
import importlib.util
import json
import signal
import sys
from pathlib import Path

import pytest

from deepinfer_sm80 import cli, ops
from deepinfer_sm80.bench import cases, lowering, residual_streams, rows, runner
from deepinfer_sm80.bench.measure import Outcome
from deepinfer_sm80.cli import bench as bench_command
from deepinfer_sm80.errors import BenchmarkError

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
SCRIPTS = ("microbench_sm80_kernels", "microbench_sm80_part2", "microbench_sm80_part3")


def load(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


fake_device = load(Path(__file__).with_name("fake_device.py"))


@pytest.fixture(autouse=True)
def as_scripts_see_it(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.delitem(sys.modules, "microbench", raising=False)


@pytest.fixture
def small(monkeypatch):
    """Only mhc_post, narrow, and PyTorch in the place of the kernel: the interpreter takes seconds."""
    monkeypatch.setattr(residual_streams, "HIDDEN", 128)
    monkeypatch.setattr(ops, "kernel", ops.pytorch)
    monkeypatch.setattr(cases, "all_cases", lambda: iter([cases.mhc(1), cases.mhc(8)]))


def row(**changes):
    made = dict.fromkeys(rows.KEYS, "x") | {"op": "mhc_post", "case": "T1-H5120", "provider": "ours", "gate": True}
    return made | {"gpu": "NVIDIA Test 9000", "lowering": "sm80", "p50_us": 10.0} | changes


@pytest.mark.parametrize("name", SCRIPTS)
def test_without_a_gpu_one_line_and_the_resources(name, capsys, monkeypatch):
    script = load(BENCHMARKS / f"{name}.py")
    monkeypatch.setattr(sys.modules["microbench"], "torch_sees_a_gpu", lambda: False)
    assert script.main(script.OPERATORS, script.__doc__, []) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "No GPU is visible here: nothing was timed and nothing was recorded."
    assert {line.split()[0] for line in lines[2:]} == {op for op in script.OPERATORS if ops.kernel(op)}
    assert script.main(script.OPERATORS, script.__doc__, ["--json", "--op", script.OPERATORS[0]]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["rows"] == []
    assert {r["op"] for r in found["resources"]} == {script.OPERATORS[0]}


def test_scripts_cover_every_case_once():
    listed = [op for name in SCRIPTS for op in load(BENCHMARKS / f"{name}.py").OPERATORS]
    assert sorted(listed) == sorted({case.op for case in cases.all_cases()})
    assert {ops.OPS[op] for op in listed} == set(bench_command.FAMILIES)


def test_a_quick_case_for_every_operator():
    quick = [case.op for case in cases.all_cases() if case.quick]
    assert sorted(quick) == sorted({case.op for case in cases.all_cases()})
    first = runner.listed(ops.OPS)[: len(quick)]
    assert [case.op for case in first] == quick, "a run that is cut short has something of all"
    names = [(case.op, case.name) for case in cases.all_cases()]
    assert len(set(names)) == len(names)


def test_a_run_records_rows_and_the_summary(small, tmp_path, capsys):
    script = load(BENCHMARKS / "microbench_sm80_part2.py")
    device = fake_device.FakeDevice([10.0, 40.0, 30.0, 20.0], l2_bytes=1)
    arguments = ["--results", str(tmp_path), "--commit", "abc", "--lowering", "native"]
    assert script.main(script.OPERATORS, script.__doc__, arguments, device) == 0
    out = capsys.readouterr().out
    assert "copy 1000 GB/s (read and written), bf16 dot 100 TFLOP/s" in out
    assert "no row: mhc_post, vllm-native, T8-H128, T1-H128: ModuleNotFoundError: No module named 'vllm'" in out
    recorded = rows.read_rows(tmp_path / "nvidia-test-9000/microbench.jsonl")
    assert {r["provider"] for r in recorded} == {"ours", "pytorch", "pytorch-graph", "unfused"}
    assert {r["case"] for r in recorded} == {"T1-H128", "T8-H128"}
    assert {r["commit"] for r in recorded} == {"abc"}
    summary = json.loads((tmp_path / rows.SUMMARY).read_text(encoding="utf-8"))
    assert summary == rows.summarise(tmp_path, ROOT / "docs/resources.md")
    assert len(summary["rows"]) == len(recorded)
    table = next(line for line in out.splitlines() if line.startswith("T8-H128") and " pytorch " in line)
    assert table.split()[2] == "40.00"
    assert table.split()[5] == "4.00", "times ours"


SCRIPT = """
import json, os, pathlib, sys
from deepinfer_sm80.bench import rows
journal = next(pathlib.Path(a.partition("=")[2]) for a in sys.argv if a.startswith("--journal="))
done = len(rows.read_rows(journal))
case = ["mhc_post", f"T{(1, 8)[min(done, 1)]}-H128"]
rows.append_line(journal, {"begun": case})
if done == 0:
    os._exit(11)
rows.append_line(journal, {"ended": case, "rows": [json.loads(os.environ["ROW"])], "left_out": []})
"""


def test_another_process_goes_on_where_one_died(small, tmp_path, capsys, monkeypatch):
    """The case in which it died lacks its row, which the exit code says; the other case has one."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT, encoding="utf-8")
    monkeypatch.setenv("ROW", json.dumps(row(case="T8-H128")))
    monkeypatch.setattr(sys, "argv", [str(script)])
    module = load(BENCHMARKS / "microbench.py")
    monkeypatch.setattr(module, "torch_sees_a_gpu", lambda: True)
    assert module.main(["mhc_post"], "", ["--results", str(tmp_path / "results"), "--json"]) == 1
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    assert [r["case"] for r in found["rows"]] == ["T8-H128"]
    lost = {"op": "mhc_post", "case": "T1-H128", "provider": "ours", "reason": "its process ended"}
    assert found["left_out"] == [lost]
    assert "ended with 11; another goes on" in captured.err
    assert "ours: 1 of 2 cases have a row" in captured.err


def test_a_process_that_begins_nothing_is_not_repeated(small, tmp_path, capsys, monkeypatch):
    script = tmp_path / "script.py"
    script.write_text("raise SystemExit(3)", encoding="utf-8")
    monkeypatch.setattr(sys, "argv", [str(script)])
    module = load(BENCHMARKS / "microbench.py")
    monkeypatch.setattr(module, "torch_sees_a_gpu", lambda: True)
    before = signal.getsignal(signal.SIGTERM)
    assert module.main(["mhc_post"], "", ["--results", str(tmp_path / "results")]) == 1
    assert signal.getsignal(signal.SIGTERM) is before
    assert "it did not begin" in capsys.readouterr().out


def test_quick_records_nothing(small, tmp_path, capsys):
    script = load(BENCHMARKS / "microbench_sm80_part2.py")
    arguments = ["--results", str(tmp_path), "--lowering", "native", "--quick", "--json"]
    device = fake_device.FakeDevice(l2_bytes=1)
    assert script.main(script.OPERATORS, script.__doc__, arguments, device) == 0
    found = json.loads(capsys.readouterr().out)
    assert {r["case"] for r in found["rows"]} == {"T8-H128"}
    assert not list(tmp_path.iterdir())


def test_a_run_in_which_nothing_of_ours_agrees_fails(small, tmp_path, monkeypatch):
    script = load(BENCHMARKS / "microbench_sm80_part2.py")
    monkeypatch.setattr(runner.measure, "measure", lambda *_: Outcome())
    arguments = ["--results", str(tmp_path), "--lowering", "native"]
    assert script.main(script.OPERATORS, script.__doc__, arguments, fake_device.FakeDevice()) == 1


@pytest.mark.parametrize("change", [{"gate": False}, {"gate": "true"}, {"gate": None}])
def test_a_row_without_the_gate_is_not_written(change, tmp_path):
    with pytest.raises(BenchmarkError, match="gate"):
        rows.append_rows(tmp_path, [row(), row(**change)])
    assert not list(tmp_path.iterdir())


def test_a_row_without_a_key_is_not_written(tmp_path):
    lacking = row()
    del lacking["driver"]
    with pytest.raises(BenchmarkError, match="without driver"):
        rows.append_rows(tmp_path, [lacking])


def test_the_summary_keeps_the_latest_row_of_each_gpu(tmp_path):
    rows.append_rows(tmp_path, [row(p50_us=10.0), row(p50_us=9.0), row(gpu="NVIDIA A100", p50_us=20.0)])
    rows.append_rows(tmp_path, [row(p50_us=8.0), row(lowering="native", p50_us=7.0)])
    found = rows.summarise(tmp_path, ROOT / "docs/resources.md")["rows"]
    assert [(r["gpu"], r["lowering"], r["p50_us"]) for r in found] == [
        ("NVIDIA A100", "sm80", 20.0),
        ("NVIDIA Test 9000", "native", 7.0),
        ("NVIDIA Test 9000", "sm80", 8.0),
    ]


def test_baseline_arithmetic():
    baseline = [row(p50_us=99.0), row(p50_us=10.0), row(case="T8", p50_us=10.0), row(provider="vllm", p50_us=1.0)]
    assert rows.regressions([row(p50_us=11.49)], baseline) == ([], 1)
    slower, compared = rows.regressions([row(p50_us=11.5), row(case="T8", p50_us=9.0)], baseline)
    assert compared == 2
    assert slower == ["mhc_post T1-H5120: 11.50 us, +15.0% against 10.00 us (allowed: below +15%)"]
    assert rows.regressions([row(gpu="NVIDIA A100", p50_us=50.0)], baseline) == ([], 0)
    assert rows.regressions([row(provider="vllm", p50_us=50.0)], baseline) == ([], 0)


def bench(device=None, against=None, **options):
    chosen = {"family": "mhc", "op": None, "against": against, "quick": True, "lowering": "native", "json": False}
    return bench_command.run(argparse.Namespace(**(chosen | options)), device)


@pytest.mark.parametrize(("cost", "code"), [(11.49, 0), (11.5, 1)])
def test_bench_fails_at_fifteen_per_cent(cost, code, small, tmp_path, capsys):
    known = row(case="T8-H128", lowering="native", p50_us=10.0)
    rows.append_rows(tmp_path, [known])
    device = fake_device.FakeDevice([cost], l2_bytes=1)
    assert bench(device, tmp_path / "nvidia-test-9000/microbench.jsonl") == code
    assert f"1 rows of ours have a baseline in {tmp_path}" in capsys.readouterr().out
    assert bench(device, tmp_path / "nvidia-test-9000/microbench.jsonl", json=True) == code
    assert len(json.loads(capsys.readouterr().out)["slower"]) == code


def test_bench_on_a_gpu_that_is_lost_shows_what_there_is_and_fails(small, capsys):
    device = fake_device.FakeDevice(l2_bytes=1)
    device.alive = lambda: False
    assert bench(device) == 1
    assert "T8-H128" in capsys.readouterr().out


def test_a_reason_is_said_once_as_it_comes(small, tmp_path, capsys):
    script = load(BENCHMARKS / "microbench_sm80_part2.py")
    arguments = ["--results", str(tmp_path), "--lowering", "native"]
    assert script.main(script.OPERATORS, script.__doc__, arguments, fake_device.FakeDevice(l2_bytes=1)) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("no row: mhc_post, vllm-native")]
    assert [line.split(":")[1].split(",")[2:] for line in lines] == [[" T8-H128"], [" T8-H128", " T1-H128"]]


def test_bench_without_a_baseline_reports(small, capsys):
    assert bench(fake_device.FakeDevice(l2_bytes=1)) == 0
    assert "no baseline was named" in capsys.readouterr().out


def test_bench_without_a_gpu(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(bench_command, "torch_sees_a_gpu", lambda: False)
    assert cli.main(["bench", "mhc"]) == 0
    assert capsys.readouterr().out == "No GPU is visible here: nothing was timed and nothing was recorded.\n"
    rows.append_rows(tmp_path, [row()])
    baseline = str(tmp_path / "nvidia-test-9000/microbench.jsonl")
    assert cli.main(["bench", "mhc", "--against", baseline]) == 1, "a comparison that did not happen is no pass"
    assert cli.main(["bench", "mhc", "--against", str(tmp_path / "absent")]) == 2
    assert "Name another file." in capsys.readouterr().err


def test_a_baseline_is_a_recorded_file_or_what_bench_printed(tmp_path):
    rows.append_rows(tmp_path, [row()])
    recorded = tmp_path / "nvidia-test-9000/microbench.jsonl"
    printed = tmp_path / "printed.json"
    printed.write_text(json.dumps({"gpu": "x", "rows": [row()], "slower": []}, indent=1))
    assert rows.read_baseline(recorded) == rows.read_baseline(printed) == [row()]
    for text, found in (("", "no row"), ('{"op": "mhc_post"}', "a row without gpu"), ("[1]", "a list among them")):
        printed.write_text(text)
        with pytest.raises(BenchmarkError, match=f"must be a file of rows, .*, found {found}.*Name another file"):
            rows.read_baseline(printed)


@pytest.mark.parametrize(
    ("wanted", "real", "name"),
    [("native", (8, 0), "sm80"), (None, (8, 0), "sm80"), ("sm80", (8, 0), "sm80"), (None, (8, 6), "sm86")],
)
def test_an_ampere_gpu_is_its_own_lowering(wanted, real, name):
    assert lowering.enter(wanted, real) == name


def test_lowering_for_another_ampere_gpu_is_refused():
    with pytest.raises(BenchmarkError, match="sm80 or native on this GPU"):
        lowering.enter("sm86", (8, 0))


def test_lowering_on_a_newer_gpu_takes_the_aid_or_says_what_is_missing(monkeypatch, tmp_path):
    monkeypatch.delenv("AMPERE_DISGUISE", raising=False)
    monkeypatch.delitem(sys.modules, "ampere_disguise", raising=False)
    assert lowering.enter(None, (9, 0)) == "native"
    with pytest.raises(BenchmarkError, match="No module named 'ampere_disguise'"):
        lowering.enter("sm80", (9, 0))
    (tmp_path / "ampere_disguise.py").write_text(
        "import os\nseen = []\ndef apply(): seen.append(os.environ['AMPERE_DISGUISE'])\n", encoding="utf-8"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("AMPERE_DISGUISE", "8.6")
    assert lowering.enter("sm86", (9, 0)) == "sm86"
    assert sys.modules["ampere_disguise"].seen == ["8.6"]
    with pytest.raises(BenchmarkError, match=r"8\.0 for --lowering sm80"):
        lowering.enter("sm80", (9, 0))
    with pytest.raises(BenchmarkError, match="unset for --lowering native"):
        lowering.enter("native", (9, 0))
    monkeypatch.delitem(sys.modules, "ampere_disguise", raising=False)
