"""Plausible mistakes, one row each: every one is answered by a single message that says what, what is allowed, what was
found and what to do. Where vLLM, pip or the driver speaks first, the row checks the part that is ours, and says so.
"""

import errno
import importlib
import json
import os
import subprocess
import sys
import tomllib
import types
from dataclasses import dataclass
from pathlib import Path

import pytest

from deepinfer_sm80 import hardware, ops
from deepinfer_sm80.cli import doctor, main, make_checkpoint, needs
from deepinfer_sm80.errors import DeepInferError
from deepinfer_sm80.hardware import Gpu
from deepinfer_sm80.model import checkpoint_target, safetensors_file
from deepinfer_sm80.vllm_plugin import activation, refusal, requirements, weights, window

ROOT = Path(__file__).parents[2]
Space = types.SimpleNamespace


@dataclass(frozen=True)
class Mistake:
    """``make(case)`` returns the message; it must hold every one of ``says``: what, allowed, found, remedy.

    ``ours``: where somebody else stops the user first, what of it is ours.
    """

    name: str
    make: object
    says: tuple[str, str, str, str]
    ours: str = ""


class Case:
    """What a mistake may use: a folder, a small checkpoint to spoil, pytest's monkeypatch, and captured output."""

    def __init__(self, tmp_path, micro, micro_checkpoint, monkeypatch, capsys):
        self.folder, self.micro, self.patch, self.capsys = tmp_path, micro, monkeypatch, capsys
        self._checkpoint = micro_checkpoint

    def command(self, *words):
        """The one line on stderr of ``deepinfer-sm80 words``, which must end with code 2."""
        assert main([str(word) for word in words]) == 2
        (line,) = self.capsys.readouterr().err.splitlines()
        return line

    def verdict(self):
        """What ``deepinfer-sm80 doctor`` concludes, which must be no."""
        assert main(["doctor"]) == 1
        return next(line for line in self.capsys.readouterr().out.splitlines() if line.startswith("verdict"))

    def checkpoint(self, leave_out="", **changes):
        """A copy of the small checkpoint by links, without a file, with keys of config.json replaced."""
        copy = self.folder / "model"
        copy.mkdir()
        for file in self._checkpoint.iterdir():
            if file.name != leave_out:
                os.link(file, copy / file.name)
        if changes:
            config = json.loads((copy / "config.json").read_text()) | changes
            (copy / "config.json").unlink()
            (copy / "config.json").write_text(json.dumps(config))
        return copy


def raised(call, *args, **kwargs):
    with pytest.raises(DeepInferError) as caught:
        call(*args, **kwargs)
    return str(caught.value.args[0])


def wrong_dtype(case):
    arguments = dict(dict(ops.spec("mhc_post").cases("cpu"))["T3-H200"])
    return raised(ops.pytorch("mhc_post"), **{**arguments, "x": arguments["x"].half()})


def wrong_shape(case):
    arguments = dict(dict(ops.spec("mhc_post").cases("cpu"))["T3-H200"])
    return raised(ops.pytorch("mhc_post"), **{**arguments, "post_mix": arguments["post_mix"][:, :3]})


def option(path, value):
    """vLLM's configuration with one value that is not served, up to the requirement that reads it."""

    def make(case):
        names = path.split(".")
        (row,) = [r for r in requirements.REQUIREMENTS if r.option == OPTIONS[path]]
        config = Space()
        place = config
        for name in names[:-1]:
            setattr(place, name, Space())
            place = getattr(place, name)
        setattr(place, names[-1], value)
        case.patch.setattr(requirements, "REQUIREMENTS", (row,))
        return raised(requirements.check_config, config)

    return make


OPTIONS = {
    "parallel_config.tensor_parallel_size": "--tensor-parallel-size",
    "cache_config.cache_dtype": "--kv-cache-dtype",
    "compilation_config.cudagraph_mode": "--compilation-config cudagraph_mode",
}


def other_vllm(case):
    case.patch.setattr(activation, "gpu_capability", lambda: (8, 0))
    for module in (activation, refusal):
        case.patch.setattr(module, "installed_vllm", lambda: "0.32.0")
    return raised(refusal.DeepseekV41ForCausalLM, vllm_config=None)


def image(case):
    names = ["vllm", "models", "deepseek_v41", "common", "mm_preprocess"]
    for count in range(len(names)):
        name = ".".join(names[: count + 1])
        case.patch.setitem(sys.modules, name, types.ModuleType(name))
    sys.modules[name].DeepseekV4VLProcessingInfo = object
    case.patch.delitem(sys.modules, "deepinfer_sm80.vllm_plugin.images", raising=False)
    images = importlib.import_module("deepinfer_sm80.vllm_plugin.images")
    case.patch.delitem(sys.modules, images.__name__)
    return raised(images.TextOnlyProcessingInfo().validate_num_items, "image", 2)


def v4_checkpoint(case):
    return case.command("sensitivity", case.checkpoint(model_type="deepseek_v4"))


def v4_in_vllm(case):
    return raised(weights.model_config, Space(num_hidden_layers=4, compress_ratios=[0, 0, 4, 128, 0, 0, 0]))


def full_disk(case):
    usage = Space(total=2**40, used=2**40 - 10**8, free=10**8)
    case.patch.setattr(checkpoint_target.shutil, "disk_usage", lambda path: usage)
    return case.command("make-checkpoint", case.folder / "model")


def disk_that_fills(case):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    case.patch.setattr(make_checkpoint, "preset", lambda name: case.micro)
    case.patch.setattr(safetensors_file.os, "fsync", full)
    return case.command("make-checkpoint", case.folder / "model")


def read_only(case):
    case.patch.setattr(make_checkpoint, "preset", lambda name: case.micro)

    def refuse(path, *_, **__):
        raise OSError(errno.EROFS, "Read-only file system")

    case.patch.setattr(Path, "mkdir", refuse)
    return case.command("make-checkpoint", case.folder / "model")


def lost_directory(case):
    return case.command("make-checkpoint", case.folder / "chekpoints" / "tiny")


def directory_in_use(case):
    (case.folder / "precious").touch()
    return case.command("make-checkpoint", case.folder)


def no_tokenizer(case):
    return case.command("sensitivity", case.checkpoint(leave_out="tokenizer.json"))


def no_config(case):
    return case.command("sensitivity", case.checkpoint(leave_out="config.json"))


def config_cut_off(case):
    folder = case.checkpoint(leave_out="config.json")
    (folder / "config.json").write_text('{"model_type": ')
    return case.command("sensitivity", folder)


def no_checkpoint(case):
    return case.command("sensitivity", case.folder / "nowhere")


def empty_folder(case):
    (case.folder / "nothing").mkdir()
    return case.command("sensitivity", case.folder / "nothing")


def a_file(case):
    (case.folder / "model.bin").touch()
    return case.command("sensitivity", case.folder / "model.bin")


def shard_cut_off(case):
    folder = case.checkpoint()
    (shard,) = folder.glob("*.safetensors")
    content = shard.read_bytes()[:-1000]
    shard.unlink()
    shard.write_bytes(content)
    return case.command("sensitivity", folder)


def no_torch(case):
    case.patch.setattr(needs, "find_spec", lambda name: None if name == "torch" else True)
    return case.command("demo")


def no_torch_for_a_checkpoint(case):
    case.patch.setattr(needs, "find_spec", lambda name: None if name == "torch" else True)
    return case.command("sensitivity", case.folder)


def no_packages(case):
    case.patch.setitem(sys.modules, "tokenizers", None)
    return case.command("make-checkpoint", case.folder / "model")


def gpu_that_is_not_there(case):
    case.patch.setattr(hardware, "torch_sees_a_gpu", lambda: False)
    return case.command("sensitivity", case.checkpoint(), "--device", "cuda")


def misspelt_operator(case):
    return case.command("verify", "--op", "mhc_pots")


def misspelt_variable(case):
    case.patch.setenv("DEEPINFER_FORCE", "yes")
    return case.command("env")


def misspelt_operator_in_the_environment(case):
    case.patch.setenv("DEEPINFER_PYTORCH_OPERATORS", "mhc_pots")
    ops.launcher.cache_clear()
    said = raised(ops.launcher, "mhc_post")
    assert case.command("env") == f"deepinfer-sm80 env: {said}"
    machine(case)
    assert case.verdict().endswith(f"vLLM would not serve with this package: {said}")
    assert activation.decide((8, 0), "0.33.0").reason == said
    return said


def no_baseline(case):
    return case.command("bench", "mhc", "--against", case.folder / "nowhere")


def a_page_for_a_baseline(case):
    return case.command("bench", "mhc", "--against", ROOT / "docs/sensitivity.md")


def results_of_another_command(case):
    return case.command("bench", "mhc", "--against", ROOT / "benchmarks/results/nvidia-h200/sensitivity-tiny.json")


def operator_of_another_family(case):
    return case.command("bench", "attention", "--op", "mhc_post")


def no_measurement(case):
    return case.command("sensitivity", "--page", case.folder / "nowhere")


def another_measurement(case):
    return case.command("sensitivity", "--page", ROOT / "benchmarks/results/nvidia-h200/verify-sm80.json")


def measurement_into_a_folder(case):
    return case.command("sensitivity", case.folder, "--json", case.folder)


def lowering_without_a_gpu(case):
    case.patch.setattr(hardware, "torch_sees_a_gpu", lambda: False)
    return case.command("verify", "--lowering", "sm86")


def no_compilations(case):
    return case.command("ops", "--resources", "--workers", "0")


def unknown_card(case):
    return case.command("plan", "--gpus", "8xH100")


def machine(case, **has):
    """A machine on which vLLM would serve, but for what ``has`` changes."""
    for name in ("DEEPINFER_FORCE", "DEEPINFER_DISABLE", "VLLM_PLUGINS", "CC", "CUDA_HOME", "CUDA_PATH"):
        case.patch.delenv(name, raising=False)
    gpu = has.get("gpu", Gpu("NVIDIA A100-SXM4-80GB", (8, 0), 80 << 30))
    case.patch.setattr(doctor, "current_gpu", lambda: gpu)
    case.patch.setattr(window, "installed_vllm", lambda: "0.33.0")
    case.patch.setattr(doctor, "entry_points", lambda **kwargs: has.get("entry_points", ("found",)))
    case.patch.setattr(doctor.shutil, "which", lambda name: name in has.get("programs", ("gcc", "nvcc")) or None)
    case.patch.setattr(doctor, "CUDA", str(case.folder))
    case.patch.setattr(doctor, "files", lambda package: [])


def no_nvcc(case):
    machine(case, programs=("gcc",))
    return case.verdict()


def no_c_compiler(case):
    machine(case, programs=("nvcc",))
    return case.verdict()


def newer_gpu(case):
    machine(case, gpu=Gpu("NVIDIA H100", (9, 0), 80 << 30))
    return case.verdict()


def plugin_filtered_out(case):
    machine(case)
    case.patch.setenv("VLLM_PLUGINS", "another")
    return case.verdict()


def old_python(case):
    """pip refuses by this line of the package's metadata; make says it before pip is asked."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["requires-python"] == ">=3.11"
    for name in ("python3", "python3.14", "python3.13", "python3.12", "python3.11"):
        program = case.folder / name
        program.write_text('#!/bin/sh\n[ "$1" = --version ] && echo Python 3.10.12 && exit 0\nexit 1\n')
        program.chmod(0o755)
    environment = {"PATH": f"{case.folder}:/usr/bin:/bin", "HOME": str(case.folder)}
    command = ["make", "-s", "-f", ROOT / "Makefile", "-C", ROOT, f"VENV={case.folder}/venv", "lint"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 2
    return done.stderr.splitlines()[0]


MISTAKES = (
    Mistake("wrong dtype", wrong_dtype, ("mhc_post", "bfloat16", "float16", "must be")),
    Mistake("wrong shape", wrong_shape, ("post_mix", "4", "3", "must be")),
    Mistake(
        "tensor parallelism over 3 GPUs",
        option("parallel_config.tensor_parallel_size", 3),
        ("--tensor-parallel-size", "1 or 2 or 4 or 8", "=3", "divide by these"),
    ),
    Mistake(
        "a bfloat16 KV cache",
        option("cache_config.cache_dtype", "bfloat16"),
        ("--kv-cache-dtype", "auto or fp8", "=bfloat16", "read the 584-byte"),
    ),
    Mistake(
        "full graphs",
        option("compilation_config.cudagraph_mode", Space(name="FULL")),
        ("cudagraph_mode", "FULL_DECODE_ONLY", "=FULL:", "driven by the host"),
    ),
    Mistake("vLLM 0.32", other_vllm, ("vLLM", "== 0.33.0", "found vLLM 0.32.0", "pip install")),
    Mistake("an image in the prompt", image, ("text only", "allowed is 0", "holds 2 image(s)", "Remove the image")),
    Mistake(
        "a V4 checkpoint", v4_checkpoint, ("model_type", "'deepseek_v41'", "'deepseek_v4'", "Pass a DeepSeek-V4.1")
    ),
    Mistake(
        "a V4 checkpoint under V4.1's name",
        v4_in_vllm,
        ("compress_ratios", "1 and 2", "found [0, 4, 128]", "belongs to the checkpoint"),
        ours="a checkpoint that calls itself V4 gets vLLM's own class; one that claims V4.1 gets this",
    ),
    Mistake("a full disk", full_disk, ("model", "needs 1.03 GB", "0.10 GB free", "Free some space")),
    Mistake(
        "a disk that fills", disk_that_fills, ("could not be written", "No space left", "nothing was", "Free some")
    ),
    Mistake("a read-only directory", read_only, ("could not be written", "Read-only", "nothing was", "may write")),
    Mistake("a directory above is misspelt", lost_directory, ("tiny", "would be", "does not exist", "mkdir -p")),
    Mistake("a directory in use", directory_in_use, ("Checkpoint", "empty", "not empty", "name another")),
    Mistake(
        "no tokenizer",
        no_tokenizer,
        ("Checkpoint", "tokenizer.json", "there is no", "Download it again"),
        ours="vllm serve loads the tokenizer through transformers, which speaks first; our own commands say this",
    ),
    Mistake("no config.json", no_config, ("Checkpoint", "config.json", "there is no", "Download it again")),
    Mistake("config.json cut off", config_cut_off, ("config.json", "JSON", "line 1", "Download it again")),
    Mistake("no checkpoint", no_checkpoint, ("nowhere", "*.safetensors", "no such directory", "make-checkpoint")),
    Mistake("an empty directory", empty_folder, ("nothing", "*.safetensors", "files here. ", "make-checkpoint")),
    Mistake("a file, not a directory", a_file, ("model.bin", "*.safetensors", "it is a file", "make-checkpoint")),
    Mistake("a shard cut off", shard_cut_off, ("safetensors", "bytes", "", "Download")),
    Mistake("no torch", no_torch, ("demo", "torch", "not installed", "pip install torch")),
    Mistake(
        "no torch for a checkpoint", no_torch_for_a_checkpoint, ("sensitivity", "torch", "not inst", "pip install")
    ),
    Mistake("no tokenizers package", no_packages, ("tokenizers", "needed", "cannot be imported", "pip install")),
    Mistake(
        "a GPU that is not there", gpu_that_is_not_there, ("--device", "cpu here", "found cuda", "drop the option")
    ),
    Mistake("a misspelt operator", misspelt_operator, ("operator", "Known operators", "'mhc_pots'", "mhc_post")),
    Mistake("a switch that says yes", misspelt_variable, ("DEEPINFER_FORCE", "0 or 1", "'yes'", "Correct it")),
    Mistake(
        "a misspelt operator in the environment",
        misspelt_operator_in_the_environment,
        ("DEEPINFER_PYTORCH_OPERATORS", "known: engram_lookup", "'mhc_pots'", "Correct it"),
    ),
    Mistake("no baseline", no_baseline, ("nowhere", "must be a file of rows", "no such file", "Name another")),
    Mistake(
        "a page for a baseline", a_page_for_a_baseline, ("sensitivity.md", "a file of rows", "in line 1", "Name a")
    ),
    Mistake(
        "another command's results for a baseline",
        results_of_another_command,
        ("sensitivity-tiny.json", "a file of rows", "no JSON object in line 1", "Name another"),
    ),
    Mistake(
        "an operator of another family",
        operator_of_another_family,
        ("--op", "of the family attention (", "found mhc_post", "its own family"),
    ),
    Mistake("no measurement", no_measurement, ("--page", "--json FILE wrote", "no such file", "Name such")),
    Mistake("another measurement", another_measurement, ("--page", "--json FILE wrote", "without preset", "Name such")),
    Mistake(
        "a measurement into a folder",
        measurement_into_a_folder,
        ("--json", "a file in an existing folder", ", a folder", "name another file"),
    ),
    Mistake(
        "a lowering without a GPU",
        lowering_without_a_gpu,
        ("--lowering", "left out where", "found sm86", "Drop the option"),
    ),
    Mistake("no compilations", no_compilations, ("--workers", "1 or more", "found 0", "drop the option")),
    Mistake("a card that is no Ampere", unknown_card, ("--gpus", "Known cards", "'8xH100'", "Any other Ampere card")),
    Mistake("no nvcc", no_nvcc, ("nvcc", "TileLang needs it", "not on PATH", "install the CUDA toolkit")),
    Mistake("no C compiler", no_c_compiler, ("C compiler", "Triton needs one", "neither gcc nor clang", "install gcc")),
    Mistake("a newer GPU", newer_gpu, ("compute capability 9.0", "acts on 8.x", "9.0", "DEEPINFER_FORCE=1")),
    Mistake(
        "VLLM_PLUGINS leaves it out", plugin_filtered_out, ("VLLM_PLUGINS", "load", "=another", "add deepinfer_sm80")
    ),
    Mistake(
        "Python 3.10",
        old_python,
        ("Python", "3.11 to 3.14", "found Python 3.10.12", "install one"),
        ours="pip itself refuses by requires-python; make says it first",
    ),
)


def test_there_are_twenty_and_more():
    assert len({mistake.name for mistake in MISTAKES}) == len(MISTAKES) >= 20


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda m: m.name)
def test_a_mistake_gets_one_clear_message(mistake, tmp_path, micro, micro_checkpoint, monkeypatch, capsys):
    message = mistake.make(Case(tmp_path, micro, micro_checkpoint, monkeypatch, capsys))
    assert "Traceback" not in message
    assert "\n" not in message
    missing = [part for part in mistake.says if part not in message]
    assert not missing, message
