"""Step and chunk times of an engine, and what it compiles while it serves."""

from __future__ import annotations

import fcntl
import os
import random
import statistics
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

BATCHES = (1, 8, 64)
STEPS = 32
CHUNK = 2048
REPEATS = 3
MIXED_BATCHES = 50


@contextmanager
def turn(*, alone: bool) -> Iterator[None]:
    """Take turns with the processes for which PROVE_TURN names the same file: many may start up, one alone measures."""
    path = os.environ.get("PROVE_TURN")
    if not path:
        yield
        return
    with open(path, "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        yield


@contextmanager
def counting_compilations() -> Iterator[list[str]]:
    """Names of the Triton kernels compiled inside the block, in this process."""
    import triton

    found: list[str] = []
    hooks = triton.knobs.runtime
    before = hooks.jit_post_compile_hook

    def note(**facts: Any) -> None:
        found.append(facts["fn"].name)

    hooks.jit_post_compile_hook = note
    try:
        yield found
    finally:
        hooks.jit_post_compile_hook = before


def decode_ms(engine: Any, batch: int) -> float:
    """Milliseconds of one decode step of ``batch`` requests: the difference of a long and a short run, over steps."""
    prompts = [engine.prompts[-1][i : i + 100 + i % 17] for i in range(batch)]

    def seconds(tokens: int) -> float:
        engine.llm.reset_prefix_cache()
        start = time.perf_counter()
        engine.generate(prompts, tokens)
        return time.perf_counter() - start

    seconds(4)
    long, short = (min(seconds(n) for _ in range(REPEATS)) for n in (STEPS + 1, 1))
    return round(1000 * (long - short) / STEPS, 3)


def chunk_ms(engine: Any) -> float:
    """Milliseconds of one prompt of ``CHUNK`` tokens and its first token, in one chunk."""
    times = []
    for _ in range(REPEATS + 1):
        engine.llm.reset_prefix_cache()
        start = time.perf_counter()
        engine.generate([engine.prompts[-1][:CHUNK]], 1)
        times.append(time.perf_counter() - start)
    return round(1000 * statistics.median(times[1:]), 2)


def times(engine: Any) -> dict[str, float]:
    steps = {f"decode_ms_batch_{batch}": decode_ms(engine, batch) for batch in BATCHES}
    return steps | {f"prefill_ms_{CHUNK}": chunk_ms(engine)}


def mixed_batches(engine: Any) -> list[str]:
    """Serve batches of odd sizes and lengths; the names of what was compiled meanwhile."""
    choose = random.Random(0)
    text = [token for prompt in engine.prompts for token in prompt]
    with counting_compilations() as compiled:
        for _ in range(MIXED_BATCHES):
            prompts = []
            for _ in range(choose.choice((1, 2, 3, 5, 8, 13, 33))):
                length = choose.choice((1, 2, 3, 17, 64, 127, 128, 129, 300, 777, 1300))
                start = choose.randrange(len(text) - length)
                prompts.append(text[start : start + length])
            engine.generate(prompts, choose.choice((1, 2, 5, 9)))
    return compiled
