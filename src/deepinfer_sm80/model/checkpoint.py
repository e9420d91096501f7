"""Writing and reading checkpoints in the released DeepSeek-V4.1 form: safetensors shards, index, config, tokenizer."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import glob
import itertools
import json
import math
import os
import secrets
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepinfer_sm80.errors import CheckpointError, DeepInferError
from deepinfer_sm80.model import safetensors_file
from deepinfer_sm80.model.checkpoint_target import FIXED, check_target
from deepinfer_sm80.model.requirements import require
from deepinfer_sm80.model.schema import Tensors, expected_tensors
from deepinfer_sm80.model.tokenizer_files import tokenizer_files

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch

    from deepinfer_sm80.model.config import ModelConfig

INDEX = "model.safetensors.index.json"
SHARD_BYTES = 500_000_000

_CODES = ("F8_E4M3", "F8_E8M0", "I8")
_SHOWN = 60  # characters of what was found
_MOST_THREADS = 8  # with one weight in memory each, of 1.3 GB at most, and one more
_SILENCE = 10.0  # seconds


@dataclasses.dataclass(frozen=True)
class Written:
    """What ``write_checkpoint`` left: the directory, its number of files, their bytes and the seconds it took."""

    path: Path
    files: int
    bytes: int
    seconds: float


def write_checkpoint(
    directory: str | Path, config: ModelConfig, seed: int = 0, progress: Callable[[str], None] | None = None
) -> Written:
    """Writes a random checkpoint of ``config`` that vLLM loads, and returns what was written.

    The same seed and PyTorch build give the same bits. Symbolic links in ``directory`` are followed. Everything goes
    into a sibling directory that takes the name ``directory`` only when it is complete and on disk; any failure removes
    it. ``progress`` gets one line a shard, one every ten seconds within a shard, and one for what a run that was killed
    has left there. It uses as many threads as PyTorch would, eight at most, and up to 5 GB of memory (preset
    ``layer``).

    Raises CheckpointError if ``directory`` exists and is not empty, is a mount point or the current directory, has no
    parent directory, cannot be written or does not fit on the disk, or if somebody else wrote there meanwhile;
    MissingPackageError if the packages of the ``checkpoint`` extra are not installed.
    """
    started, target = time.monotonic(), Path(os.path.realpath(Path(directory).expanduser()))
    shards = _plan(expected_tensors(config))
    texts = {**tokenizer_files(config), **_json_files(config, shards)}
    # Random, not the process id, which repeats in a container; not mkdtemp, whose mode 0700 the result would keep.
    partial = target.with_name(f"{_partial_prefix(target)}{secrets.token_hex(4)}") if target.name else target
    with _failures_explained(target, partial):
        check_target(target, sum(map(_shard_bytes, shards.values())))
        if progress:
            _name_leftovers(target, progress)
        try:
            partial.mkdir()
            size = sum(_write_text(partial / name, text) for name, text in texts.items())
            size += _write_shards(partial, config, shards, seed, progress)
            _sync_directory(partial)
            _take_name(partial, target)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        _sync_directory(target.parent)
    return Written(target, len(shards) + len(texts), size, time.monotonic() - started)


def read_headers(directory: str | Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Name -> (safetensors dtype, shape) of every tensor in ``directory``, from the headers alone.

    Raises CheckpointError if there are no shards, a shard or the index is damaged, the index disagrees with the shards,
    or a name is in two of them.
    """
    return {name: entry for name, (_, entry, _) in _locate(Path(directory)).items()}


def load_tensor(directory: str | Path, name: str) -> torch.Tensor:
    """One tensor on the CPU: BF16 as bfloat16, F32 as float32; F8_E4M3, F8_E8M0 and I8 as their uint8 codes.

    Reads every header each time; ``Reader`` reads them once. Raises CheckpointError for an unknown name and for
    any other dtype.
    """
    return Reader(directory).load(name)


class Reader:
    """The tensors of one checkpoint directory; ``headers`` is what ``read_headers`` returns."""

    def __init__(self, directory: str | Path) -> None:
        """Raises CheckpointError like ``read_headers``."""
        self.path = Path(directory)
        self._places = _locate(self.path)
        self.headers = {name: entry for name, (_, entry, _) in self._places.items()}

    def load(self, name: str) -> torch.Tensor:
        """As ``load_tensor``."""
        require("torch")
        import torch

        if name not in self._places:
            raise CheckpointError(
                path=self.path, problem=f"it has no tensor {name}", remedy="See read_headers for the names it has"
            )
        file, entry, offset = self._places[name]
        dtypes = {"BF16": torch.bfloat16, "F32": torch.float32, **dict.fromkeys(_CODES, torch.uint8)}
        if entry[0] not in dtypes:
            problem = f"{name} is {entry[0]}, must be one of {', '.join(dtypes)}"
            raise CheckpointError(path=file, problem=problem, remedy="Use a checkpoint in the released form")
        dtype = dtypes[entry[0]]
        if not math.prod(entry[1]):
            return torch.empty(entry[1], dtype=dtype)
        buffer = bytearray(safetensors_file.tensor_bytes(entry))
        with file.open("rb") as stream:
            stream.seek(offset)
            if stream.readinto(buffer) != len(buffer):
                raise CheckpointError(path=file, problem=f"{name} is cut off", remedy="Download or write it again")
        return torch.frombuffer(buffer, dtype=dtype).reshape(entry[1])


def _locate(directory: Path) -> dict[str, tuple[Path, safetensors_file.Entry, int]]:
    """Name -> (file, entry, offset). With an index, only the files it names, as vLLM reads them."""
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        remedy = "Name a directory with a downloaded checkpoint, or one made by: deepinfer-sm80 make-checkpoint"
        why = "" if directory.is_dir() else ": it is a file" if directory.is_file() else ": there is no such directory"
        raise CheckpointError(path=directory, problem=f"there are no *.safetensors files here{why}", remedy=remedy)
    index = directory / INDEX
    listed = _weight_map(index) if index.exists() else None
    named = {file.name for file in files} if listed is None else set(listed.values())
    places: dict[str, tuple[Path, safetensors_file.Entry, int]] = {}
    for file in (file for file in files if file.name in named):
        for name, (entry, offset) in safetensors_file.read_header(file).items():
            if name in places:
                problem = f"{name} is in {places[name][0].name} and in {file.name}"
                remedy = f"Keep one of the two, or the {INDEX} that leaves one out"
                raise CheckpointError(path=directory, problem=problem, remedy=remedy)
            places[name] = (file, entry, offset)
    listed = listed or {}
    absent = [name for name, file in listed.items() if name not in places or places[name][0].name != file]
    if absent:
        problem = (
            f"{len(absent)} tensors of the index are not in the file it names ({absent[0]} in {listed[absent[0]]})"
        )
        raise CheckpointError(path=directory, problem=problem, remedy="Download the missing shards")
    return places


def _weight_map(index: Path) -> dict[str, str]:
    """Tensor name -> file name, from an index file."""
    remedy = "Download the index again, or remove it if all shards in this directory belong together"
    try:
        content = json.loads(index.read_bytes(), object_pairs_hook=safetensors_file.unique_keys)
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(path=index, problem=f"the index cannot be read ({error})", remedy=remedy) from error
    found = content.get("weight_map") if isinstance(content, dict) else content
    if not isinstance(found, dict) or not all(isinstance(file, str) for file in found.values()):
        problem = f"the index must hold a weight_map of tensor names to file names, found {str(found)[:_SHOWN]}"
        raise CheckpointError(path=index, problem=problem, remedy=remedy)
    return found


def _plan(tensors: Tensors) -> dict[str, Tensors]:
    """Shard file name -> its tensors, in order, closed at SHARD_BYTES; a weight and its scale stay together."""
    shards: list[Tensors] = [{}]
    filled = 0
    for name, entry in tensors.items():
        size = safetensors_file.tensor_bytes(entry)
        if shards[-1] and filled + size > SHARD_BYTES and not name.endswith(".scale"):
            shards.append({})
            filled = 0
        shards[-1][name] = entry
        filled += size
    return {f"model-{i:05d}-of-{len(shards):05d}.safetensors": shard for i, shard in enumerate(shards, 1)}


def _shard_bytes(shard: Tensors) -> int:
    return sum(map(safetensors_file.tensor_bytes, shard.values()))


def _json_files(config: ModelConfig, shards: dict[str, Tensors]) -> dict[str, str]:
    generation = {"bos_token_id": config.bos_token_id, "eos_token_id": config.eos_token_id}
    index = {
        "metadata": {"total_size": sum(map(_shard_bytes, shards.values()))},
        "weight_map": {name: file for file, shard in shards.items() for name in shard},
    }
    files = {"config.json": config.to_config_json(), "generation_config.json": generation, INDEX: index}
    return {name: json.dumps(content, indent=2) + "\n" for name, content in files.items()}


def _write_shards(
    directory: Path,
    config: ModelConfig,
    shards: dict[str, Tensors],
    seed: int,
    progress: Callable[[str], None] | None,
) -> int:
    require("numpy")  # it carries the tensors' bytes to the files
    threads = min(require("torch").get_num_threads(), _MOST_THREADS)
    from deepinfer_sm80.model.weights import random_tensors_ahead

    entries = {name: entry for shard in shards.values() for name, entry in shard.items()}
    total = 0
    with contextlib.closing(random_tensors_ahead(config, entries, seed, threads)) as tensors:
        for number, (file, shard) in enumerate(shards.items(), 1):
            mine: Iterator[tuple[str, torch.Tensor]] = itertools.islice(tensors, len(shard))
            if progress:
                mine = _watched(mine, file, len(shard), progress)
            total += safetensors_file.write(directory / file, shard, ((name, _raw(tensor)) for name, tensor in mine))
            if progress:
                size = f"{_shard_bytes(shard) / 1e9:.2f} GB"
                progress(f"{file}: {len(shard)} tensors, {size} ({number} of {len(shards)})")
    return total


def _watched(
    tensors: Iterator[tuple[str, torch.Tensor]], file: str, count: int, progress: Callable[[str], None]
) -> Iterator[tuple[str, torch.Tensor]]:
    """``tensors`` with a line of ``progress`` every _SILENCE seconds."""
    last = time.monotonic()
    for number, item in enumerate(tensors):
        if time.monotonic() - last > _SILENCE:
            progress(f"{file}: {number} of {count} tensors so far")
            last = time.monotonic()
        yield item


def _raw(tensor: torch.Tensor) -> Any:
    """The bytes of a CPU tensor as a buffer that keeps the tensor alive."""
    return tensor.contiguous().view(require("torch").uint8).flatten().numpy()


def _write_text(path: Path, text: str) -> int:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    return path.stat().st_size


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _partial_prefix(target: Path) -> str:
    return f".{target.name}.partial-"


def _name_leftovers(target: Path, progress: Callable[[str], None]) -> None:
    for left in sorted(target.parent.glob(f"{glob.escape(_partial_prefix(target))}*")):
        progress(f"{left} was left by a run that was killed, unless that run is still going: remove it")


def _take_name(partial: Path, target: Path) -> None:
    """Renames the finished directory; ``target`` may be an empty directory."""
    try:
        partial.rename(target)
    except OSError as error:
        if error.errno == errno.EBUSY:  # a bind mount within one file system, which os.path.ismount does not see
            remedy = f"Name one inside it: {target / 'model'}"
            raise CheckpointError(path=target, problem=FIXED.format("a mount point"), remedy=remedy) from error
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise
        problem = "somebody else wrote there while this checkpoint was made"
        remedy = "Keep what is there or name another directory; nothing of this one was left behind"
        raise CheckpointError(path=target, problem=problem, remedy=remedy) from error


@contextlib.contextmanager
def _failures_explained(target: Path, partial: Path) -> Iterator[None]:
    """Turns an OSError of the file system into one sentence with a remedy."""
    try:
        yield
    except OSError as error:
        if isinstance(error, DeepInferError):
            raise
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        remedy = "Free some space" if full else "Check that you may write there"
        left = f"{partial} could not be removed" if partial.is_dir() else "nothing was left behind"
        raise CheckpointError(
            path=target,
            problem=f"it could not be written ({error.strerror or error})",
            remedy=f"{remedy}, or name a directory on another disk; {left}",
        ) from error
