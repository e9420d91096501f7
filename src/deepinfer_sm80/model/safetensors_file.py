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

ITEM_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64"), 8),
}

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

    Raises CheckpointError if the file cannot be read, if its header is not one, if the tensors do not fill the data
    without gap or overlap, each with the bytes of its dtype and shape, or if the file is shorter or longer than that.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            header, start = _parse(file, path, size)
    except OSError as error:
        problem = f"it cannot be read ({error.strerror or error})"
        raise CheckpointError(path=path, problem=problem, remedy="Check that it is a file you may read") from error
    spans = {name: _span(path, name, value) for name, value in header.items()}
    end = 0
    for name, (_, begin, stop) in sorted(spans.items(), key=lambda item: item[1][1:]):
        if begin != end:
            problem = (
                f"the data of {name} must begin at byte {end}, where the tensor before it ends, and begins at {begin}"
            )
            raise CheckpointError(path=path, problem=problem, remedy=_TORN)
        end = stop
    if start + end != size:
        problem = f"its header describes {start + end} bytes and the file has {size}"
        raise CheckpointError(path=path, problem=problem, remedy=_TORN)
    return {name: (entry, start + begin) for name, (entry, begin, _) in spans.items()}


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """For ``json.loads(object_pairs_hook=)``: a dict, or ValueError for a name that stands twice in one object."""
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} stands there twice")
    return found


def _parse(file: BinaryIO, path: Path, size: int) -> tuple[dict[str, Any], int]:
    length = int.from_bytes(file.read(8), "little")
    if size < 8 or not 0 < length <= min(size - 8, _LONGEST_HEADER):
        raise CheckpointError(path=path, problem="this is not a complete safetensors file", remedy=_TORN)
    try:
        header = json.loads(file.read(length), object_pairs_hook=unique_keys)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(path=path, problem=f"the header cannot be read ({error})", remedy=_TORN) from error
    if not isinstance(header, dict):
        problem = f"the header must be a JSON object, found a {type(header).__name__}"
        raise CheckpointError(path=path, problem=problem, remedy=_TORN)
    header.pop("__metadata__", None)
    return header, 8 + length


def _span(path: Path, name: str, value: Any) -> tuple[Entry, int, int]:
    """(dtype, shape), begin and end of the data of one entry of a header."""

    def require(ok: bool, what: str, allowed: str, found: object) -> None:
        if not ok:
            problem = f"{what} of {name} must be {allowed}, found {found!r}"
            raise CheckpointError(path=path, problem=problem, remedy=_TORN)

    fields = {"dtype", "shape", "data_offsets"}
    require(isinstance(value, dict) and fields <= value.keys(), "the entry", "dtype, shape and data_offsets", value)
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    require(isinstance(dtype, str) and dtype in ITEM_BYTES, "the dtype", f"one of {', '.join(ITEM_BYTES)}", dtype)
    require(_sizes(shape), "the shape", "a list of integers, 0 or larger", shape)
    require(_sizes(offsets) and len(offsets) == 2, "data_offsets", "two integers, 0 or larger", offsets)
    entry = (dtype, tuple(shape))
    begin, end = offsets
    require(end - begin == tensor_bytes(entry), "data_offsets", f"{tensor_bytes(entry)} bytes apart", offsets)
    return entry, begin, end


def _sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)
