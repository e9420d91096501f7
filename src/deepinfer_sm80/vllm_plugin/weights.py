"""Checks a checkpoint's tensors while vLLM loads them: vLLM skips its own check for quantised models."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch

from deepinfer_sm80.errors import CheckpointError
from deepinfer_sm80.model.config import ModelConfig
from deepinfer_sm80.model.schema import IGNORED_PREFIXES, expected_tensors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

_SAFETENSORS_NAMES = {
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.float16: "F16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e8m0fnu: "F8_E8M0",
}
_REMEDY = "Check that config.json belongs to these shards and that every shard was downloaded completely"
_REPEATED = "Keep one file of each shard, or the model.safetensors.index.json that chooses among them"
_SHOWN = 4


def model_config(hf_config: Any) -> ModelConfig:
    """Our view of vLLM's flattened configuration; raises ModelConfigError for a value the operators are not built for.

    The RoPE scaling of the released model is assumed here: vLLM renames that field, and no tensor depends on it.
    """
    values: dict[str, Any] = {"vision_num_hidden_layers": getattr(hf_config, "vision_n_layers", 0)}
    for field in dataclasses.fields(ModelConfig):
        found = getattr(hf_config, field.name, None)
        if found is not None and field.name not in ("rope_scaling", "vision_num_hidden_layers"):
            values[field.name] = tuple(found) if isinstance(found, list) else found
    return ModelConfig(**values)


def checked(
    weights: Iterable[tuple[str, torch.Tensor]],
    hf_config: Any,
    *,
    part: str,
    whole: bool = True,
    left_out: Callable[[str], bool] = lambda name: False,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Pass tensors through; raise CheckpointError by name for one of the wrong shape or dtype.

    ``part``: "text" or "draft", the tensors that must be there. ``whole``: this is the complete checkpoint, so that a
    missing, repeated or unknown name is an error as well; False for updates that bring some tensors of a running model.
    ``left_out``: names that vLLM's loader does not read on this rank.

    Values are not looked at: the released scales alone are 24 GB, which every rank would read once more.
    """
    path = str(getattr(hf_config, "_name_or_path", "") or "checkpoint")
    expected = expected_tensors(model_config(hf_config), draft=True)
    missing = {name for name in expected if _is_of(part, name)}
    seen: set[str] = set()
    for name, tensor in weights:
        entry = (_SAFETENSORS_NAMES.get(tensor.dtype, str(tensor.dtype)), tuple(tensor.shape))
        if entry != expected.get(name, entry):
            problem = f"{name} is {entry[0]} {list(entry[1])}, must be {expected[name][0]} {list(expected[name][1])}"
            raise CheckpointError(path=path, problem=problem, remedy=_REMEDY)
        if whole and _is_of(part, name):
            if name in seen:
                raise CheckpointError(path=path, problem=f"{name} comes twice", remedy=_REPEATED)
            if name not in expected:
                raise CheckpointError(path=path, problem=f"the model has no tensor {name}", remedy=_REMEDY)
            seen.add(name)
        yield name, tensor
    missing = {name for name in missing - seen if not left_out(name)} if whole else set()
    if missing:
        listed = ", ".join(sorted(missing)[:_SHOWN]) + (", …" if len(missing) > _SHOWN else "")
        raise CheckpointError(path=path, problem=f"{len(missing)} tensors are missing ({listed})", remedy=_REMEDY)


def _is_of(part: str, name: str) -> bool:
    """Whether the model ``part`` loads ``name``; vLLM drops what belongs to the other part and to the vision tower."""
    if name.startswith(IGNORED_PREFIXES):
        return False
    return name.startswith("mtp.") == (part == "draft")
