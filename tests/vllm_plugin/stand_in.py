"""Modules of vLLM with the few names that a plugin module imports, in place of the package, which is not installed."""

from __future__ import annotations

import sys
import types
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest


def put(patch: pytest.MonkeyPatch, stubs: dict[str, dict[str, Any]]) -> None:
    """Makes every module of ``stubs`` importable, with its members."""
    for name in stubs:
        parts = name.split(".")
        for count in range(1, len(parts)):
            parent = ".".join(parts[:count])
            patch.setitem(sys.modules, parent, types.ModuleType(parent))
    for name, members in stubs.items():
        module = types.ModuleType(name)
        module.__dict__.update(members)
        patch.setitem(sys.modules, name, module)
        parent, _, leaf = name.rpartition(".")
        setattr(sys.modules[parent], leaf, module)
