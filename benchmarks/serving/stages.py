"""The stages of prove_ampere.py: each takes the checkpoint's and the result folder and returns a JSON-able dict."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

import experts_padding
import timing
from agreement import spec_full, spec_replay
from comparison import compare
from http_stages import http, http_compare, in_process

from deepinfer_sm80.model.prose import prompts as prose_prompts

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Callable

NEW_TOKENS = 64
SHARED_GPU = {"kv_cache_memory_bytes": 2 << 30, "gpu_memory_utilization": 0.05}
COLD_S, WARM_S = 120, 20  # seconds that our kernels may take on sixteen cores
PORT = 18431
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="


def apply_disguise() -> None:
    """The disguise's vLLM entry point covers the processes vLLM starts; this one covers ours."""
    if os.environ.get("AMPERE_DISGUISE"):
        import ampere_disguise

        ampere_disguise.apply()


def _prompts(tokenizer: Any) -> list[list[int]]:
    return prose_prompts(lambda text: tokenizer.encode(text, add_special_tokens=False))


def installed(package: str) -> str:
    """The version of ``package``, empty where it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def facts_of_machine() -> dict[str, Any]:
    import torch
    import triton

    return {
        "gpu": torch.cuda.get_device_name(),
        "lowering": f"sm{os.environ['AMPERE_DISGUISE'].replace('.', '')}"
        if os.environ.get("AMPERE_DISGUISE")
        else "native",
        "torch": torch.__version__,
        "triton": triton.__version__,
        "vllm": installed("vllm"),
        "flashinfer": installed("flashinfer-python"),
        "cores": os.cpu_count(),
    }


class Engine:
    """A vLLM engine in this process with what the stages ask of it."""

    def __init__(self, model: pathlib.Path, **options: Any) -> None:
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        apply_disguise()
        from vllm import LLM

        start = time.time()
        shared = SHARED_GPU if os.environ.get("PROVE_SHARED_GPU") else {}
        self.llm = LLM(model=str(model), **shared, **options)
        self.boot_s = round(time.time() - start, 1)
        self.prompts = _prompts(self.llm.get_tokenizer())

    def generate(self, prompts: list[list[int]], tokens: int = NEW_TOKENS, **options: Any) -> list[Any]:
        from vllm import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, **{"logprobs": 1, **options})
        return self.llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)

    def result(self, **facts: Any) -> dict[str, Any]:
        from deepinfer_sm80.ops.variants import launched

        return {**facts_of_machine(), "facts": {"boot_s": self.boot_s, **facts}, "launched": sorted(launched)}


def tokens_of(outputs: list[Any]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


def require_finite(outputs: list[Any], tokens: int = NEW_TOKENS) -> int:
    """Every output is complete and every log-probability a number; returns how many were looked at."""
    seen = 0
    for output in outputs:
        completion = output.outputs[0]
        if len(completion.token_ids) != tokens:
            raise AssertionError(f"{len(completion.token_ids)} tokens instead of {tokens}")
        for step in completion.logprobs:
            for entry in step.values():
                if not math.isfinite(entry.logprob):
                    raise AssertionError(f"log-probability {entry.logprob}")
                seen += 1
    return seen


def checkpoint(model: pathlib.Path, out: pathlib.Path) -> dict[str, Any]:
    from deepinfer_sm80.model.checkpoint import write_checkpoint
    from deepinfer_sm80.model.config import preset

    if not (model / "config.json").exists():
        write_checkpoint(model, preset(os.environ["PROVE_PRESET"]), seed=0)
    return {"facts": {"GB": round(sum(f.stat().st_size for f in model.iterdir()) / 1e9, 2)}}


def register(model: pathlib.Path, out: pathlib.Path) -> dict[str, Any]:
    """Entry points in fresh processes: light to import, harmless to repeat, with VLLM_PLUGINS naming it or not."""
    light = "import sys, deepinfer_sm80.vllm_plugin; assert not {'torch', 'vllm', 'triton'} & set(sys.modules)"
    repeated = (
        "import multiprocessing as m\n"
        "def child():\n"
        "    from vllm.plugins import load_general_plugins; load_general_plugins()\n"
        "    from deepinfer_sm80.vllm_plugin import register; [register() for _ in range(3)]\n"
        "    from vllm import ModelRegistry; print(ModelRegistry.models['DeepseekV41ForCausalLM'].module_name)\n"
        "    import torch; assert not torch.cuda.is_initialized()\n"
        "if __name__ == '__main__':\n"
        "    p = m.get_context('spawn').Process(target=child); p.start(); p.join(); raise SystemExit(p.exitcode)\n"
    )
    script = out / "register_probe.py"
    script.write_text(repeated)
    subprocess.run([sys.executable, "-c", light], check=True)
    probes = []
    for plugins in (None, "ampere_disguise,deepinfer_sm80", "ampere_disguise", ""):
        environment = {key: value for key, value in os.environ.items() if key != "VLLM_PLUGINS"}
        if plugins is not None:
            environment["VLLM_PLUGINS"] = plugins
        probes.append(subprocess.Popen([sys.executable, script], env=environment, stdout=subprocess.PIPE, text=True))
    answers = [probe.communicate()[0].split() for probe in probes]
    if any(probe.returncode for probe in probes):
        raise AssertionError(f"exit codes {[probe.returncode for probe in probes]}, answers {answers}")
    seen = [answer[-1] for answer in answers]
    return {"facts": {"registered": seen[0], "runs": len(seen) * 3}, "seen": seen, **facts_of_machine()}


def _generates(engine: Engine) -> dict[str, Any]:
    one = engine.generate(engine.prompts[5:6])
    engine.llm.reset_prefix_cache()  # a hit on the first prompt would make the two runs different work
    eight = engine.generate(engine.prompts)
    looked_at = require_finite(one) + require_finite(eight)
    engine.llm.reset_prefix_cache()
    again = engine.generate(engine.prompts)
    if tokens_of(again) != tokens_of(eight):
        first = [
            next((i for i, (a, b) in enumerate(zip(x, y, strict=True)) if a != b), None)
            for x, y in zip(tokens_of(again), tokens_of(eight), strict=True)
        ]
        raise AssertionError(f"a repeated greedy run gave other tokens, first at {first}")
    cached, hit_looked_at = _prefix_hit(engine)
    return engine.result(
        prompts="1 and 8", logprobs_finite=looked_at + hit_looked_at, repeat="same tokens", cached_tokens=cached
    ) | {"tokens": tokens_of(eight)}


def _prefix_hit(engine: Engine) -> tuple[int, int]:
    """Tokens taken from the cache, and log-probabilities looked at, of a prompt that begins like the longest one."""
    hit = engine.generate([engine.prompts[-1][:2000] + engine.prompts[3]])
    cached = hit[0].num_cached_tokens
    if not cached:
        raise AssertionError("no cached tokens on a shared prefix of 2,000")
    return cached, require_finite(hit)


def eager(model: pathlib.Path, out: pathlib.Path) -> dict[str, Any]:
    return _generates(Engine(model, enforce_eager=True))


def graphs(model: pathlib.Path, out: pathlib.Path) -> dict[str, Any]:
    return _generates(Engine(model))


def _chunked(engine: Engine) -> dict[str, Any]:
    outputs = engine.generate(engine.prompts)
    return engine.result(chunk=512, longest=max(map(len, engine.prompts)), logprobs_finite=require_finite(outputs)) | {
        "tokens": tokens_of(outputs)
    }


def chunked(model: pathlib.Path, out: pathlib.Path) -> dict[str, Any]:
    return _chunked(Engine(model, max_num_batched_tokens=512))


def chunked_eager(model: pathlib.Path, out: pathlib.Path) -> dict[str, Any]:
    return _chunked(Engine(model, max_num_batched_tokens=512, enforce_eager=True))


def _dspark(model: pathlib.Path, **options: Any) -> dict[str, Any]:
    speculation = {"method": "dspark", "num_speculative_tokens": 5}
    engine = Engine(model, speculative_config=speculation, disable_log_stats=False, **options)
    outputs = engine.generate(engine.prompts)
    looked_at = require_finite(outputs)
    counters = {m.name: getattr(m, "value", None) for m in engine.llm.get_metrics() if "spec_decode" in m.name}
    drafted = counters.get("vllm:spec_decode_num_draft_tokens")
    accepted = counters.get("vllm:spec_decode_num_accepted_tokens")
    return engine.result(K=5, drafted=drafted, accepted=accepted, logprobs_finite=looked_at) | {
        "tokens": tokens_of(outputs)
    }


def dspark(model: pathlib.Path, out: pathlib.Path) -> dict[str, Any]:
    return _dspark(model)


def dspark_eager(model: pathlib.Path, out: pathlib.Path) -> dict[str, Any]:
    return _dspark(model, enforce_eager=True)


def serve(model: pathlib.Path, out: pathlib.Path) -> dict[str, Any]:
    """``vllm serve DIR`` with no option of ours, asked over HTTP."""
    apply_disguise()
    from transformers import AutoTokenizer

    prompts = _prompts(AutoTokenizer.from_pretrained(model))
    log = (out / "serve-server.log").open("w")
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(model), "--port", str(PORT)]
    if os.environ.get("PROVE_SHARED_GPU"):
        command += [f"--{name.replace('_', '-')}={value}" for name, value in SHARED_GPU.items()]
    start = time.time()
    server = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    try:
        while True:
            if server.poll() is not None:
                tail = "\n".join((out / "serve-server.log").read_text().splitlines()[-40:])
                raise AssertionError(f"the server stopped with {server.returncode}:\n{tail}")
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{PORT}/health", timeout=2)
                break
            except OSError:
                time.sleep(1)
        boot_s = round(time.time() - start, 1)
        answer = _post(
            "completions",
            prompt=prompts,
            max_tokens=NEW_TOKENS,
            temperature=0,
            ignore_eos=True,
            logprobs=1,
            model=str(model),
        )
        picture = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PIXEL}"}}
        content = [{"type": "text", "text": "What is this?"}, picture]
        refused = _refusal("chat/completions", model=str(model), messages=[{"role": "user", "content": content}])
    finally:
        server.terminate()
        server.wait(60)
    values = [value for choice in answer["choices"] for value in choice["logprobs"]["token_logprobs"]]
    if len(values) != NEW_TOKENS * len(prompts) or not all(map(math.isfinite, values)):
        raise AssertionError(f"{len(values)} log-probabilities, finite: {all(map(math.isfinite, values))}")
    facts = {"boot_s": boot_s, "prompts": len(prompts), "logprobs_finite": len(values), "image": refused[:120]}
    by_name = refused.startswith("400") and "text only" in refused
    return {"ok": by_name, "facts": facts, "error": "" if by_name else refused, **facts_of_machine()}


def _post(path: str, **body: Any) -> Any:
    request = urllib.request.Request(
        f"http://127.0.0.1:{PORT}/v1/{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    return json.load(urllib.request.urlopen(request, timeout=300))


def _refusal(path: str, **body: Any) -> str:
    """Status and message of a request that must be refused."""
    try:
        _post(path, **body)
    except urllib.error.HTTPError as error:
        return f"{error.code} {error.read().decode()}"
    return "200 answered"


def _logprobs(model: pathlib.Path, out: pathlib.Path, arm: str) -> dict[str, Any]:
    """Log-probability of every prompt token, one prompt per step, with what was chosen on the way."""
    import torch
    from recording import Recorder

    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    apply_disguise()
    recorder = Recorder()
    recorder.install()
    engine = Engine(
        model, enforce_eager=True, enable_prefix_caching=False, swa_bounded_replay=False, max_num_batched_tokens=8192
    )
    saved, total = [], 0.0
    for prompt in engine.prompts[1:]:  # a prompt of one token has no prompt log-probability
        with recorder.recording():
            values = _prompt_logprobs(engine, prompt)
        repeated = _prompt_logprobs(engine, prompt)
        total += sum(values)
        saved.append(
            {
                "prompt": list(prompt),
                "logprobs": torch.tensor(values),
                "repeated": torch.tensor(repeated),
                "experts": recorder.experts,
                "topk": recorder.topk,
                "margins": recorder.margins,
            }
        )
    torch.save(saved, out / f"logprobs-{arm}.pt")
    count = sum(len(entry["logprobs"]) for entry in saved)
    return engine.result(tokens=count, mean_nll=round(-total / count, 4))


def _prompt_logprobs(engine: Engine, prompt: list[int]) -> list[float]:
    output = engine.generate([prompt], 1, prompt_logprobs=0)[0]
    values = [step[token].logprob for token, step in zip(prompt[1:], output.prompt_logprobs[1:], strict=True)]
    if not all(map(math.isfinite, values)):
        raise AssertionError("a prompt log-probability is not finite")
    return values


def logprobs_plugin(model: pathlib.Path, out: pathlib.Path) -> dict[str, Any]:
    return _logprobs(model, out, "plugin")


def logprobs_stock(model: pathlib.Path, out: pathlib.Path) -> dict[str, Any]:
    return _logprobs(model, out, "stock")


def _generated(model: pathlib.Path, out: pathlib.Path, name: str, **options: Any) -> dict[str, Any]:
    """vLLM's default path, replay on, with its steps recorded."""
    import generated
    from recording import Schedule

    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    apply_disguise()
    schedule = Schedule()
    schedule.install()
    engine = Engine(model, **options)
    return engine.result(**generated.record(engine, schedule, out / f"generated-{name}.pt"))


def generated_whole(model: pathlib.Path, out: pathlib.Path) -> dict[str, Any]:
    return _generated(model, out, "whole")


def generated_chunks(model: pathlib.Path, out: pathlib.Path) -> dict[str, Any]:
    """Eager: captured steps of 512 tokens or fewer are never trimmed."""
    return _generated(model, out, "chunks", max_num_batched_tokens=512, enforce_eager=True)


WARM_UP = """
import os, sys
cores = sorted(os.sched_getaffinity(0))[:16]
os.sched_setaffinity(0, cores)
import stages
stages.apply_disguise()
import torch
torch.zeros(1, device="cuda")
from deepinfer_sm80.ops.warmup import Warmup
print(*Warmup(workers=len(cores)).wait(), len(cores), file=sys.stderr)
"""


def warm_up(model: pathlib.Path, out: pathlib.Path) -> dict[str, Any]:
    """Every kernel of ours compiled by sixteen cores, from an empty cache and from a full one; by itself, no engine."""
    seconds = []
    with tempfile.TemporaryDirectory() as cache:
        for _ in ("cold", "warm"):
            run = subprocess.run(
                [sys.executable, "-c", WARM_UP],
                env={**os.environ, "TRITON_CACHE_DIR": cache},
                cwd=os.path.dirname(__file__),
                stderr=subprocess.PIPE,
                text=True,
                timeout=2 * COLD_S,
            )
            if run.returncode:
                raise AssertionError(f"exit code {run.returncode}:\n{run.stderr[-3000:]}")
            kernels, took, cores = run.stderr.split()[-3:]
            seconds.append(float(took))
    cold, warm = (round(s, 1) for s in seconds)
    facts = {"kernels": int(kernels), "cores": int(cores), "cold_s": cold, "warm_s": warm}
    ok = int(kernels) > 0 and cold <= COLD_S and warm <= WARM_S
    return {
        "ok": ok,
        "error": "" if ok else f"allowed are {COLD_S} s and {WARM_S} s",
        "facts": facts,
    } | facts_of_machine()


def mixed(model: pathlib.Path, out: pathlib.Path) -> dict[str, Any]:
    """Nothing may compile after the engine is up."""
    engine = Engine(model)
    compiled = timing.mixed_batches(engine)
    facts = {"batches": timing.MIXED_BATCHES, "compiled_while_serving": len(compiled)}
    return engine.result(**facts) | {"ok": not compiled, "error": ", ".join(compiled)}


def times(model: pathlib.Path, out: pathlib.Path) -> dict[str, Any]:
    with timing.turn(alone=False):
        engine = Engine(model, compilation_config={"cudagraph_capture_sizes": list(timing.BATCHES)})
    with timing.turn(alone=True):
        return engine.result(**timing.times(engine))


FUNCTIONS: dict[str, Callable[[pathlib.Path, pathlib.Path], dict[str, Any]]] = {
    "checkpoint": checkpoint,
    "register": register,
    "eager": eager,
    "graphs": graphs,
    "chunked": chunked,
    "chunked-eager": chunked_eager,
    "dspark": dspark,
    "dspark-eager": dspark_eager,
    "serve": serve,
    "logprobs-plugin": logprobs_plugin,
    "logprobs-stock": logprobs_stock,
    "compare": compare,
    "spec-full": spec_full,
    "generated-whole": generated_whole,
    "generated-chunks": generated_chunks,
    "spec-replay": spec_replay,
    "warm-up": warm_up,
    "mixed": mixed,
    "times-kernels": times,
    "times-pytorch": times,
    "times-stock": times,
    "in-process": in_process,
    "http": http,
    "http-compare": http_compare,
    **experts_padding.STAGES,
}
