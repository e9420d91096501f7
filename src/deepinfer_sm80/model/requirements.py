"""Packages that only the checkpoint tools need: imported on use, so that a missing one gives one clear sentence."""

from __future__ import annotations

import importlib
from typing import Any

from deepinfer_sm80.errors import MissingPackageError


def require(module: str) -> Any:
    """The imported ``module``. Raises MissingPackageError, naming the pip command, when it is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingPackageError(package=module.partition(".")[0].replace("_", "-")) from error
