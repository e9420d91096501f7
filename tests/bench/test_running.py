"""A stage's process: its result is kept, a failure is a failure, and no result outlives the run that made it."""

import argparse
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

PLACE = Path(__file__).parents[2] / "benchmarks/serving/running.py"
STAGE = """
import json, pathlib, sys
out = pathlib.Path(sys.argv[sys.argv.index("--out") + 1])
name = sys.argv[sys.argv.index("--inside") + 1]
print("INFO DeepInfer-SM80: 40 Triton kernels ready in 6.1 s on 16 cores." if name == "right" else "", flush=True)
if name == "hangs":
    import time; time.sleep(60)
if name not in ("dies", "silent"):
    (out / f".{name}.json").write_text(json.dumps({"ok": name == "right", "facts": {"tokens": 64}, "error": "wrong"}))
sys.exit(3 if name == "dies" else 0)
"""


@pytest.fixture
def running():
    spec = importlib.util.spec_from_file_location("running", PLACE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("script", ["prove_multi_gpu", "prove_ampere"])
def test_a_page_of_a_folder_without_results_is_refused_and_no_folder_is_made(script, tmp_path):
    place = tmp_path / "nowhere"
    command = [sys.executable, str(PLACE.with_name(f"{script}.py")), "--report", "--out", str(place)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    assert f"--report needs a folder with results, found none in {place}" in done.stderr
    assert not place.exists()


def test_results_are_kept_and_judged(running, tmp_path, capsys):
    script = tmp_path / "stage.py"
    script.write_text(STAGE)
    args = argparse.Namespace(model="m", out=tmp_path, again=False, commit="abc", tail=3)
    assert running.run_process(str(script), "right", args, {}, gpus=2) == 0
    kept = json.loads((tmp_path / "right.json").read_text())
    assert (kept["ok"], kept["commit"], kept["gpus"], kept["facts"]) == (
        True,
        "abc",
        2,
        {"tokens": 64, "our_kernels": 40, "ready_s": 6.1},
    )
    assert [path.name for path in tmp_path.glob(".*")] == [], "what the process said is complete or not there"
    assert "tokens 64" in capsys.readouterr().out
    assert running.run_process(str(script), "right", args, {}) == 0
    assert "done before" in capsys.readouterr().out
    assert running.run_process(str(script), "wrong", args, {}) == 1


def test_a_process_that_dies_does_not_show_an_older_result(running, tmp_path):
    script = tmp_path / "stage.py"
    script.write_text(STAGE)
    (tmp_path / "dies.json").write_text(json.dumps({"ok": False, "error": "of last week"}))
    args = argparse.Namespace(model="m", out=tmp_path, again=False, commit="abc", tail=3)
    assert running.run_process(str(script), "dies", args, {}) == 1
    assert json.loads((tmp_path / "dies.json").read_text())["error"] == "exit code 3, no result"


@pytest.mark.parametrize(("name", "ended"), [("dies", "exit code 3"), ("silent", "exit code 0")])
def test_what_an_earlier_process_said_is_no_answer(running, tmp_path, name, ended):
    """One that was stopped between its word and its end leaves the hidden file, which says that all is well."""
    script = tmp_path / "stage.py"
    script.write_text(STAGE)
    earlier = {"ok": True, "facts": {"tokens": 1}, "error": ""}
    (tmp_path / f".{name}.json").write_text(json.dumps(earlier))
    args = argparse.Namespace(model="m", out=tmp_path, again=False, commit="abc", tail=3)
    assert running.run_process(str(script), name, args, {}) == 1
    kept = json.loads((tmp_path / f"{name}.json").read_text())
    assert (kept["ok"], kept["error"], "facts" in kept) == (False, f"{ended}, no result", False)


def test_a_run_that_is_interrupted_leaves_no_older_result(running, tmp_path, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    (tmp_path / "right.json").write_text(json.dumps({"ok": False, "error": "of last week"}))
    monkeypatch.setattr(running.subprocess, "run", interrupted)
    args = argparse.Namespace(model="m", out=tmp_path, again=False, commit="abc", tail=3)
    with pytest.raises(KeyboardInterrupt):
        running.run_process("stage.py", "right", args, {})
    assert list(tmp_path.glob("*.json")) == []


@pytest.mark.parametrize(("name", "again", "calls"), [("right", False, 1), ("right", True, 2), ("wrong", False, 2)])
def test_only_what_went_well_is_not_repeated_and_that_too_when_asked(running, tmp_path, name, again, calls):
    script = tmp_path / "stage.py"
    script.write_text(STAGE)
    args = argparse.Namespace(model="m", out=tmp_path, again=again, commit="first", tail=3)
    running.run_process(str(script), name, args, {})
    args.commit = "second"
    running.run_process(str(script), name, args, {"PROVE_SHARED_GPU": "1"})
    kept = json.loads((tmp_path / f"{name}.json").read_text())
    assert (kept["commit"], kept["shared_gpu"]) == (("first", False) if calls == 1 else ("second", True))


def test_a_process_that_says_ok_and_then_fails_has_failed(running, tmp_path):
    """An engine that breaks while it is taken down has written its result before."""
    script = tmp_path / "stage.py"
    script.write_text(STAGE.replace('3 if name == "dies" else 0', "5"))
    args = argparse.Namespace(model="m", out=tmp_path, again=False, commit="abc", tail=3)
    assert running.run_process(str(script), "right", args, {}) == 1
    kept = json.loads((tmp_path / "right.json").read_text())
    assert (kept["ok"], kept["facts"]["tokens"]) == (False, 64)


def test_a_process_that_hangs_is_stopped_at_the_limit(running, tmp_path):
    script = tmp_path / "stage.py"
    script.write_text(STAGE)
    args = argparse.Namespace(model="m", out=tmp_path, again=False, commit="abc", tail=3, limit=1)
    assert running.run_process(str(script), "hangs", args, {}) == 1
    found = json.loads((tmp_path / "hangs.json").read_text())
    assert found["error"] == "stopped after 1 s, no result"
    assert found["wall_s"] < 30


def refusal(check, capsys, *given):
    parser = argparse.ArgumentParser(prog="prove.py")
    with pytest.raises(SystemExit) as ended:
        check(parser, *given)
    assert ended.value.code == 2
    return capsys.readouterr().err.splitlines()[-1]


def test_what_every_stage_needs_is_asked_for_once(running, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(running, "find_spec", lambda name: None)
    assert "need vLLM 0.33.0, which cannot be imported here" in refusal(running.require_engine, capsys)
    said = refusal(running.require_checkpoint, capsys, None)
    assert "--model must be the folder of a checkpoint, found nothing: write one with" in said
    said = refusal(running.require_checkpoint, capsys, tmp_path)
    assert f"found {tmp_path}, which has no config.json" in said
    (tmp_path / "config.json").touch()
    running.require_checkpoint(argparse.ArgumentParser(), tmp_path)
