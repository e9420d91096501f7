"""Which vLLM releases this version of the plugin was made for."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

SUPPORTED_RELEASES = ((0, 33, 0),)
SUPPORTED_VLLM = "== 0.33.0"


def installed_vllm() -> str | None:
    """The installed vLLM's version from its metadata, None without vLLM. Imports nothing of it."""
    try:
        return version("vllm")
    except PackageNotFoundError:
        return None


def is_supported(found: str) -> bool:
    """Whether ``found`` is a release this plugin supports; ``+cu130`` and ``.postN`` count as it."""
    release = found.split("+")[0].split(".post")[0]
    parts = release.split(".")
    return all(p.isdigit() for p in parts) and tuple(int(p) for p in parts) in SUPPORTED_RELEASES
