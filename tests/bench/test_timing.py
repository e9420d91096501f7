"""Stages on one GPU take their times one after the other, and not while another one starts up."""

import importlib.util
import select
import subprocess
import sys
from pathlib import Path

PLACE = Path(__file__).parents[2] / "benchmarks/serving/timing.py"
STAGE = f"""
import sys
sys.path.insert(0, {str(PLACE.parent)!r})
import timing
with timing.turn(alone=sys.argv[1] == "alone"):
    print("in", flush=True)
    sys.stdin.readline()
"""


def load():
    spec = importlib.util.spec_from_file_location("timing", PLACE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def begin(kind, turn):
    return subprocess.Popen(
        [sys.executable, "-c", STAGE, kind],
        env={"PROVE_TURN": str(turn)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def end(process):
    process.communicate("\n", timeout=20)
    assert process.returncode == 0


def has_to_wait(process):
    return not select.select([process.stdout], [], [], 0.7)[0]


def test_many_start_up_together_and_one_measures_alone(tmp_path):
    turn = tmp_path / "turn"
    starting = [begin("together", turn) for _ in range(2)]
    assert [process.stdout.readline() for process in starting] == ["in\n", "in\n"]
    measuring = begin("alone", turn)
    assert has_to_wait(measuring)
    end(starting[0])
    assert has_to_wait(measuring)
    end(starting[1])
    assert measuring.stdout.readline() == "in\n"
    late = [begin("alone", turn), begin("together", turn)]
    assert all(has_to_wait(process) for process in late)
    end(measuring)
    for process in late:  # either may have its turn first
        process.stdin.write("\n")
        process.stdin.flush()
    for process in late:
        end(process)


def test_without_a_file_nobody_waits(monkeypatch):
    monkeypatch.delenv("PROVE_TURN", raising=False)
    timing = load()
    with timing.turn(alone=True), timing.turn(alone=True):
        pass
