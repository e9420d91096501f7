"""The environment is read at the moment of use; the limits are NVIDIA's; a GPU is found without waking CUDA."""

import pytest

from deepinfer_sm80 import envs, hardware
from deepinfer_sm80.errors import EnvironmentValueError, UnknownArchitectureError


@pytest.mark.parametrize("variable", envs.SWITCHES, ids=lambda v: v.name)
def test_switch_is_read_on_use(variable, monkeypatch):
    monkeypatch.delenv(variable.name, raising=False)
    assert variable() is variable.default
    for text, want in (("1", True), ("0", False), (" 1 ", True), ("", variable.default)):
        monkeypatch.setenv(variable.name, text)
        assert variable() is want


def test_names_are_read_on_use(monkeypatch):
    variable = envs.DEEPINFER_PYTORCH_OPERATORS
    for text, want in (("", set()), ("all", {"all"}), (" indexer_topk, mhc_post ,", {"indexer_topk", "mhc_post"})):
        monkeypatch.setenv(variable.name, text)
        assert variable() == want
        assert envs.in_force(variable) == (",".join(sorted(want)) or "none")


@pytest.mark.parametrize("text", ["yes", "true", "2", "-1"])
def test_nonsense_names_the_variable(text, monkeypatch):
    monkeypatch.setenv("DEEPINFER_FORCE", text)
    with pytest.raises(EnvironmentValueError, match=f"DEEPINFER_FORCE must be 0 or 1, got '{text}'"):
        envs.DEEPINFER_FORCE()


@pytest.mark.parametrize("variable", envs.VARIABLES, ids=lambda v: v.name)
def test_every_variable_knows_a_wrong_value(variable, monkeypatch):
    for each in envs.VARIABLES:
        monkeypatch.delenv(each.name, raising=False)
    assert envs.fault() is None
    monkeypatch.setenv(variable.name, "mhc_pots")
    with pytest.raises(EnvironmentValueError, match=f"{variable.name} must be .*, got 'mhc_pots'. Correct it"):
        variable()
    assert envs.fault().startswith(f"{variable.name} must be ")


def test_a_variable_that_nothing_reads_is_named_with_the_known_ones(monkeypatch):
    known = ", ".join(variable.name for variable in envs.VARIABLES)
    monkeypatch.setenv("DEEPINFER_FORCE", "1")
    assert envs.unknown() is None
    monkeypatch.setenv("DEEPINFER_TYPO", "1")
    assert envs.unknown() == f"unknown variable DEEPINFER_TYPO; known are {known}"
    monkeypatch.setenv("DEEPINFER_FORCED", "")
    assert envs.unknown() == f"unknown variables DEEPINFER_FORCED, DEEPINFER_TYPO; known are {known}"
    assert envs.fault() is None, "no reason to refuse"


def test_limits_of_ampere():
    a100, ga102 = hardware.limits((8, 0)), hardware.limits((8, 6))
    assert (a100.smem_per_cta, ga102.smem_per_cta) == (163 * 1024, 99 * 1024)
    assert (a100.warps_per_sm, ga102.warps_per_sm) == (64, 48)
    assert {found.registers_per_sm for found in hardware.LIMITS.values()} == {65_536}
    for found in hardware.LIMITS.values():
        assert found.smem_per_sm - found.smem_per_cta == 1024


def test_unknown_architecture_lists_the_known_ones():
    with pytest.raises(UnknownArchitectureError, match=r"9\.0.*Known: 8\.0, 8\.6"):
        hardware.limits((9, 0))
    assert [hardware.is_ampere_family(c) for c in ((7, 5), (8, 0), (8, 9), (9, 0))] == [False, True, True, False]


@pytest.mark.parametrize(
    ("capability", "smem", "registers", "warps", "ctas"),
    [
        ((8, 0), 48 * 1024, 128, 4, 3),  # shared memory: 164 KB / 49 KB
        ((8, 0), 0, 128, 4, 4),  # registers: 65,536 / (128 * 128)
        ((8, 0), 0, 32, 4, 16),  # warps: 64 / 4
        ((8, 0), 0, 16, 1, 32),  # the limit of CTAs
        ((8, 6), 0, 16, 1, 16),
        ((8, 0), 166_912, 255, 4, 1),
        ((8, 0), 166_913, 32, 4, 0),
        ((8, 6), 101_377, 32, 4, 0),
        ((8, 0), 0, 255, 8, 1),  # 255 registers are given out as 256
        ((8, 0), 0, 256, 1, 0),
    ],
)
def test_ctas_that_fit(capability, smem, registers, warps, ctas):
    assert hardware.limits(capability).ctas_that_fit(smem, registers, warps) == ctas


@pytest.mark.parametrize(
    ("listed", "index", "want"),
    [
        (None, 0, 0),
        (None, 3, 3),
        ("", 0, None),
        ("2,5", 1, 5),
        ("2,5", 2, None),
        ("GPU-1b2c, 1", 0, "GPU-1b2c"),
        ("-1", 0, None),
        ("0,-1,1", 1, None),
    ],
)
def test_visible_devices(listed, index, want, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if listed is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", listed)
    assert hardware._visible_device(index) == want


class FakeNvml:
    """Answers as NVML does: 0 for success, results through pointers."""

    def __init__(self, devices):
        self.devices, self.calls = devices, []

    def nvmlInit_v2(self):
        return 0

    def nvmlShutdown(self):
        self.calls.append("shutdown")
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index, handle):
        if index.value >= len(self.devices):
            return 2
        handle._obj.value = index.value + 1
        return 0

    def nvmlDeviceGetCudaComputeCapability(self, handle, major, minor):
        major._obj.value, minor._obj.value = self.devices[handle.value - 1][1]
        return 0

    def nvmlDeviceGetName(self, handle, name, size):
        name.value = self.devices[handle.value - 1][0].encode()
        return 0

    def nvmlDeviceGetMemoryInfo(self, handle, memory):
        memory._obj.total = self.devices[handle.value - 1][2]
        return 0


def test_gpu_from_nvml(monkeypatch):
    nvml = FakeNvml([("NVIDIA A100-SXM4-80GB", (8, 0), 80 << 30), ("NVIDIA A40", (8, 6), 48 << 30)])
    monkeypatch.setattr(hardware.ctypes, "CDLL", lambda name: nvml)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0,7")
    assert hardware.current_gpu() == hardware.Gpu("NVIDIA A40", (8, 6), 48 << 30)
    assert hardware.current_capability(1) == (8, 0)
    assert hardware.current_gpu(2) is None
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert hardware.current_gpu() is None
    assert nvml.calls == ["shutdown"] * 3
