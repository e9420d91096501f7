"""The stand-in refuses with the reason: a release that is not supported, or a decision that failed."""

import sys
import types

import pytest

from deepinfer_sm80.errors import PluginUndecidedError, UnsupportedVllmError
from deepinfer_sm80.vllm_plugin import activation, refusal, register
from deepinfer_sm80.vllm_plugin.activation import REFUSING


def no_driver():
    raise RuntimeError("NVML: driver not loaded")


@pytest.mark.parametrize(
    ("value", "capability", "said"),
    [
        ("true", lambda: (8, 0), "DEEPINFER_FORCE must be 0 or 1, got 'true'"),
        ("0", no_driver, "NVML: driver not loaded"),
    ],
)
def test_a_decision_that_fails_stops_no_other_model(monkeypatch, caplog, value, capability, said):
    registered = {}
    fake = types.ModuleType("vllm")
    fake.ModelRegistry = types.SimpleNamespace(models={}, register_model=registered.__setitem__)
    monkeypatch.setitem(sys.modules, "vllm", fake)
    monkeypatch.delenv("DEEPINFER_DISABLE", raising=False)
    monkeypatch.setenv("DEEPINFER_FORCE", value)
    monkeypatch.setattr(activation, "_said", set())
    monkeypatch.setattr(activation, "installed_vllm", lambda: "0.33.0")
    monkeypatch.setattr(activation, "gpu_capability", capability)
    for _ in range(3):
        register()
    assert registered == REFUSING
    assert [said in line for line in caplog.messages] == [True]
    with pytest.raises(PluginUndecidedError, match=said) as caught:
        refusal.DeepseekV41ForCausalLM(vllm_config=None)
    assert "DEEPINFER_DISABLE=1" in str(caught.value)


def test_the_stand_in_names_the_release(monkeypatch):
    monkeypatch.setattr(activation, "gpu_capability", lambda: (8, 0))
    for module in (activation, refusal):
        monkeypatch.setattr(module, "installed_vllm", lambda: "0.34.0")
    with pytest.raises(UnsupportedVllmError, match=r"found vLLM 0\.34\.0"):
        refusal.DSparkDeepseekV4ForCausalLM(vllm_config=None)
