"""A stage's process: its result is kept, a failure is a failure, and no result outlives the run that made it."""

import argparse
import importlib.util
import json
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
if name != "dies":
    (out / f".{name}.json").write_text(json.dumps({"ok": name == "right", "facts": {"tokens": 64}, "error": "wrong"}))
sys.exit(3 if name == "dies" else 0)
"""


@pytest.fixture
def running():
    spec = importlib.util.spec_from_file_location("running", PLACE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


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
    said = refusal(running.require_folder, capsys, "--out", tmp_path / "config.json")
    assert "--out must be a folder that can be written, found" in said
    assert "(file exists): name another" in said
