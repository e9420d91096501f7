"""Every error a user can meet. One class, one template: what, allowed, what to do."""

from __future__ import annotations


class DeepInferError(Exception):
    """Base class; subclasses fill ``template`` with keyword arguments."""

    template = "{detail}"

    def __init__(self, **fields: object) -> None:
        super().__init__(self.template.format(**fields))


class UnknownOpError(DeepInferError, KeyError):
    template = "No operator {op!r}. Known operators: {known}."


class TensorContractError(DeepInferError, ValueError):
    template = "{op}: {name} must be {expected}, got {got}."


class UnsupportedDeviceError(DeepInferError, RuntimeError):
    template = (
        "{op} needs compute capability 8.0 or newer, found {found}. "
        "Its reference runs anywhere: deepinfer_sm80.ops.spec({op!r}).reference."
    )


class EnvironmentValueError(DeepInferError, ValueError):
    template = "{name} must be {allowed}, got {got!r}. Correct it, or unset it for the default ({default})."


class UnknownArchitectureError(DeepInferError, ValueError):
    template = "No limits are known for compute capability {found}. Known: {known}."


class MissingTorchError(DeepInferError, ImportError):
    template = "{what} needs {package}, which is not installed. vLLM brings it; without vLLM: pip install {package}."


class ModelConfigError(DeepInferError, ValueError):
    template = "Model configuration: {field} must be {allowed}, found {found}. {remedy}"


class CheckpointError(DeepInferError, RuntimeError):
    template = "Checkpoint {path}: {problem}. {remedy}."


class MissingPackageError(DeepInferError, ImportError):
    template = (
        "The Python package {package} is needed for this and cannot be imported. "
        "Install it with: pip install {package}. The versions that the tests use are in the project's pyproject.toml."
    )


class UnsupportedVllmError(DeepInferError, RuntimeError):
    template = (
        "This version of DeepInfer-SM80 serves DeepSeek-V4.1 through vLLM {supported}, found vLLM {found}. "
        "Install that release (pip install 'vllm{supported}') or a DeepInfer-SM80 made for yours; "
        "to run without this plugin set DEEPINFER_DISABLE=1. Other models are not affected."
    )


class PluginUndecidedError(DeepInferError, RuntimeError):
    template = (
        "DeepInfer-SM80 could not find out whether it serves DeepSeek-V4.1 here ({reason}). "
        "Correct that, or set DEEPINFER_DISABLE=1 to run without this plugin. Other models are not affected."
    )


class OverrideTargetError(DeepInferError, RuntimeError):
    template = (
        "vLLM's {target} is not what this plugin replaces: expected parameters ({expected}), found {found}. "
        "The installed vLLM was changed or is not the release it says; reinstall vllm{supported}."
    )


class UnsupportedOptionError(DeepInferError, ValueError):
    template = "DeepInfer-SM80 does not serve DeepSeek-V4.1 with {option}={found}: allowed is {allowed}. {remedy}"


class OptionError(DeepInferError, ValueError):
    template = "{option} must be {allowed}, found {found}. {remedy}"


class DemoError(DeepInferError, RuntimeError):
    template = (
        "The demo stopped while {what}: {found}. Run deepinfer-sm80 doctor and deepinfer-sm80 verify; if both are "
        "content, this is a fault of ours."
    )


class ServeError(DeepInferError, RuntimeError):
    template = (
        "vllm serve {problem}; it must answer within {limit} seconds. Ask deepinfer-sm80 doctor about this machine, "
        "then read the end of vLLM's own output:\n{tail}"
    )


class ImageInputError(DeepInferError, ValueError):
    template = (
        "DeepInfer-SM80 serves DeepSeek-V4.1 for text only: the prompt holds {found} image(s), allowed is 0. "
        "Remove the image; --limit-mm-per-prompt '{{\"image\": 0}}' states the same to vLLM."
    )


class PlanError(DeepInferError, ValueError):
    template = "{option} must be {allowed}, got {found}. {remedy}"


class SequenceStateError(DeepInferError, ValueError):
    template = "Sequence state: {what} must be {allowed}, found {found}. {remedy}"


class BenchmarkError(DeepInferError, ValueError):
    template = "{what} must be {allowed}, found {found}. {remedy}"


def reason(error: OSError | ValueError) -> str:
    """Why a file could not be read or written, in words: no number of an errno, no name of a class."""
    if isinstance(error, OSError):
        return (error.strerror or "an input or output error").lower()
    if isinstance(error, UnicodeDecodeError):
        return "bytes that are no text"
    line = getattr(error, "lineno", None)
    return "what is no JSON" if line is None else f"what is no JSON in line {line}"
