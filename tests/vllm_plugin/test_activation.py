"""When the plugin acts, when it stays out, and when it refuses."""

import multiprocessing
import subprocess
import sys
import types

import pytest

from deepinfer_sm80.hardware import BUILT_FOR
from deepinfer_sm80.vllm_plugin import activation, register
from deepinfer_sm80.vllm_plugin.activation import ARCHITECTURES, REFUSING, decide
from deepinfer_sm80.vllm_plugin.window import is_supported


@pytest.mark.parametrize(
    ("capability", "version", "environment", "active", "refuses"),
    [
        ((8, 0), "0.33.0", {}, True, False),
        ((8, 6), "0.33.0+cu130", {}, True, False),
        ((8, 9), "0.33.0", {}, True, False),
        ((9, 0), "0.33.0", {}, False, False),
        ((7, 5), "0.33.0", {}, False, False),
        (None, "0.33.0", {}, False, False),
        ((8, 0), None, {}, False, False),
        ((8, 0), "0.32.1", {}, False, True),
        ((8, 0), "0.34.0rc1", {}, False, True),
        ((9, 0), "0.32.1", {}, False, False),
        ((9, 0), "0.33.0", {"DEEPINFER_FORCE": "1"}, True, False),
        ((8, 0), "0.33.0", {"DEEPINFER_DISABLE": "1"}, False, False),
        ((9, 0), "0.33.0", {"DEEPINFER_FORCE": "1", "DEEPINFER_DISABLE": "1"}, False, False),
    ],
)
def test_decision(monkeypatch, capability, version, environment, active, refuses):
    for name in ("DEEPINFER_FORCE", "DEEPINFER_DISABLE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    found = decide(capability, version)
    assert (found.active, found.refuses) == (active, refuses)
    assert found.architectures == (ARCHITECTURES if active else REFUSING if refuses else {})
    assert found.reason


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 7), (8, 9)])
def test_what_it_is_not_built_for_is_said_and_served(capability, caplog, monkeypatch):
    found = decide(capability, "0.33.0")
    assert found.active
    assert found.untried is (capability not in BUILT_FOR)
    assert ("untried: this plugin is built for 8.0 and 8.6" in found.reason) is found.untried
    monkeypatch.setattr(activation, "_said", set())
    with caplog.at_level("WARNING", "vllm.deepinfer_sm80"):
        activation._say_once(found)
    assert bool(caplog.records) is found.untried


def test_a_variable_that_the_kernels_would_refuse_is_refused_at_the_start(monkeypatch):
    monkeypatch.setenv("DEEPINFER_PYTORCH_OPERATORS", "mhc_pots")
    found = decide((8, 0), "0.33.0")
    assert (found.active, found.refuses, found.undecided) == (False, True, True)
    assert found.reason.startswith("DEEPINFER_PYTORCH_OPERATORS must be all, or operators")
    assert decide((9, 0), "0.33.0").architectures == {}, "where it does not act, its variables harm nobody"


def test_an_unknown_variable_is_said_once_and_refuses_nothing(monkeypatch, caplog):
    monkeypatch.setattr(activation, "installed_vllm", lambda: None)
    monkeypatch.setattr(activation, "_said", set())
    monkeypatch.setenv("DEEPINFER_TYPO", "1")
    assert decide((8, 0), "0.33.0").active
    with caplog.at_level("WARNING", "vllm.deepinfer_sm80"):
        register()
        register()
    (record,) = caplog.records
    assert record.getMessage().startswith(
        "DeepInfer-SM80: unknown variable DEEPINFER_TYPO; known are DEEPINFER_DISABLE, "
    )


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("0.33.0", True),
        ("0.33.0.post1", True),
        ("0.33.0+cu130", True),
        ("0.33.1", False),
        ("0.33.0rc1", False),
        ("main", False),
    ],
)
def test_window(version, expected):
    assert is_supported(version) is expected


class Registry:
    def __init__(self):
        self.models, self.calls = {}, []

    def register_model(self, architecture, target):
        module, _, name = target.partition(":")
        self.calls.append(architecture)
        self.models[architecture] = types.SimpleNamespace(module_name=module, class_name=name)


@pytest.fixture
def quantised(monkeypatch):
    """A stand-in of the module that registers the quantisation; its calls."""
    calls, module = [], types.ModuleType("deepinfer_sm80.vllm_plugin.quantization")
    module.register = lambda: calls.append("registered")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return calls


def test_registering_three_times_registers_once(monkeypatch, quantised):
    registry = Registry()
    fake = types.ModuleType("vllm")
    fake.ModelRegistry = registry
    monkeypatch.setitem(sys.modules, "vllm", fake)
    monkeypatch.setattr(activation, "installed_vllm", lambda: "0.33.0")
    monkeypatch.setattr(activation, "gpu_capability", lambda: (8, 0))
    for _ in range(3):
        register()
    assert registry.calls == list(ARCHITECTURES)
    assert registry.models["DeepseekV41ForCausalLM"].module_name == "deepinfer_sm80.vllm_plugin.model"
    assert set(quantised) == {"registered"}


def test_it_takes_over_from_vllms_own_entry(monkeypatch, quantised):
    registry = Registry()
    registry.models["DeepseekV41ForCausalLM"] = types.SimpleNamespace(
        module_name="vllm.models.deepseek_v41", class_name="x"
    )
    fake = types.ModuleType("vllm")
    fake.ModelRegistry = registry
    monkeypatch.setitem(sys.modules, "vllm", fake)
    monkeypatch.setattr(activation, "installed_vllm", lambda: "0.32.0")
    monkeypatch.setattr(activation, "gpu_capability", lambda: (8, 6))
    register()
    assert registry.models["DeepseekV41ForCausalLM"].module_name == "deepinfer_sm80.vllm_plugin.refusal"
    assert not quantised, "what refuses leaves the quantisation alone"


def _child(queue):
    for _ in range(3):
        register()
    queue.put(sorted({"torch", "triton", "vllm"} & set(sys.modules)))


def test_a_spawned_process_without_vllm_is_left_alone(monkeypatch):
    monkeypatch.setattr(activation, "installed_vllm", lambda: None)
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=_child, args=(queue,))
    process.start()
    assert queue.get(timeout=60) == []
    process.join()
    assert process.exitcode == 0


def test_the_entry_point_is_found_by_its_name():
    code = "from importlib.metadata import entry_points as e; print([p.value for p in e(group='vllm.general_plugins')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "deepinfer_sm80.vllm_plugin:register" in done.stdout
