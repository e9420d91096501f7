"""doctor tells the truth about GPUs, releases and filters that this machine does not have."""

import pytest

from deepinfer_sm80.cli import doctor, main
from deepinfer_sm80.hardware import Gpu
from deepinfer_sm80.vllm_plugin import window

A100 = Gpu("NVIDIA A100-SXM4-80GB", (8, 0), 80 << 30)
H100 = Gpu("NVIDIA H100", (9, 0), 80 << 30)


@pytest.fixture
def machine(monkeypatch):
    """A machine on which everything is right; each test takes one thing away."""
    names = ("DEEPINFER_FORCE", "DEEPINFER_DISABLE", "DEEPINFER_PYTORCH_OPERATORS", "VLLM_PLUGINS")
    for name in (*names, "CC", "CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)

    def has(gpu=A100, vllm="0.33.0", entry_points=("found",)):
        monkeypatch.setattr(doctor, "current_gpu", lambda: gpu)
        monkeypatch.setattr(window, "installed_vllm", lambda: vllm)
        monkeypatch.setattr(doctor, "entry_points", lambda **kwargs: entry_points)
        monkeypatch.setattr(doctor.shutil, "which", lambda name: f"/usr/bin/{name}")

    has()
    return has


def findings(capsys):
    return dict(
        line.split(maxsplit=1) for line in capsys.readouterr().out.replace("entry point", "entry-point").splitlines()
    )


def test_all_right(machine, capsys):
    assert main(["doctor"]) == 0
    found = findings(capsys)
    assert found["verdict"].startswith("vLLM would serve DeepSeek-V4.1 with this package: compute capability 8.0")
    assert found["vllm"] == "0.33.0 (supported)"
    assert found["gpu"] == (
        "NVIDIA A100-SXM4-80GB, compute capability 8.0, 80.0 GiB, 166,912 bytes of shared memory per block"
    )


@pytest.mark.parametrize(
    ("lacks", "reason"),
    [
        ({"gpu": None}, "no CUDA GPU found"),
        ({"gpu": H100}, "compute capability 9.0"),
        ({"vllm": None}, "vLLM is not installed"),
        ({"vllm": "0.34.0"}, "0.34.0 is outside the supported window"),
        ({"entry_points": ()}, "not installed, so vLLM cannot find it"),
    ],
)
def test_what_is_wrong_is_named(machine, capsys, lacks, reason):
    machine(**lacks)
    assert main(["doctor"]) == 1
    assert reason in findings(capsys)["verdict"]


def test_vllms_own_plugin_filter(machine, capsys, monkeypatch):
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    assert main(["doctor"]) == 1
    assert "VLLM_PLUGINS=other leaves it out; add deepinfer_sm80" in findings(capsys)["verdict"]
    monkeypatch.setenv("VLLM_PLUGINS", "other,deepinfer_sm80")
    assert main(["doctor"]) == 0


def test_switches(machine, capsys, monkeypatch):
    monkeypatch.setenv("DEEPINFER_DISABLE", "1")
    assert main(["doctor"]) == 1
    assert "DEEPINFER_DISABLE=1" in findings(capsys)["verdict"]
    monkeypatch.setenv("DEEPINFER_DISABLE", "0")
    monkeypatch.setenv("DEEPINFER_FORCE", "1")
    machine(gpu=H100)
    assert main(["doctor"]) == 0


def test_variables_are_shown_and_a_wrong_one_is_the_verdict(machine, capsys, monkeypatch):
    monkeypatch.setenv("DEEPINFER_PYTORCH_OPERATORS", "indexer_topk")
    assert main(["doctor"]) == 0
    assert findings(capsys)["variables"] == "DEEPINFER_PYTORCH_OPERATORS=indexer_topk"
    for name, value in (("DEEPINFER_FORCE", "yes"), ("DEEPINFER_DISABLE", "no"), ("DEEPINFER_PYTORCH_OPERATORS", "x")):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            assert main(["doctor"]) == 1
        found = findings(capsys)
        assert found["variables"].startswith(f"{name} must be ")
        assert found["verdict"] == f"vLLM would not serve with this package: {found['variables']}"


def test_an_unknown_variable_is_a_warning_and_no_verdict(machine, capsys, monkeypatch):
    monkeypatch.setenv("DEEPINFER_TYPO", "1")
    warning = (
        "warning: unknown variable DEEPINFER_TYPO; known are DEEPINFER_DISABLE, DEEPINFER_FORCE, DEEPINFER_PYTORCH"
    )
    for names, start in (((), ""), (("DEEPINFER_FORCE",), "DEEPINFER_FORCE=1; ")):
        for name in names:
            monkeypatch.setenv(name, "1")
        assert main(["doctor"]) == 0
        found = findings(capsys)
        assert found["variables"].startswith(start + warning)
        assert found["verdict"].startswith("vLLM would serve")
    monkeypatch.setenv("DEEPINFER_FORCE", "yes")
    assert main(["doctor"]) == 1
    found = findings(capsys)["variables"]
    assert found.startswith("DEEPINFER_FORCE must be ")
    assert warning in found


def test_a_gpu_that_nothing_has_run_on_is_said_to_be_one(machine, capsys):
    machine(gpu=Gpu("NVIDIA L40S", (8, 9), 48 << 30))
    assert main(["doctor"]) == 0
    assert "compute capability 8.9 (untried: this plugin is built for 8.0 and 8.6" in findings(capsys)["verdict"]


def test_a_missing_compiler_is_named(machine, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    monkeypatch.setattr(doctor, "CUDA", str(tmp_path))
    monkeypatch.setattr(doctor, "files", lambda package: [])
    assert main(["doctor"]) == 1
    found = findings(capsys)
    assert "no C compiler (neither gcc nor clang is on PATH)" in found["verdict"]
    assert "no nvcc (not on PATH" in found["compilers"]
    monkeypatch.setattr(doctor.shutil, "which", lambda name: "/usr/bin/gcc" if name == "gcc" else None)
    assert main(["doctor"]) == 1
    assert "install the CUDA toolkit, or pip install nvidia-cuda-nvcc" in findings(capsys)["verdict"]
    monkeypatch.setattr(doctor, "files", lambda package: [tmp_path / "bin/nvcc"])
    assert main(["doctor"]) == 0
    assert findings(capsys)["compilers"] == "found"


def test_a_cuda_home_without_nvcc_is_named(machine, capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert main(["doctor"]) == 1
    assert f"is {tmp_path}, which has no bin/nvcc" in findings(capsys)["verdict"]
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/nvcc").touch()
    assert main(["doctor"]) == 0
