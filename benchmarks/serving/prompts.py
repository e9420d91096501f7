"""Real prose for proofs and benchmarks: the Python manual that every interpreter carries, cut into distinct prompts."""

from __future__ import annotations

import pydoc_data.topics
import re
from typing import Any

LENGTHS = (1, 2, 7, 64, 129, 700, 1500, 3000)


def prose() -> str:
    """Several hundred thousand characters of English about Python, in a fixed order."""
    topics = pydoc_data.topics.topics
    return re.sub(r"[*`]+", "", "\n\n".join(topics[name] for name in sorted(topics)))


def token_ids(tokenizer: Any, lengths: tuple[int, ...] = LENGTHS, start: int = 0) -> list[list[int]]:
    """One prompt of each length, all distinct text; each begins with a nonce so that no prefix is shared.

    ``tokenizer`` has ``encode(text) -> list[int]``; ``start`` shifts the window of text.
    """
    ids = list(tokenizer.encode(prose()[start : start + 200_000]))
    prompts, at = [], 200
    for number, length in enumerate(lengths):
        nonce = list(tokenizer.encode(f"{number * 7919 + start} "))[:length]
        prompts.append((nonce + ids[at : at + length])[:length])
        at += length + 31
    return prompts
