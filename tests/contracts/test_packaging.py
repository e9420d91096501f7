"""What pip gets: entry points, extras and files; and that the set-up files agree with each other."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib import import_module
from pathlib import Path

import pytest

import deepinfer_sm80
from deepinfer_sm80.vllm_plugin.window import SUPPORTED_RELEASES

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel as pip builds it, from a copy: setuptools writes into the tree that it builds."""
    tree, out = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    shutil.copytree(ROOT / "src", tree / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", out, tree]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (path,) = out.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        yield archive


def test_wheel_holds_every_source_file_and_the_licence(wheel):
    assert wheel.filename.endswith(f"deepinfer_sm80-{deepinfer_sm80.__version__}-py3-none-any.whl")
    names = set(wheel.namelist())
    sources = {p.relative_to(ROOT / "src").as_posix() for p in (ROOT / "src/deepinfer_sm80").rglob("*.py")}
    assert (
        sources | {f"deepinfer_sm80/{name}" for name in ("py.typed", "model/prose.txt", "model/readout.json")} <= names
    )
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert not [name for name in names if name.startswith(("tests", "benchmarks"))]


def test_wheel_asks_for_nothing_and_registers_the_plugin(wheel):
    text = {name.rpartition("/")[2]: wheel.read(name).decode() for name in wheel.namelist() if ".dist-info/" in name}
    required = [line for line in text["METADATA"].splitlines() if line.startswith("Requires-Dist")]
    assert required, "the extras are listed"
    assert all("extra ==" in line for line in required), "an install beside vLLM must not move its torch or triton"
    assert "License-Expression: Apache-2.0" in text["METADATA"]
    assert "[vllm.general_plugins]\ndeepinfer_sm80 = deepinfer_sm80.vllm_plugin:register" in text["entry_points.txt"]


def test_entry_points_lead_to_functions():
    targets = [*PROJECT["scripts"].values(), *PROJECT["entry-points"]["vllm.general_plugins"].values()]
    assert len(targets) == 2
    for target in targets:
        module, _, name = target.partition(":")
        assert callable(getattr(import_module(module), name))


def test_dev_extra_is_the_list_the_makefile_installs():
    lines = (ROOT / "requirements/test.txt").read_text(encoding="utf-8").splitlines()
    pins = [line.partition("#")[0].strip() for line in lines]
    assert sorted(p for p in pins if p) == sorted(PROJECT["optional-dependencies"]["dev"])
    assert all(re.fullmatch(r"[a-z0-9-]+==[\d.]+", p) for p in pins if p)


def test_the_wheel_that_is_read_is_of_the_supported_release():
    text = (ROOT / "requirements/vllm.txt").read_text(encoding="utf-8")
    (pin,) = re.findall(r"^vllm==([\d.]+)$", text, re.MULTILINE)
    assert tuple(map(int, pin.split("."))) in SUPPORTED_RELEASES


def test_version_has_its_place_in_the_changelog():
    assert f"## {deepinfer_sm80.__version__}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_ci_runs_make_test_and_may_be_executed():
    script = ROOT / ".ci/run"
    assert os.access(script, os.X_OK)
    assert "make test" in script.read_text(encoding="utf-8")


def test_make_says_so_when_python_is_too_old(tmp_path):
    old = tmp_path / "python3"
    old.write_text("#!/bin/sh\n[ \"$1\" = --version ] && echo 'Python 3.9.2' && exit 0\nexit 1\n", encoding="utf-8")
    old.chmod(0o755)
    for tool in ("make", "bash", "sh", "command", "grep", "sed", "expand"):
        if found := shutil.which(tool):
            (tmp_path / tool).symlink_to(found)
    command = ["make", "-C", ROOT, f"VENV={tmp_path}/venv", "lint"]
    done = subprocess.run(command, capture_output=True, text=True, env={"PATH": str(tmp_path), "HOME": str(tmp_path)})
    assert done.returncode != 0
    assert "needs Python 3.11 to 3.14, found Python 3.9.2" in done.stderr
