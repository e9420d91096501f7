"""A stage is a process: started with its environment, watched, its result kept as JSON, also when it fails."""

from __future__ import annotations

import functools
import hashlib
import json
import re
import subprocess
import sys
import time
import traceback
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import argparse
    import pathlib
    from collections.abc import Iterable, Mapping

LIMIT_S = 540
VLLM = "0.33.0"


def require_engine(parser: argparse.ArgumentParser) -> None:
    """End the script with a sentence where vLLM is missing: every stage would say so after another."""
    if find_spec("vllm") is None:
        parser.error(
            f"stages that start an engine need vLLM {VLLM}, which cannot be imported here: run this in the environment "
            f"where it is installed (pip install vllm=={VLLM})"
        )


def require_checkpoint(parser: argparse.ArgumentParser, model: pathlib.Path | None) -> None:
    """End the script with a sentence where ``model`` is no checkpoint's folder."""
    if model is None or not (model / "config.json").is_file():
        found = "nothing" if model is None else f"{model}, which has no config.json"
        parser.error(
            f"--model must be the folder of a checkpoint, found {found}: write one with deepinfer-sm80 make-checkpoint"
        )


def require_results(parser: argparse.ArgumentParser, out: pathlib.Path, stages: Iterable[str]) -> None:
    """End the script with a sentence where a page is asked of a folder without a stage's result."""
    if not any((out / f"{name}.json").is_file() for name in stages):
        parser.error(f"--report needs a folder with results, found none in {out}: run stages first, or name another")


@functools.cache
def digest(model: pathlib.Path) -> str:
    """SHA-256 over the names and bytes of a checkpoint's files: one name, such as ``tiny``, had several contents."""
    found = hashlib.sha256()
    for path in sorted(model.iterdir()):
        found.update(path.name.encode())
        with path.open("rb") as file:
            while part := file.read(1 << 24):
                found.update(part)
    return found.hexdigest()


def run_process(script: str, name: str, args: argparse.Namespace, environment: Mapping[str, str], **facts: Any) -> int:
    """Run ``script --inside name`` and store OUT/name.json with ``facts``; 0 when it is ok, or was before.

    ``args``: model, out, again, commit, tail and, where the script has one, limit (seconds) of the command line.
    """
    path = args.out / f"{name}.json"
    if path.exists() and not args.again and json.loads(path.read_text()).get("ok"):
        print(f"{name}: done before", flush=True)
        return 0
    found = said(args.out, name)
    for old in (path, found):  # a process that dies early must not leave the result of another
        old.unlink(missing_ok=True)
    limit = getattr(args, "limit", LIMIT_S)
    command = [sys.executable, script, "--inside", name, "--model", str(args.model), "--out", str(args.out)]
    start = time.time()
    with (args.out / f"{name}.log").open("w") as log:
        try:
            code = subprocess.run(
                command, env=dict(environment), stdout=log, stderr=subprocess.STDOUT, timeout=limit
            ).returncode
        except subprocess.TimeoutExpired:
            code = None
    ended = f"stopped after {limit} s" if code is None else f"exit code {code}"
    result = json.loads(found.read_text()) if found.exists() else {"ok": False, "error": f"{ended}, no result"}
    result["ok"] = bool(result.get("ok")) and code == 0
    ready = re.search(r"(\d+) Triton kernels ready in ([\d.]+) s", (args.out / f"{name}.log").read_text())
    if ready and "facts" in result:
        result["facts"] |= {"our_kernels": int(ready[1]), "ready_s": float(ready[2])}
    result |= {"wall_s": round(time.time() - start, 1), "commit": args.commit, **facts}
    result["shared_gpu"] = "PROVE_SHARED_GPU" in environment
    found.write_text(json.dumps(result, indent=1))
    found.replace(path)  # whole, for a report that is written meanwhile
    print(f"{name}: {'ok' if result['ok'] else 'FAILED'} in {result['wall_s']} s  {summary(result)}", flush=True)
    if not result["ok"]:
        print(result.get("error", ""), *(args.out / f"{name}.log").read_text().splitlines()[-args.tail :], sep="\n")
    return 0 if result["ok"] else 1


def said(out: pathlib.Path, name: str) -> pathlib.Path:
    """Where the process of a stage leaves its result, which ``run_process`` completes."""
    return out / f".{name}.json"


def failure() -> dict[str, Any]:
    """The result of a stage for the exception that is being handled; files without the folders of this machine."""
    text = traceback.format_exc(limit=-6)
    return {"ok": False, "error": re.sub(r'File "[^"]*?([^/"]+/[^/"]+)"', r'File "\1"', text)}


def summary(result: dict[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in result.get("facts", {}).items())
