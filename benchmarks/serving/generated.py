"""vLLM's default path with everything the specification needs to do the same: tokens, log-probabilities and steps."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pathlib

    from recording import Schedule

NEW_TOKENS = 64
SHORTEST = 700
SHARED_PREFIX = 2000  # tokens of the longest prompt that the last request begins with


def record(engine: Any, schedule: Schedule, path: pathlib.Path) -> dict[str, Any]:
    """Long prompts together, then one that begins like the longest: a prefix hit. Saves a list of requests to ``path``.

    prompt, tokens   token ids given and generated
    logprobs         float32 [64]: of the generated tokens, as vLLM reports them
    cached           prompt tokens found in the prefix cache
    steps            see ``recording.Schedule``
    """
    import torch

    prompts = [ids for ids in engine.prompts if len(ids) >= SHORTEST]
    outputs = engine.generate(prompts, NEW_TOKENS)
    longest = max(prompts, key=len)
    after = next(ids for ids in engine.prompts if len(ids) >= 64)
    outputs += engine.generate([longest[:SHARED_PREFIX] + after], NEW_TOKENS)
    requests = [request_of(output, schedule) for output in outputs]
    torch.save(requests, path)
    if not requests[-1]["cached"]:
        raise AssertionError(f"no cached tokens on a shared prefix of {SHARED_PREFIX}")
    prefills = [step for request in requests for step in request["steps"] if step["prefill"]]
    return {
        "prompts": " ".join(str(len(request["prompt"])) for request in requests),
        "cached": requests[-1]["cached"],
        "prefill_steps": len(prefills),
        "trimmed": sum(step["trimmed"] for step in prefills),
        "graphs": " ".join(sorted({step["graph"] for request in requests for step in request["steps"]})),
        "largest_chunk": max(step["scheduled"] for step in prefills),
    }


def request_of(output: Any, schedule: Schedule) -> dict[str, Any]:
    """One vLLM output as ``record`` saves it. Raises AssertionError where its steps do not add up to its tokens."""
    import torch

    completion = output.outputs[0]
    tokens = list(completion.token_ids)
    logprobs = [step[token].logprob for token, step in zip(tokens, completion.logprobs, strict=True)]
    if not all(map(math.isfinite, logprobs)):
        raise AssertionError("a log-probability of a generated token is not finite")
    prompt = list(output.prompt_token_ids)
    last = len(prompt) + len(tokens) - 1  # nothing is computed for the last token, unless a step ran ahead of its end
    steps = [step for step in schedule.of(output.request_id) if step["computed"] < last]
    at = [step["computed"] for step in steps]
    ends = [step["computed"] + step["scheduled"] for step in steps]
    if not steps or at[1:] != ends[:-1] or ends[-1] != last:
        raise AssertionError(
            f"request {output.request_id} of {len(prompt)} + {len(tokens)} tokens ran the steps "
            f"{list(zip(at, ends, strict=True))[:8]}: they must follow each other up to the last token but one"
        )
    return {
        "prompt": prompt,
        "tokens": tokens,
        "logprobs": torch.tensor(logprobs),
        "cached": output.num_cached_tokens or 0,
        "steps": steps,
    }
