"""Stages ``in-process``, ``http`` and ``http-compare``: ``vllm serve`` asked by the official client, token by token.

The same prompts go through ``LLM.generate`` and through a server, each alone and eight at once, under the server's
limits for a step. Eight that wait in the queue when the server begins are scheduled as ``LLM.generate`` schedules them,
and give the same tokens. Eight that arrive meanwhile (``arriving``) are scheduled differently each time, and a step of
another size sums in another order: there tokens may part, but only where the in-process run saw the server's token
within one bfloat16 step of its own best.
"""

from __future__ import annotations

import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import http_requests as ask
import parting
from limits import TIE

from deepinfer_sm80.testing.served import Server

if TYPE_CHECKING:
    import pathlib

TOP = 5  # log-probabilities kept of each in-process step: the ties that may be resolved differently
KINDS = ("alone", "together", "arriving", "chat", "streamed")
SAME_STEPS = ("alone", "together", "chat", "streamed")  # both arms schedule the same steps: the same tokens, always
LIMITS = {"max_num_batched_tokens": 2048, "max_num_seqs": 256}  # of a step: vLLM's defaults for a server on an A100
STREAMED = 3  # number of the prompt that is streamed
VALUES = "{}.values"
LOGPROB = 0.02  # nats on average: what two implementations of this model may differ by
BOOT_LIMIT_S = 300
GRAMMARS = ("xgrammar", "llguidance", "outlines_core", "lm-format-enforcer", "mistral_common")
"""Packages that vLLM requires and imports at the first request with a grammar; without one it answers status 500."""


def in_process(model: pathlib.Path, out: pathlib.Path) -> dict[str, Any]:
    """Tokens, log-probabilities and the best TOP of every step, in OUT/in-process.values."""
    import stages
    from vllm import SamplingParams

    engine = stages.Engine(model, **LIMITS)
    params = SamplingParams(temperature=0, max_tokens=ask.NEW_TOKENS, ignore_eos=True, logprobs=TOP)
    alone = [engine.generate([prompt], ask.NEW_TOKENS, logprobs=TOP)[0] for prompt in engine.prompts]
    engine.llm.reset_prefix_cache()
    together = engine.generate(engine.prompts, ask.NEW_TOKENS, logprobs=TOP)
    engine.llm.reset_prefix_cache()
    options = {"chat_template_kwargs": {"thinking": False}, "use_tqdm": False}
    chatted = engine.llm.chat(conversations(), params, **options)
    stages.require_finite([*alone, *together, *chatted], ask.NEW_TOKENS)
    runs = {"alone": alone, "together": together, "chat": chatted}
    values = {kind: [_kept(output) for output in outputs] for kind, outputs in runs.items()}
    values |= {"arriving": values["together"], "streamed": [values["alone"][STREAMED]]}
    (out / VALUES.format("in-process")).write_text(json.dumps(values))
    return engine.result(requests=sum(map(len, runs.values())))


def http(model: pathlib.Path, out: pathlib.Path) -> dict[str, Any]:
    """``vllm serve`` with the documented flags and LIMITS, asked everything; tokens in OUT/http.values."""
    import openai
    import stages

    lacking = [name for name in GRAMMARS if not stages.installed(name)]
    if lacking:
        raise AssertionError(
            f"tool calls and structured output need vLLM's own requirements {', '.join(GRAMMARS)}; not installed: "
            f"{', '.join(lacking)}. Install them (pip install vllm==0.33.0 does) and run the stage again."
        )
    stages.apply_disguise()
    from deepinfer_sm80.model import prose
    from deepinfer_sm80.model.checkpoint_files import read_tokenizer

    tokenizer = read_tokenizer(model)
    prompts = prose.prompts(lambda text: tokenizer.encode(text, add_special_tokens=False).ids)
    bias = ask.whitespace_bias(tokenizer.decode, tokenizer.get_vocab_size())
    more = LIMITS | (stages.SHARED_GPU if os.environ.get("PROVE_SHARED_GPU") else {})
    options = [*ask.FLAGS, "--log-error-stack"]  # the server's log says why it answered 500
    options += [f"--{name.replace('_', '-')}={value}" for name, value in more.items()]
    os.environ["VLLM_SERVER_DEV_MODE"] = "1"  # /pause and /resume
    with Server(model, out / "http-server.log", options, limit=BOOT_LIMIT_S) as server:
        values, facts = everything(server.url, prompts, bias)
    (out / VALUES.format("http")).write_text(json.dumps(values))
    facts = {"boot_s": round(server.boot_seconds, 1), "openai": openai.__version__, **facts}
    return {**stages.facts_of_machine(), "facts": facts, "flags": list(ask.FLAGS)}


def everything(url: str, prompts: list[list[int]], bias: dict[str, float]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Ask the server at ``url`` for all of it: (tokens for the comparison, facts). Raises AssertionError."""
    client = ask.client_of(url)
    start = time.monotonic()
    name = client.models.list().data[0].id
    values: dict[str, Any] = {"alone": [ask.completion(client, name, p, f"alone-{i}") for i, p in enumerate(prompts)]}
    values["arriving"] = ask.at_once(lambda p: ask.completion(client, name, p, "arriving"), prompts)
    values["together"] = ask.in_order(client, lambda p: ask.completion(client, name, p, "together"), prompts)
    values["chat"] = ask.in_order(client, lambda m: ask.chat_tokens(client, name, m, "chat"), conversations())
    values["streamed"] = [ask.streamed(client, name, prompts[STREAMED], "streamed")]
    with ThreadPoolExecutor(1) as pool:
        long = pool.submit(ask.completion, client, name, prompts[STREAMED], "long", ask.LONG_TOKENS)
        tool = ask.tool_call(client, name, bias)
        thought = ask.reasoning(client, name)
        grammar = ask.structured(client, name, bias)
        refused = ask.image_refused(client, name)
        generated = long.result()
    facts = {
        "together": len(values["together"]),
        "streamed_pieces": values["streamed"][0]["pieces"],
        "tool": json.dumps(tool["arguments"]),
        "reasoning_characters": len(thought["reasoning"]),
        "structured": ", ".join(f"by {kind}: {' '.join(text.split())}" for kind, text in grammar.items()),
        "image": refused[:40],
        "long_tokens": len(generated["tokens"]),
        "long_lowest_logprob": round(min(generated["logprobs"]), 2),
        "asked_s": round(time.monotonic() - start, 1),
    }
    return values, facts


def http_compare(model: pathlib.Path, out: pathlib.Path) -> dict[str, Any]:
    """The server's tokens against the in-process run's, from what both stages saved in OUT."""
    names = ("http", "in-process")
    failed = [name for name in names if not json.loads((out / f"{name}.json").read_text()).get("ok")]
    if failed:
        raise AssertionError(f"{' and '.join(failed)} failed: what it saved is of another run")
    runs = [json.loads((out / VALUES.format(name)).read_text()) for name in names]
    rows = {kind: judge(runs[0][kind], runs[1][kind], exact=kind in SAME_STEPS) for kind in KINDS}
    facts = {kind: f"{row['same']} of {row['requests']} the same" for kind, row in rows.items()}
    facts["widest_gap_where_they_part"] = max(row["widest_gap"] for row in rows.values())
    return {"ok": all(row["ok"] for row in rows.values()), "facts": facts, "rows": rows}


def judge(served: list[dict[str, Any]], here: list[dict[str, Any]], *, exact: bool = False) -> dict[str, Any]:
    """Requests whose tokens are the same, and the widest gap of two log-probabilities where the others part.

    ``ok``: no gap is wider than TIE, log-probabilities up to there differ by LOGPROB or less on average, prompts are
    the same, and nothing is missing; ``exact``: no tokens part. A token outside the in-process run's best TOP counts as
    a gap of 99.
    """
    same, gaps, moved, prompts = 0, [], [], True
    for theirs, ours in zip(served, here, strict=True):
        prompts &= theirs.get("prompt", ours["prompt"]) == ours["prompt"]
        at = parting.first_difference(ours["tokens"], theirs["tokens"])
        upto = len(ours["tokens"]) if at is None else at
        moved += [abs(a - b) for a, b in zip(theirs["logprobs"][:upto], ours["logprobs"][:upto], strict=True)]
        if at is None:
            same += 1
            continue
        gaps.append(parting.lead(ours["top"][at], theirs["tokens"][at]))
    widest, mean = max(gaps, default=0.0), sum(moved) / max(len(moved), 1)
    return {
        "ok": bool(here) and prompts and widest <= TIE and mean <= LOGPROB and (same == len(here) or not exact),
        "requests": len(here),
        "same": same,
        "widest_gap": round(widest, 4),
        "mean_logprob_difference": round(mean, 5),
        "largest_logprob_difference": round(max(moved, default=0.0), 4),
        "same_prompts": prompts,
        "allowed_gap": TIE,
    }


def conversations() -> list[list[dict[str, str]]]:
    """Eight chats of one message each: paragraphs of the frozen text."""
    from deepinfer_sm80.model.prose import prose

    paragraphs = [text for text in prose().split("\n\n") if len(text) > 200]
    return [[{"role": "user", "content": text}] for text in paragraphs[:8]]


def _kept(output: Any) -> dict[str, Any]:
    """Of one vLLM output: prompt, tokens, their log-probabilities, and each step's best as (token, log-probability)."""
    completion = output.outputs[0]
    steps = completion.logprobs
    return {
        "prompt": list(output.prompt_token_ids),
        "tokens": list(completion.token_ids),
        "logprobs": [step[token].logprob for token, step in zip(completion.token_ids, steps, strict=True)],
        "top": parting.kept([output])[0],
    }
