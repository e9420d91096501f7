"""The gate itself: with CI set, a test that skips or is expected to fail fails the run, and the count is printed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

CONFTEST = Path(__file__).parents[1] / "conftest.py"
PASSES = "def test_it():\n    assert True\n"
HOLES = {
    "skipped": "import pytest\n\ndef test_it():\n    getattr(pytest, 'skip')('no')\n",
    "expected failure": "import pytest\n\ndef test_it():\n    getattr(pytest, 'xfail')('no')\n",
}


def run(directory, source, ci):
    (directory / "conftest.py").write_text(CONFTEST.read_text(encoding="utf-8"), encoding="utf-8")
    (directory / "test_it.py").write_text(source, encoding="utf-8")
    environment = {name: value for name, value in os.environ.items() if name not in ("CI", "PYTEST_ADDOPTS")}
    command = [sys.executable, "-m", "pytest", "-q", "-c", os.devnull, "--rootdir", directory, directory]
    done = subprocess.run(command, capture_output=True, text=True, env=environment | ({"CI": "true"} if ci else {}))
    return done.returncode, done.stdout


@pytest.mark.parametrize("hole", HOLES)
def test_a_hole_fails_the_gate(tmp_path, hole):
    code, out = run(tmp_path, HOLES[hole], ci=True)
    assert code == 1
    assert "skipped tests: 1" in out


def test_without_a_hole_it_passes(tmp_path):
    code, out = run(tmp_path, PASSES, ci=True)
    assert code == 0
    assert "skipped tests: 0" in out


def test_elsewhere_a_hole_is_only_counted(tmp_path):
    code, out = run(tmp_path, HOLES["skipped"], ci=False)
    assert code == 0
    assert "skipped tests: 1" in out
