"""``deepinfer-sm80 doctor``: what is installed here, and whether vLLM would serve DeepSeek-V4.1 with this package."""

from __future__ import annotations

import os
import platform
import shutil
from importlib.metadata import PackageNotFoundError, entry_points, files, version
from pathlib import Path
from typing import TYPE_CHECKING

from deepinfer_sm80 import __version__, envs
from deepinfer_sm80.hardware import LIMITS, current_gpu

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

PLUGIN = "deepinfer_sm80"
GIB = 2**30
CUDA = "/usr/local/cuda"


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    subparsers.add_parser(
        "doctor",
        help="say what is installed and whether vLLM would serve with this package here",
        description="Print one line for each finding and a verdict; nothing is changed. Exit "
        "code 0: a vLLM started here would serve DeepSeek-V4.1 with this package, 1: it would not, and why.",
    )


def run(args: argparse.Namespace) -> int:
    """Print one line per finding and a verdict. Returns 0 when a vLLM started here would use this package, else 1."""
    del args
    sentence, ok = verdict()
    lines = {
        "deepinfer-sm80": __version__,
        "python": platform.python_version(),
        "torch": _version("torch"),
        "triton": _version("triton"),
        "vllm": _vllm(),
        "gpu": _gpu(),
        "entry point": _entry_point(),
        "compilers": _compilers(),
        "variables": _variables(),
        "verdict": sentence,
    }
    for name, finding in lines.items():
        print(f"{name:14}  {finding}")
    return 0 if ok else 1


def plugin_decision() -> tuple[bool, str]:
    """Whether the plugin would act on the GPU and the vLLM of this machine, and why."""
    from deepinfer_sm80.vllm_plugin.activation import decide
    from deepinfer_sm80.vllm_plugin.window import installed_vllm

    wrong = envs.fault()
    if wrong is not None:
        return False, wrong
    gpu = current_gpu()
    decision = decide(gpu.capability if gpu else None, installed_vllm())
    return decision.active, decision.reason


def verdict() -> tuple[str, bool]:
    """One sentence, and whether a vLLM started here would serve DeepSeek-V4.1 with this package."""
    active, reason = plugin_decision()
    if not active:
        return f"vLLM would not serve with this package: {reason}", False
    for problem in (_not_found_by_vllm, _filtered_by_vllm):
        found = problem()
        if found:
            return f"vLLM would not load this package: {found}", False
    lacking = _no_c_compiler() or _no_nvcc()
    if lacking:
        return f"vLLM would load this package and stop at a kernel that it compiles: {lacking}", False
    return f"vLLM would serve DeepSeek-V4.1 with this package: {reason}", True


def _not_found_by_vllm() -> str | None:
    if entry_points(group="vllm.general_plugins", name=PLUGIN):
        return None
    return "it is importable but not installed, so vLLM cannot find it; install it with pip"


def _filtered_by_vllm() -> str | None:
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is None or PLUGIN in allowed.split(","):
        return None
    return f"VLLM_PLUGINS={allowed} leaves it out; add {PLUGIN}"


def _entry_point() -> str:
    checks: tuple[Callable[[], str | None], ...] = (_not_found_by_vllm, _filtered_by_vllm)
    return next((found for check in checks if (found := check())), "visible to vLLM")


def _variables() -> str:
    """Those of ours that are set, or the sentence about one that is set to what it cannot be; a warning of those that
    nothing reads."""
    wrong, unknown = envs.fault(), envs.unknown()
    warning = f"warning: {unknown}" if unknown else ""
    found = [] if wrong else [f"{v.name}={envs.in_force(v)}" for v in envs.VARIABLES if os.environ.get(v.name)]
    said = "; ".join(filter(None, (wrong or ", ".join(found), warning)))
    return said or "none of ours is set (deepinfer-sm80 env lists them)"


def _compilers() -> str:
    return "; ".join(found for check in (_no_c_compiler, _no_nvcc) if (found := check())) or "found"


def _no_c_compiler() -> str | None:
    """Triton builds the stub of each kernel with it."""
    named = os.environ.get("CC")
    if any(shutil.which(name) for name in ([named] if named else ["gcc", "clang"])):
        return None
    found = f"CC={named} is not on PATH" if named else "neither gcc nor clang is on PATH"
    return f"no C compiler ({found}), Triton needs one; install gcc (Debian and Ubuntu: the package build-essential)"


def _no_nvcc() -> str | None:
    """vLLM's TileLang kernels are compiled with it; looked for where TileLang looks."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if home:
        nvcc = Path(home, "bin", "nvcc")
        if nvcc.is_file():
            return None
        found = f"CUDA_HOME or CUDA_PATH is {home}, which has no bin/nvcc"
    elif shutil.which("nvcc") or _nvcc_of_pip() or Path(CUDA, "bin", "nvcc").is_file():
        return None
    else:
        found = f"not on PATH, not in {CUDA}, no package nvidia-cuda-nvcc"
    return f"no nvcc ({found}), TileLang needs it; install the CUDA toolkit, or pip install nvidia-cuda-nvcc"


def _nvcc_of_pip() -> bool:
    try:
        return any(file.name == "nvcc" for file in files("nvidia-cuda-nvcc") or ())
    except PackageNotFoundError:
        return False


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _vllm() -> str:
    from deepinfer_sm80.vllm_plugin.window import SUPPORTED_VLLM, installed_vllm, is_supported

    found = installed_vllm()
    if found is None:
        return f"not installed (supported: {SUPPORTED_VLLM})"
    return f"{found} ({'supported' if is_supported(found) else f'not supported; supported: {SUPPORTED_VLLM}'})"


def _gpu() -> str:
    gpu = current_gpu()
    if gpu is None:
        return "none visible"
    major, minor = gpu.capability
    text = f"{gpu.name}, compute capability {major}.{minor}, {gpu.memory / GIB:.1f} GiB"
    found = LIMITS.get(gpu.capability)
    return text if found is None else f"{text}, {found.smem_per_cta:,} bytes of shared memory per block"
