"""A server that is started, watched and ended: what becomes of one that never answers, and of what it started."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from deepinfer_sm80.errors import ServeError
from deepinfer_sm80.testing import served

FAKE = Path(__file__).parents[1] / "bench/fake_vllm.py"
SILENT = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("child", child.pid, "interpret", os.environ.get("TRITON_INTERPRET"), flush=True)
time.sleep(600)
"""


def alive(number):
    """Whether the process runs: a dead one that nobody has waited for is a zombie."""
    try:
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_one_that_never_answers_is_ended_with_all_it_started(monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(served, "SILENCE", 0.2)
    said, log = [], tmp_path / "log"
    server = served.Server(Path("tiny"), log, command=(sys.executable, "-c", SILENT), limit=2.0, progress=said.append)
    with pytest.raises(ServeError, match=r"did not answer; it must answer within 2 seconds.*doctor") as caught, server:
        pass
    words = log.read_text().split()
    assert words[2:] == ["interpret", "None"], "vLLM compiles its kernels, whatever this process does"
    assert log.read_text().strip() in str(caught.value)
    assert said[0].startswith("vLLM is starting")
    assert server.process.poll() is not None
    deadline = time.monotonic() + 5
    while alive(int(words[1])) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive(int(words[1]))


def test_an_error_inside_the_block_ends_it(tmp_path):
    server = served.Server(Path("tiny"), tmp_path / "log", command=(sys.executable, str(FAKE)))

    def fail():
        with server:
            assert server.process.poll() is None
            assert os.getpgid(server.process.pid) == server.process.pid
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert server.process.poll() is not None


def test_a_server_ends_with_the_process_that_started_it_even_if_that_is_killed(tmp_path):
    """As when a stage is stopped at its time limit."""
    parent = tmp_path / "parent.py"
    parent.write_text(
        "import pathlib, sys\n"
        "from deepinfer_sm80.testing.served import Server\n"
        f"command = (sys.executable, {str(FAKE)!r})\n"
        f"with Server(pathlib.Path('tiny'), pathlib.Path({str(tmp_path / 'log')!r}), command=command) as server:\n"
        "    print(server.process.pid, flush=True)\n"
        "    sys.stdin.read()\n"
    )
    started = subprocess.Popen([sys.executable, str(parent)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    server = int(started.stdout.readline())
    started.kill()
    started.wait()
    for _ in range(100):
        state = Path(f"/proc/{server}/stat")
        if not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z":
            break
        time.sleep(0.1)
    else:
        os.kill(server, 9)
        pytest.fail("the server was still there ten seconds later")
