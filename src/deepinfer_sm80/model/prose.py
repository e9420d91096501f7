"""Frozen English prose about this software, and the prompts that tests, proofs and benchmarks cut out of it.

The text is a file of the package, so that a log-probability of it means the same everywhere: 11,391 tokens of
DeepSeek's tokenizer, paragraphs from this project's documents and docstrings as they were when it was frozen.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import TYPE_CHECKING

from deepinfer_sm80.errors import UnsupportedOptionError
from deepinfer_sm80.model.requirements import require
from deepinfer_sm80.model.tokenizer_files import installed_tokenizer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

LENGTHS = (1, 2, 7, 64, 129, 700, 1500, 3000)

_FIRST, _GAP = 200, 31  # tokens of the text before the first prompt and between two of them


@functools.cache
def prose() -> str:
    """The text, 47,130 characters; paragraphs are separated by an empty line."""
    return Path(__file__).with_name("prose.txt").read_text(encoding="utf-8")


def prompts(encode: Callable[[str], Sequence[int]], lengths: Sequence[int] = LENGTHS) -> list[list[int]]:
    """One prompt of each length as token ids, of distinct pieces of the text, in order.

    Each begins with a number of its own, so that no two share a prefix. ``encode`` gives a text's token ids without
    special ones. Raises UnsupportedOptionError when the text is too short for ``lengths``.
    """
    ids, found, at = list(encode(prose())), [], _FIRST
    needed = _FIRST + sum(lengths) + _GAP * (len(lengths) - 1)
    if needed > len(ids):
        raise UnsupportedOptionError(
            option="lengths",
            found=f"{list(lengths)}, {needed} tokens",
            allowed=f"what fits into the {len(ids)} tokens of the text",
            remedy="Ask for fewer or shorter prompts.",
        )
    for number, length in enumerate(lengths):
        nonce = list(encode(f"{number * 7919} "))
        found.append((nonce + ids[at : at + length])[:length])
        at += length + _GAP
    return found


@functools.cache
def token_ids() -> frozenset[int]:
    """The token ids that the text contains. Raises MissingPackageError without the tokenizer's packages."""
    tokenizer = require("tokenizers").Tokenizer.from_str(json.dumps(installed_tokenizer()))
    return frozenset(tokenizer.encode(prose(), add_special_tokens=False).ids)
