"""The two files of a checkpoint beside its tensors, configuration and tokenizer, or a sentence about what is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from deepinfer_sm80.errors import CheckpointError
from deepinfer_sm80.model.config import ModelConfig
from deepinfer_sm80.model.requirements import require

CONFIG, TOKENIZER = "config.json", "tokenizer.json"
_AGAIN = "Download it again, or make a checkpoint with: deepinfer-sm80 make-checkpoint"


def read_config(directory: str | Path) -> ModelConfig:
    """The configuration in ``directory``. Raises CheckpointError without a readable one, ModelConfigError for another
    model's."""
    path = _existing(directory, CONFIG)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(path=path, problem=f"this is not JSON ({error})", remedy=_AGAIN) from error
    if not isinstance(content, dict):
        problem = f"this must be a JSON object, found {type(content).__name__}"
        raise CheckpointError(path=path, problem=problem, remedy=_AGAIN)
    return ModelConfig.from_dict(content)


def read_tokenizer(directory: str | Path) -> Any:
    """The ``tokenizers.Tokenizer`` in ``directory``. Raises CheckpointError without a readable one,
    MissingPackageError without its package."""
    path = _existing(directory, TOKENIZER)
    try:
        return require("tokenizers").Tokenizer.from_file(str(path))
    except Exception as error:  # the package raises nothing narrower
        if isinstance(error, ImportError):
            raise
        raise CheckpointError(path=path, problem=f"this is no tokenizer ({error})", remedy=_AGAIN) from error


def _existing(directory: str | Path, name: str) -> Path:
    path = Path(directory, name)
    if not path.is_file():
        raise CheckpointError(path=directory, problem=f"there is no {name} here", remedy=_AGAIN)
    return path
