"""A server that answers as ``vllm serve`` does, with invented tokens: what the stage ``http`` is tested against.

python fake_vllm.py MODEL --host HOST --port PORT [--fault NAME] [flags of vllm serve, ignored]
"""

import argparse
import json
import os
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

FAULTS = (
    "nan",
    "minus-infinity",
    "short",
    "no-call",
    "bad-json",
    "no-stream",
    "image",
    "thought",
    "marker",
    "not-a-choice",
    "no-pause",
)
ARGUMENTS = '{"quay": "north", "boats": 2}'


def tokens_of(prompt, count):
    """Distinct for every prompt."""
    return [(sum(prompt) * 31 + i * 7) % 1000 for i in range(count)]


class Handler(BaseHTTPRequestHandler):
    fault = ""
    eight = threading.Barrier(8, timeout=10)  # broken, and so answered with nothing, unless eight come at once
    open = threading.Event()  # requests wait while it is clear

    def log_message(self, *_):
        pass

    def send(self, body, status=200):
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def stream(self, pieces):
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        for piece in [*map(json.dumps, pieces), "[DONE]"]:
            self.wfile.write(f"data: {piece}\n\n".encode())

    def do_GET(self):
        known = {"/health": {}, "/v1/models": {"object": "list", "data": [{"id": "tiny", "object": "model"}]}}
        self.send(known.get(self.path, {}), 200 if self.path in known else 404)

    def do_POST(self):
        if self.path in ("/pause?mode=keep", "/resume"):
            (self.open.set if self.path == "/resume" or self.fault == "no-pause" else self.open.clear)()
            self.send({})
            return
        held = not self.open.is_set()
        assert self.open.wait(10)
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.fault != "no-pause":
            assert held == (body.get("cache_salt") in ("together", "chat"))  # broken, it is answered with nothing
        {"/v1/completions": self.completions, "/v1/chat/completions": self.chat}[self.path](body)

    def completions(self, body):
        assert body["temperature"] == 0
        assert body["ignore_eos"]
        if body.get("cache_salt") == "arriving":
            self.eight.wait()
        count = body["max_tokens"] - (self.fault == "short")
        prompt = body["prompt"] if isinstance(body["prompt"], list) else list(body["prompt"].encode())
        tokens = tokens_of(prompt, count)
        values = [-1.0 - i % 16 / 1024 for i in range(count)]
        if count != 64:
            values[-1] = {"nan": None, "minus-infinity": -9999.0}.get(self.fault, values[-1])
        usage = {"prompt_tokens": len(prompt), "completion_tokens": count, "total_tokens": 0}
        if body.get("stream") and self.fault != "no-stream":
            parts = [(tokens[i : i + 16], values[i : i + 16]) for i in range(0, count, 16)]
        else:
            parts = [(tokens, values)]
        choices = [
            {"index": 0, "text": "word ", "token_ids": t, "logprobs": {"token_logprobs": v}, "finish_reason": None}
            for t, v in parts
        ]
        choices[0]["prompt_token_ids"] = prompt
        frame = {"id": "c", "object": "text_completion", "created": 0, "model": "tiny"}
        if body.get("stream"):
            self.stream([*({**frame, "choices": [c]} for c in choices), {**frame, "choices": [], "usage": usage}])
        else:
            choices[0]["finish_reason"] = "length"
            self.send({**frame, "choices": choices, "usage": usage})

    def chat(self, body):
        messages = body["messages"]
        if any(isinstance(m.get("content"), list) for m in messages) and self.fault != "image":
            self.send({"error": {"message": "served for text only", "type": "BadRequestError", "code": 400}}, 400)
            return
        count = min(body["max_tokens"], 64)
        tokens = tokens_of([len(str(messages))], count)
        message = {"role": "assistant", **self.said(body)}
        entries = [{"token": "t", "logprob": -1.0, "bytes": None, "top_logprobs": []} for _ in tokens]
        choice = {"index": 0, "finish_reason": "stop", "token_ids": tokens, "logprobs": {"content": entries}}
        usage = {"prompt_tokens": 1, "completion_tokens": count, "total_tokens": 1 + count}
        frame = {"id": "c", "created": 0, "model": "tiny"}
        if not body.get("stream"):
            whole = {**frame, "object": "chat.completion", "prompt_token_ids": [len(str(messages))], "usage": usage}
            self.send({**whole, "choices": [{**choice, "message": message}]})
            return
        deltas = [{"role": "assistant"}, *self.pieces(message)]
        part = {**frame, "object": "chat.completion.chunk"}
        self.stream([{**part, "choices": [{"index": 0, "delta": d, "finish_reason": None}]} for d in deltas])

    def said(self, body):
        """What the message holds, as the request asks for it."""
        choice, limits = body.get("tool_choice"), body.get("structured_outputs", {})
        if isinstance(choice, dict) and self.fault != "no-call":
            assert body["logit_bias"]
            assert body["tools"][0]["function"]["strict"]
            text = ARGUMENTS if self.fault != "bad-json" else ARGUMENTS.replace("north", "west")
            call = {"id": "call-1", "type": "function", "function": {"name": "berth", "arguments": text}}
            return {"content": None, "tool_calls": [call]}
        if body.get("chat_template_kwargs", {}).get("thinking"):
            assert body["thinking_token_budget"]
            thought = {"thought": "", "marker": "ice </think>"}.get(self.fault, "ice")
            return {"reasoning": thought, "content": "the north quay"}
        if "response_format" in body:
            return {"content": ARGUMENTS}
        if "choice" in limits:
            return {"content": limits["choice"][0] if self.fault != "not-a-choice" else "slack"}
        return {"content": "quay-042" if "regex" in limits else "a word"}

    def pieces(self, message):
        for key in ("reasoning", "content"):
            for word in (message.get(key) or "").split(" "):
                yield {key: f"{word} "} if word else {}
        for call in message.get("tool_calls", ()):
            name, text = call["function"]["name"], call["function"]["arguments"]
            yield {"tool_calls": [{"index": 0, "id": call["id"], "type": "function", "function": {"name": name}}]}
            for part in (text[:9], text[9:]):
                yield {"tool_calls": [{"index": 0, "function": {"arguments": part}}]}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--fault", choices=FAULTS, default="")
    args, more = parser.parse_known_args()
    Handler.fault = args.fault
    Handler.open.set()
    mode = os.environ.get("VLLM_SERVER_DEV_MODE", "")
    sys.stdout.write(f"serving {args.model} with {' '.join(more)}, VLLM_SERVER_DEV_MODE={mode}\n")
    sys.stdout.flush()
    ThreadingHTTPServer((args.host, args.port), Handler).serve_forever()


if __name__ == "__main__":
    main()
