"""Whether the plugin acts in this process, and what it registers if it does."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from deepinfer_sm80 import envs
from deepinfer_sm80.hardware import BUILT_FOR
from deepinfer_sm80.vllm_plugin.window import SUPPORTED_VLLM, installed_vllm, is_supported

if TYPE_CHECKING:
    from collections.abc import Mapping

# vLLM compares these strings in a dozen places, so the plugin takes them over instead of inventing its own.
ARCHITECTURES: Mapping[str, str] = {
    "DeepseekV41ForCausalLM": "deepinfer_sm80.vllm_plugin.model:DeepseekV41ForCausalLM",
    "DSparkV41DraftModel": "deepinfer_sm80.vllm_plugin.model:DSparkDeepseekV4ForCausalLM",
}
REFUSING: Mapping[str, str] = {
    "DeepseekV41ForCausalLM": "deepinfer_sm80.vllm_plugin.refusal:DeepseekV41ForCausalLM",
    "DSparkV41DraftModel": "deepinfer_sm80.vllm_plugin.refusal:DSparkDeepseekV4ForCausalLM",
}

UNTRIED = "untried: this plugin is built for 8.0 and 8.6, and nothing has run on this one"

_said: set[str] = set()


@dataclass(frozen=True, slots=True)
class Activation:
    """What ``register`` will do: ``active`` serves, ``refuses`` registers a class that refuses with the remedy.

    ``undecided``: it refuses because the facts could not be found out. ``untried``: no kernel of ours has run on this
    kind of GPU, or as its code.
    """

    active: bool
    refuses: bool
    reason: str
    undecided: bool = False
    untried: bool = False

    @property
    def architectures(self) -> Mapping[str, str]:
        return ARCHITECTURES if self.active else REFUSING if self.refuses else {}


def decide(capability: tuple[int, int] | None, vllm_version: str | None) -> Activation:
    """Decide from facts alone.

    ``capability``: (major, minor) of the GPU, None without one. ``vllm_version``: None when vLLM is not installed.
    """
    if envs.DEEPINFER_DISABLE():
        return Activation(False, False, "DEEPINFER_DISABLE=1")
    if vllm_version is None:
        return Activation(False, False, "vLLM is not installed")
    found = "no CUDA GPU found" if capability is None else f"compute capability {capability[0]}.{capability[1]}"
    if envs.DEEPINFER_FORCE():
        found += ", DEEPINFER_FORCE=1"
    elif capability is None or capability[0] != 8:
        return Activation(False, False, f"{found}; this plugin acts on 8.x (DEEPINFER_FORCE=1 overrides)")
    if not is_supported(vllm_version):
        return Activation(False, True, f"vLLM {vllm_version} is outside the supported window {SUPPORTED_VLLM}")
    wrong = envs.fault()  # before 509 GB are read, not when the first operator is asked for
    if wrong is not None:
        return Activation(False, True, wrong, undecided=True)
    if capability is not None and capability[0] == 8 and capability not in BUILT_FOR:
        return Activation(True, False, f"{found} ({UNTRIED}), vLLM {vllm_version}", untried=True)
    return Activation(True, False, f"{found}, vLLM {vllm_version}")


def gpu_capability() -> tuple[int, int] | None:
    """(major, minor) as vLLM's platform reports it: through NVML, so CUDA is not initialised."""
    from vllm.platforms import current_platform

    if not current_platform.is_cuda():
        return None
    found = current_platform.get_device_capability()
    return None if found is None else (found.major, found.minor)


def activation_here() -> Activation:
    """The decision for this process. Never raises: an exception in a plugin would stop every model of this machine."""
    try:
        version = installed_vllm()
        return decide(gpu_capability() if version is not None else None, version)
    except Exception as error:
        return Activation(False, True, str(error) or type(error).__name__, undecided=True)


def register() -> None:
    """Register the classes that ``activation_here`` names and, to serve, the quantisation; repeated calls change
    nothing."""
    activation = activation_here()
    _say_once(activation)
    _warn_once(envs.unknown())
    if not activation.architectures:
        return
    from vllm import ModelRegistry

    if activation.active:
        from deepinfer_sm80.vllm_plugin.quantization import register as register_quantization

        register_quantization()
    for architecture, target in activation.architectures.items():
        known = ModelRegistry.models.get(architecture)
        module, _, name = target.partition(":")
        if (getattr(known, "module_name", None), getattr(known, "class_name", None)) != (module, name):
            ModelRegistry.register_model(architecture, target)


def _warn_once(unknown: str | None) -> None:
    """A variable that nothing reads is no reason to refuse."""
    if unknown is not None and unknown not in _said:
        _said.add(unknown)
        logging.getLogger("vllm.deepinfer_sm80").warning("DeepInfer-SM80: %s", unknown)


def _say_once(activation: Activation) -> None:
    if activation.reason in _said:
        return
    _said.add(activation.reason)
    logger = logging.getLogger("vllm.deepinfer_sm80")
    if activation.refuses:
        logger.warning("DeepInfer-SM80 will refuse DeepSeek-V4.1: %s", activation.reason)
    elif activation.untried:
        logger.warning("DeepInfer-SM80 registered DeepSeek-V4.1: %s", activation.reason)
    elif activation.active:
        logger.debug("DeepInfer-SM80 registered DeepSeek-V4.1: %s", activation.reason)
    else:
        logger.debug("DeepInfer-SM80 registers nothing: %s", activation.reason)
