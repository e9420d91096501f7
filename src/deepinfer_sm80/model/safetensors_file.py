"""Reading and writing single safetensors files with the standard library: headers without tensors, tensors one by one.

Layout: 8 bytes little-endian length of the header, the header (JSON: name -> dtype, shape, data_offsets relative to
the end of the header), the data. Source: https://github.com/huggingface/safetensors, format section.
"""

from __future__ import annotations

import json
import math
import os
from typing import TYPE_CHECKING, Any, BinaryIO

from deepinfer_sm80.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

ITEM_BYTES = {"BF16": 2, "F32": 4, "F8_E4M3": 1, "F8_E8M0": 1, "I8": 1}

_LONGEST_HEADER = 100_000_000  # the bound of the format's own readers
_ALIGNMENT = 8
_CALLER = "The data must follow the entries, name by name"
_TORN = "Download or write this file again"

Entry = tuple[str, tuple[int, ...]]


def tensor_bytes(entry: Entry) -> int:
    """Bytes of a tensor given as (safetensors dtype, shape)."""
    dtype, shape = entry
    return math.prod(shape) * ITEM_BYTES[dtype]


def write(path: Path, entries: Mapping[str, Entry], data: Iterable[tuple[str, Any]]) -> int:
    """Writes one file and makes it durable; returns its bytes.

    ``data`` yields (name, buffer of raw little-endian bytes) in the order of ``entries``, so that only one tensor is
    in memory. Raises CheckpointError if names or sizes disagree with ``entries``, OSError from the file system.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, entry in entries.items():
        start, end = end, end + tensor_bytes(entry)
        header[name] = {"dtype": entry[0], "shape": list(entry[1]), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    remaining = dict(entries)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, buffer in data:
            view = memoryview(buffer).cast("B")
            if next(iter(remaining), None) != name or tensor_bytes(remaining.pop(name)) != view.nbytes:
                problem = f"{name} came out of order or with {view.nbytes} bytes"
                raise CheckpointError(path=path, problem=problem, remedy=_CALLER)
            file.write(view)
        if remaining:
            raise CheckpointError(path=path, problem=f"no data for {next(iter(remaining))}", remedy=_CALLER)
        file.flush()
        os.fsync(file.fileno())
    return 8 + len(text) + end


def read_header(path: Path) -> dict[str, tuple[Entry, int]]:
    """Name -> ((dtype, shape), absolute offset of the data) of one file, reading nothing but its header.

    Raises CheckpointError if the header is not one, or if the file is shorter or longer than its header says.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        header, start = _parse(file, path, size)
    end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
    if start + end != size:
        problem = f"its header describes {start + end} bytes and the file has {size}"
        raise CheckpointError(path=path, problem=problem, remedy=_TORN)
    return {
        name: ((entry["dtype"], tuple(entry["shape"])), start + entry["data_offsets"][0])
        for name, entry in header.items()
    }


def _parse(file: BinaryIO, path: Path, size: int) -> tuple[dict[str, Any], int]:
    length = int.from_bytes(file.read(8), "little")
    if size < 8 or not 0 < length <= min(size - 8, _LONGEST_HEADER):
        raise CheckpointError(path=path, problem="this is not a complete safetensors file", remedy=_TORN)
    try:
        header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        well_formed = all({"dtype", "shape", "data_offsets"} <= entry.keys() for entry in header.values())
    except (ValueError, AttributeError) as error:
        raise CheckpointError(path=path, problem=f"the header cannot be read ({error})", remedy=_TORN) from error
    if not well_formed:
        raise CheckpointError(path=path, problem="a tensor without dtype, shape or data_offsets", remedy=_TORN)
    return header, 8 + length
