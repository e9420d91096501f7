"""What the official ``openai`` client asks of a served checkpoint, and what each answer must be.

Functions take an ``openai.OpenAI`` client and the served name; they raise AssertionError where an answer is wrong.
Requests are greedy. A cache salt of its own keeps each from another's prefix cache. The weights are random: what a
grammar leaves free is noise, so what is asked for is bounded.
"""

from __future__ import annotations

import json
import math
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    import openai

NEW_TOKENS = 64
LONG_TOKENS = 8192
LIMIT_S, LONG_LIMIT_S = 60.0, 240.0
APART_S, ARRIVED_S = 0.1, 1.0  # between requests that wait in an order, and after the last of them
FLOOR = -9999.0  # what vLLM's server says instead of minus infinity
THINKING_TOKENS = 12
FLAGS = (
    "--enable-auto-tool-choice",
    "--tool-call-parser=deepseek_v41",
    "--reasoning-parser=deepseek_v41",
)
"""The options of ``vllm serve`` that the README gives for tools and reasoning."""

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "quay": {"type": "string", "enum": ["north", "south"]},
        "boats": {"type": "integer", "enum": [1, 2, 3]},
    },
    "required": ["quay", "boats"],
    "additionalProperties": False,
}
TOOL = {
    "type": "function",
    "function": {"name": "berth", "description": "Give boats a berth.", "strict": True, "parameters": SCHEMA},
}
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="

Result = dict[str, Any]


def client_of(url: str) -> openai.OpenAI:
    """The official client: no retries, so that a failure is seen, a time limit, and no proxy of the environment."""
    from openai import DefaultHttpxClient, OpenAI

    direct = DefaultHttpxClient(trust_env=False)
    return OpenAI(base_url=f"{url}/v1", api_key="none", timeout=LIMIT_S, max_retries=0, http_client=direct)


def require_finite(values: Iterable[float | None], expected: int) -> list[float]:
    """``expected`` log-probabilities, each a number: vLLM sends null for NaN and FLOOR for minus infinity."""
    found = list(values)
    wrong = [v for v in found if v is None or not math.isfinite(v) or v <= FLOOR]
    if len(found) != expected or wrong:
        raise AssertionError(f"{len(found)} log-probabilities instead of {expected}, not finite: {wrong[:4]}")
    return [float(v) for v in found if v is not None]


def completion(client: openai.OpenAI, model: str, prompt: Sequence[int], salt: str, tokens: int = NEW_TOKENS) -> Result:
    """One answer of /v1/completions: prompt ids as the server had them, token ids and their log-probabilities."""
    answer = client.completions.create(
        model=model,
        prompt=list(prompt),
        max_tokens=tokens,
        temperature=0,
        logprobs=1,
        timeout=LONG_LIMIT_S if tokens > NEW_TOKENS else LIMIT_S,
        extra_body={"ignore_eos": True, "return_token_ids": True, "cache_salt": salt},
    )
    choice = answer.choices[0]
    counted = answer.usage.completion_tokens
    _require(counted == tokens, f"usage counts {counted} tokens instead of {tokens}")
    _require(len(choice.token_ids) == tokens, f"{len(choice.token_ids)} token ids instead of {tokens}")
    values = require_finite(choice.logprobs.token_logprobs, tokens)
    return {"prompt": choice.prompt_token_ids, "tokens": choice.token_ids, "logprobs": values}


def chat(client: openai.OpenAI, model: str, messages: Any, salt: str, **options: Any) -> Any:
    """One answer of /v1/chat/completions, thinking off unless ``extra`` says otherwise."""
    extra = {"chat_template_kwargs": {"thinking": False}, "cache_salt": salt, **options.pop("extra", {})}
    options = {"max_tokens": NEW_TOKENS, **options}
    return client.chat.completions.create(model=model, messages=messages, temperature=0, extra_body=extra, **options)


def chat_tokens(client: openai.OpenAI, model: str, messages: Any, salt: str) -> Result:
    """Prompt ids, token ids and log-probabilities of one chat answer."""
    extra = {"ignore_eos": True, "return_token_ids": True}
    answer = chat(client, model, messages, salt, logprobs=True, top_logprobs=1, extra=extra)
    choice = answer.choices[0]
    _require(len(choice.token_ids) == NEW_TOKENS, f"{len(choice.token_ids)} token ids instead of {NEW_TOKENS}")
    values = require_finite((entry.logprob for entry in choice.logprobs.content), NEW_TOKENS)
    return {"prompt": answer.prompt_token_ids, "tokens": choice.token_ids, "logprobs": values}


def at_once(ask: Callable[[Any], Result], items: Sequence[Any]) -> list[Result]:
    """``ask`` for every item, all released together."""
    gate = threading.Barrier(len(items))

    def one(item: Any) -> Result:
        gate.wait(LIMIT_S)
        return ask(item)

    with ThreadPoolExecutor(len(items)) as pool:
        return list(pool.map(one, items))


def in_order(client: openai.OpenAI, ask: Callable[[Any], Result], items: Sequence[Any]) -> list[Result]:
    """``ask`` for every item while the server holds them back, in this order; then it takes them in one step.

    The server must have vLLM's development endpoints (VLLM_SERVER_DEV_MODE=1): /pause keeps requests in the queue.
    """
    with ThreadPoolExecutor(len(items)) as pool:
        asked = []
        _control(client, "pause?mode=keep")
        try:
            for item in items:
                asked.append(pool.submit(ask, item))
                time.sleep(APART_S)
            time.sleep(ARRIVED_S)
            early = [answer.result() for answer in asked if answer.done()]  # one that failed says why
            _require(not early, f"{len(early)} requests were answered while the server held them back")
        finally:
            _control(client, "resume")
        return [answer.result() for answer in asked]


def _control(client: openai.OpenAI, path: str) -> None:
    """One of vLLM's endpoints beside /v1."""
    client.post(str(client.base_url).replace("/v1/", f"/{path}"), cast_to=object)


def streamed(client: openai.OpenAI, model: str, prompt: Sequence[int], salt: str) -> Result:
    """One answer of /v1/completions in pieces: as ``completion``, and the number of pieces."""
    pieces = client.completions.create(
        model=model,
        prompt=list(prompt),
        max_tokens=NEW_TOKENS,
        temperature=0,
        logprobs=1,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True, "return_token_ids": True, "cache_salt": salt},
    )
    tokens, values, text, usage, count = [], [], [], None, 0
    for piece in pieces:
        usage = piece.usage or usage
        for choice in piece.choices:
            count += 1
            text.append(choice.text)
            tokens += choice.token_ids or []
            values += choice.logprobs.token_logprobs if choice.logprobs else []
    _require(count > 1, f"the answer came in {count} piece: nothing was streamed")
    _require(usage is not None and usage.completion_tokens == NEW_TOKENS, f"usage at the end of the stream: {usage}")
    _require(bool("".join(text)), "the stream holds no text")
    return {"tokens": tokens, "logprobs": require_finite(values, NEW_TOKENS), "pieces": count}


def reasoning(client: openai.OpenAI, model: str) -> Result:
    """A budget of thinking tokens: what comes before ``</think>`` is reasoning, what follows is content; both forms."""
    messages = [{"role": "user", "content": "Which quay is free of ice?"}]
    extra = {
        "chat_template_kwargs": {"thinking": True},
        "thinking_token_budget": THINKING_TOKENS,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    answer = chat(client, model, messages, "reasoning", extra=extra).choices[0]
    whole = (getattr(answer.message, "reasoning", None) or "", answer.message.content or "")
    parts: list[str] = ["", ""]
    for piece in chat(client, model, messages, "reasoning-stream", stream=True, extra=extra):
        for choice in piece.choices:
            parts[0] += getattr(choice.delta, "reasoning", None) or ""
            parts[1] += choice.delta.content or ""
    for where, (thought, said) in {"at once": whole, "streamed": tuple(parts)}.items():
        found = f"{where}: reasoning {thought[-40:]!r}, content {said[:40]!r}"
        _require(bool(thought) and bool(said), found)
        _require("think>" not in thought + said, f"a marker was left in the text; {found}")
    return {"reasoning": whole[0], "content": whole[1]}


def tool_call(client: openai.OpenAI, model: str, bias: Mapping[str, float]) -> Result:
    """A call that the request demands: name and arguments by the schema, at once and streamed; then its result."""
    question = [{"role": "user", "content": "Two boats arrive from the north."}]
    options = {
        "tools": [TOOL],
        "tool_choice": {"type": "function", "function": {"name": "berth"}},
        "logit_bias": dict(bias),
        "max_tokens": 400,
    }
    choice = chat(client, model, question, "tool", **options).choices[0]
    calls = choice.message.tool_calls or []
    _require(len(calls) == 1, f"{len(calls)} tool calls instead of 1, content {choice.message.content!r}")
    arguments = _by_schema(calls[0].function.name, calls[0].function.arguments)
    name, written = "", ""
    for piece in chat(client, model, question, "tool-stream", stream=True, **options):
        for part in (p for c in piece.choices for p in c.delta.tool_calls or [] if p.function):
            name, written = name + (part.function.name or ""), written + (part.function.arguments or "")
    _by_schema(name, written)
    done = {"role": "tool", "tool_call_id": calls[0].id, "content": '{"berth": 7}'}
    called = {"role": "assistant", "tool_calls": [calls[0].model_dump(exclude_none=True)]}
    after = chat(client, model, [*question, called, done], "tool-result", tools=[TOOL])
    _require(after.usage.completion_tokens > 0, "no token after a tool's result")
    return {"arguments": arguments, "finish": choice.finish_reason}


def structured(client: openai.OpenAI, model: str, bias: Mapping[str, float]) -> Result:
    """Three grammars that a random model cannot meet by luck: a JSON schema, a choice, a regular expression."""
    question = [{"role": "user", "content": "Report the harbour."}]
    schema = {"type": "json_schema", "json_schema": {"name": "report", "schema": SCHEMA, "strict": True}}
    said = {
        "json": chat(client, model, question, "json", response_format=schema, logit_bias=dict(bias), max_tokens=200),
        "choice": chat(client, model, question, "choice", extra={"structured_outputs": {"choice": ["ebb", "flood"]}}),
        "regex": chat(client, model, question, "regex", extra={"structured_outputs": {"regex": "[a-z]{4}-[0-9]{3}"}}),
    }
    text = {kind: answer.choices[0].message.content or "" for kind, answer in said.items()}
    _by_schema("berth", text["json"])
    _require(text["choice"] in ("ebb", "flood"), f"choice: {text['choice']!r}")
    _require(re.fullmatch("[a-z]{4}-[0-9]{3}", text["regex"]) is not None, f"regex: {text['regex']!r}")
    return text


def image_refused(client: openai.OpenAI, model: str) -> str:
    """The sentence of the refusal, which the client must raise as a bad request."""
    from openai import BadRequestError

    picture = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PIXEL}"}}
    content = [{"type": "text", "text": "What is this?"}, picture]
    try:
        chat(client, model, [{"role": "user", "content": content}], "image")
    except BadRequestError as error:
        _require("text only" in str(error), f"the refusal does not say what is served: {error}")
        return str(error)
    raise AssertionError("an image was answered")


def whitespace_bias(decode: Callable[[list[int]], str], vocabulary: int) -> dict[str, float]:
    """A bias against tokens of white space alone: JSON allows any amount, and a greedy random model ends nowhere."""
    texts = ((token, decode([token])) for token in range(vocabulary))
    return {str(token): -100.0 for token, text in texts if text and not text.strip()}


def _by_schema(name: str, written: str) -> Result:
    """The arguments, or AssertionError where SCHEMA does not hold."""
    try:
        found = json.loads(written)
    except ValueError as error:
        raise AssertionError(f"{name}: not JSON ({error}): {written!r}") from error
    good = isinstance(found, dict) and set(found) == set(SCHEMA["required"])
    good = good and all(found[key] in SCHEMA["properties"][key]["enum"] for key in found)
    _require(name == "berth" and good, f"{name!r} with {written!r} is not what the schema allows")
    return found


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise AssertionError(otherwise)
