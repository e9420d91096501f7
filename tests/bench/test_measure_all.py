"""One call that measures everything ends by itself, whatever its jobs do; rehearsed with processes that are none."""

import importlib.util
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from deepinfer_sm80 import hardware
from deepinfer_sm80.hardware import Gpu

ROOT = Path(__file__).parents[2]
HOPPER, AMPERE = Gpu("NVIDIA Test", (9, 0), 1 << 30), Gpu("NVIDIA A100", (8, 0), 1 << 30)


@pytest.fixture
def script():
    spec = importlib.util.spec_from_file_location("measure_all", ROOT / "benchmarks/measure_all.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def given(tmp_path, *more):
    return ["--results", str(tmp_path / "results"), "--logs", str(tmp_path / "logs"), *more]


def python(text):
    return lambda seconds: [sys.executable, "-c", text]


def job(script, name, text, weight=1):
    return script.Job(name, weight, python(text))


def start(script, monkeypatch, lanes, gpus=1, gpu=HOPPER):
    monkeypatch.setattr(script.hardware, "current_gpu", lambda index=0: gpu if index < gpus else None)
    monkeypatch.setattr(script, "jobs", lambda *_: lanes)


HANGS = """
import os, subprocess, sys, time, signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open(os.environ["NOTE"], "w").write(str(child.pid))
print("waiting for ever", flush=True)
time.sleep(600)
"""


def is_gone(pid):
    """Ended, although nobody may have asked for its exit code."""
    for _ in range(50):
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.1)
    return False


def test_a_job_that_hangs_is_ended_with_its_children_and_the_next_one_runs(script, monkeypatch, tmp_path, capsys):
    note = tmp_path / "child"
    monkeypatch.setenv("NOTE", str(note))
    monkeypatch.setattr(script, "LEAST_S", 0.1)
    lane = [
        job(script, "hangs", HANGS),
        job(script, "works", "print('good')"),
        job(script, "fails", "raise SystemExit(3)"),
    ]
    start(script, monkeypatch, ([], lane))
    begin = time.monotonic()
    assert script.main(given(tmp_path, "--seconds", "9")) == 1
    assert time.monotonic() - begin < 9 + 4
    assert is_gone(int(note.read_text()))
    out = capsys.readouterr().out
    assert "hangs: ended: its time was over" in out
    assert "waiting for ever" in out
    assert "works: done" in out
    assert "fails: FAILED with 3" in out
    assert (tmp_path / "results/sm80_benchmark_summary.json").exists()


def test_two_gpus_have_a_lane_each(script, monkeypatch, tmp_path, capsys):
    show = "import os; print('on GPU', os.environ['CUDA_VISIBLE_DEVICES'])"
    start(script, monkeypatch, ([job(script, "steps", show)], [job(script, "operators", show)]), gpus=2)
    assert script.main(given(tmp_path)) == 0
    assert (tmp_path / "logs/steps.log").read_text() == "on GPU 0\n"
    assert (tmp_path / "logs/operators.log").read_text() == "on GPU 1\n"


def test_time_that_a_job_leaves_goes_to_the_others(script, tmp_path):
    budgets = []

    def noted(seconds):
        budgets.append(seconds)
        return [sys.executable, "-c", ""]

    lane = [script.Job(name, weight, noted) for name, weight in (("a", 1), ("b", 1), ("c", 2))]
    script.run_lane(lane, time.monotonic() + 400, tmp_path, dict(os.environ))
    assert budgets == pytest.approx([100, 400 / 3, 400], abs=20)
    assert script.run_lane(lane, time.monotonic() + 1, tmp_path, dict(os.environ)) == dict.fromkeys("abc")


def names(lanes):
    return [[job.name for job in lane] for lane in lanes]


def test_what_is_measured_depends_on_the_gpu_and_on_the_aid(script, tmp_path):
    import argparse

    args = argparse.Namespace(model=tmp_path, results=tmp_path, commit="abc")
    steps, operators = script.jobs(args, False, True)
    assert names((steps, operators)) == [["step-kernels", "step-stock"], ["operators-sm80", "operators-native"]]
    assert {"--capability=8.0", "--arm=kernels", "--commit=abc", "--limit=90"} <= set(steps[0].command(90))
    assert "--capability=8.0" not in steps[1].command(90)
    assert {"--lowering=sm80", "--seconds=65", f"--results={tmp_path}"} <= set(operators[0].command(90))
    assert names(script.jobs(args, True, False)) == [["step-kernels"], ["operators-native"]]
    assert names(script.jobs(args, False, False)) == [["step-stock"], ["operators-native"]]
    args.model = None
    assert names(script.jobs(args, False, True)) == [[], ["operators-sm80", "operators-native"]]


def test_the_scripts_take_what_they_are_given(script, monkeypatch, tmp_path):
    """The command lines are parsed by the scripts themselves."""
    import argparse

    for folder in ("benchmarks", "benchmarks/serving"):
        monkeypatch.syspath_prepend(str(ROOT / folder))
    monkeypatch.setattr(importlib.import_module("running"), "require_engine", lambda parser: None)
    (tmp_path / "config.json").touch()
    args = argparse.Namespace(model=tmp_path, results=tmp_path, commit="abc")
    for lane in script.jobs(args, False, True):
        for one in lane:
            path, *options = one.command(100)[1:]
            spec = importlib.util.spec_from_file_location(Path(path).stem, path)
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            parsed = module.parse(["mhc_post"], "", options) if "microbench" in path else module.parse(options)
            assert (parsed.commit, parsed.results) == ("abc", tmp_path)


def test_a_model_that_is_no_checkpoint_is_said_before_anything_is_measured(script, tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        script.main(["--model", str(tmp_path)])
    assert ended.value.code == 2
    assert f"--model must be the folder of a checkpoint, found {tmp_path}, which has no" in capsys.readouterr().err


def test_without_a_gpu_one_line(script, monkeypatch, capsys):
    monkeypatch.setattr(hardware, "current_gpu", lambda index=0: None)
    assert script.main([]) == 1
    assert capsys.readouterr().out == "No GPU is visible here: nothing was measured.\n"


DRIVER = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("measure_all", sys.argv.pop(1))
script = importlib.util.module_from_spec(spec)
spec.loader.exec_module(script)
card = script.hardware.Gpu("NVIDIA Test", (9, 0), 1 << 30)
script.hardware.current_gpu = lambda index=0: card if index < 2 else None
waits = '''
import os, pathlib, time
pathlib.Path(os.environ["NOTE"] + os.environ["CUDA_VISIBLE_DEVICES"]).write_text(str(os.getpid()))
time.sleep(60)
'''
lane = [script.Job(name, 1, lambda seconds: [sys.executable, "-c", waits]) for name in ("first", "second")]
script.jobs = lambda *given: (lane, lane)
script.entry()
"""


def test_told_to_end_it_ends_its_jobs_and_begins_no_others(tmp_path):
    command = [sys.executable, "-c", DRIVER, str(ROOT / "benchmarks/measure_all.py"), *given(tmp_path)]
    process = subprocess.Popen(
        command, env={**os.environ, "NOTE": str(tmp_path / "job"), "CUDA_VISIBLE_DEVICES": "0,1"}
    )
    notes = [tmp_path / "job0", tmp_path / "job1"]
    for _ in range(300):
        if all(note.exists() and note.read_text() for note in notes):
            break
        time.sleep(0.1)
    jobs = [int(note.read_text()) for note in notes]
    process.terminate()
    assert process.wait(20) == 128 + signal.SIGTERM
    assert all(map(is_gone, jobs))
    time.sleep(0.5)
    assert [int(note.read_text()) for note in notes] == jobs, "the second job of a lane began"
