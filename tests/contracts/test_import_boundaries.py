"""What importing a module loads. Fresh interpreters, many modules in each."""

import os
import subprocess
import sys

import pytest

from deepinfer_sm80.cli import COMMANDS
from deepinfer_sm80.ops import OPS

HEAVY = "torch triton tilelang vllm numpy tokenizers safetensors transformers"
ROOMS = [f"deepinfer_sm80.ops.{family}.{op}" for op, family in OPS.items()]
LIGHT = [
    "deepinfer_sm80",
    "deepinfer_sm80.errors",
    "deepinfer_sm80.envs",
    "deepinfer_sm80.hardware",
    "deepinfer_sm80.ops",
    "deepinfer_sm80.ops.contract",
    "deepinfer_sm80.model.config",
    "deepinfer_sm80.model.schema",
    "deepinfer_sm80.model.engram_hash",
    "deepinfer_sm80.vllm_plugin",
    "deepinfer_sm80.vllm_plugin.activation",
    "deepinfer_sm80.cli",
    *(f"deepinfer_sm80.cli.{module}" for module in COMMANDS.values()),
]


def loaded_by(modules, forbidden):
    """Names of ``forbidden`` (a package stands for all below it) that are loaded after importing ``modules``."""
    code = (
        "import importlib, sys\n"
        f"for name in {modules!r}: importlib.import_module(name)\n"
        f"print(*(m for m in sorted(sys.modules) for f in {forbidden.split()!r} if m == f or m.startswith(f + '.')))"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr.strip()[-800:]
    return done.stdout.split()


def test_light_modules_load_nothing_heavy():
    assert not loaded_by(LIGHT, HEAVY)


def test_the_probe_sees_what_is_loaded():
    assert "torch" in loaded_by(["deepinfer_sm80.ops.checks", "torch"], "torch")


@pytest.mark.parametrize(
    ("file", "forbidden"),
    [
        ("reference", "triton.language tilelang vllm deepinfer_sm80.vllm_plugin"),
        ("launch", "vllm deepinfer_sm80.vllm_plugin"),
    ],
)
def test_rooms_do_not_load_each_others_side(file, forbidden):
    other = {"reference": ("launch", "device", "tuning"), "launch": ("reference",)}[file]
    loaded = loaded_by([f"{room}.{file}" for room in ROOMS], f"{forbidden} deepinfer_sm80.ops")
    assert {f"{room}.{file}" for room in ROOMS} <= set(loaded), "the probe must have imported every room"
    wrong = [name for name in loaded if name.split(".")[-1] in other or not name.startswith("deepinfer_sm80.ops")]
    assert not wrong, f"importing every {file}.py loads {wrong}"


def test_cuda_stays_asleep():
    code = (
        "import sys, importlib, torch\n"
        f"for name in {[f'{room}.launch' for room in ROOMS]!r}: importlib.import_module(name)\n"
        "sys.exit(torch.cuda.is_initialized())"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    assert subprocess.run([sys.executable, "-c", code], env=environment).returncode == 0
