"""The demo's checkpoint behind ``vllm serve``, asked over HTTP, where vLLM is installed and would use this package."""

from __future__ import annotations

import json
import math
import urllib.error
import urllib.request
from typing import TYPE_CHECKING, Any

from deepinfer_sm80.errors import DemoError
from deepinfer_sm80.testing.served import COMMAND, DIRECT, Server

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

PROMPT = "The ferry left the northern quay a little after six, while the lamps along the harbour were still lit"
TOKENS = 16
OPTIONS = ("--max-model-len", "4096", "--limit-mm-per-prompt", '{"image": 0}')
_TIMEOUT = 120.0  # seconds for an answer
_FLOOR = -9999.0  # what vLLM's server says instead of minus infinity


def serve_and_ask(
    model: Path, log: Path, progress: Callable[[str], None], command: Sequence[str] = COMMAND
) -> list[str]:
    """Lines that say what was asked and answered: a completion, and the same prompt as a chat.

    Raises ServeError when the server does not come up, DemoError for an answer that is not ``TOKENS`` tokens with
    finite log-probabilities.
    """
    with Server(model, log, OPTIONS, command, progress=progress) as server:
        lines = [f"up after {server.boot_seconds:.0f} s at {server.url}"]
        shared = {"model": str(model), "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
        answer = _ask(server.url, "completions", {**shared, "prompt": PROMPT, "logprobs": 1})
        values = answer["choices"][0]["logprobs"]["token_logprobs"]
        _require_finite("/v1/completions", values)
        lines.append(f"/v1/completions: {TOKENS} tokens, log-probabilities {min(values):.2f} to {max(values):.2f}")
        message = {"role": "user", "content": PROMPT}
        answer = _ask(server.url, "chat/completions", {**shared, "messages": [message], "logprobs": True})
        values = [entry["logprob"] for entry in answer["choices"][0]["logprobs"]["content"]]
        _require_finite("/v1/chat/completions", values)
        lines.append(f"/v1/chat/completions: {TOKENS} tokens, log-probabilities {min(values):.2f} to {max(values):.2f}")
    return lines


def _ask(url: str, path: str, body: dict[str, Any]) -> Any:
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/{path}", json.dumps(body).encode(), headers)
    try:
        with DIRECT.open(request, timeout=_TIMEOUT) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        said = error.read().decode(errors="replace")[:300]
        raise DemoError(what=f"asking /v1/{path}", found=f"status {error.code}: {said}") from error
    except (OSError, ValueError) as error:  # no answer in time, a connection that broke, an answer that is not JSON
        raise DemoError(what=f"asking /v1/{path}", found=f"{type(error).__name__}: {error}") from error


def _require_finite(path: str, values: list[float | None]) -> None:
    wrong = [value for value in values if value is None or not math.isfinite(value) or value <= _FLOOR]
    if len(values) != TOKENS or wrong:
        found = f"{len(values)} log-probabilities instead of {TOKENS}, not finite: {wrong[:4]}"
        raise DemoError(what=f"asking {path}", found=found)
