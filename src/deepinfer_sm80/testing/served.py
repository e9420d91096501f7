"""``vllm serve DIR`` as a process that answers when the block begins and is gone when it ends."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from typing import TYPE_CHECKING

from deepinfer_sm80.errors import ServeError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path
    from types import TracebackType

COMMAND = (sys.executable, "-m", "vllm.entrypoints.cli.main", "serve")
BOOT_LIMIT, STOP_LIMIT = 600.0, 30.0  # seconds
SHOWN = 40  # last lines of the log in an error
SILENCE = 15.0  # seconds without a line of progress
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Opens URLs of this machine: a proxy of the environment is for others."""


_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def _end_with_parent() -> None:
    """In the new process: SIGTERM when the parent ends, however it does."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


class Server:
    """``with Server(model, log) as server``: ``server.url`` answers, after ``server.boot_seconds``."""

    def __init__(
        self,
        model: Path,
        log: Path,
        options: Sequence[str] = (),
        command: Sequence[str] = COMMAND,
        limit: float = BOOT_LIMIT,
        progress: Callable[[str], None] | None = None,
    ) -> None:
        """``options``: flags after the model. ``log``: the file that gets its output. ``command``: what stands before
        the model. ``limit``: seconds to be up in. ``progress``: gets a line every 15 seconds until then.
        """
        self.log, self.limit, self._progress = log, limit, progress
        port = _free_port()
        self.url, self.boot_seconds = f"http://127.0.0.1:{port}", 0.0
        self.command = [*command, str(model), "--host", "127.0.0.1", "--port", str(port), *options]

    def __enter__(self) -> Server:
        """Raises ServeError with the end of the log when the process stops, or is not up within the limit."""
        # kernels are compiled there, and no engine process outlives its session
        environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        start = said = time.monotonic()
        with self.log.open("w", encoding="utf-8") as log:
            self.process = subprocess.Popen(
                self.command,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
                preexec_fn=_end_with_parent,  # a parent that is killed cannot stop it
            )
        try:
            while not self._healthy():
                now = time.monotonic()
                if self.process.poll() is not None:
                    raise self._error(f"ended with exit code {self.process.returncode}")
                if now - start > self.limit:
                    raise self._error("did not answer")
                if self._progress and now - said > SILENCE:
                    self._progress(f"vLLM is starting ({now - start:.0f} s)")
                    said = now
                time.sleep(0.25)
        except BaseException:
            self._stop()
            raise
        self.boot_seconds = time.monotonic() - start
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def _healthy(self) -> bool:
        try:
            with DIRECT.open(f"{self.url}/health", timeout=2):
                return True
        except OSError:
            return False

    def _error(self, problem: str) -> ServeError:
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        return ServeError(problem=problem, limit=f"{self.limit:.0f}", tail="\n".join(lines[-SHOWN:]))

    def _stop(self) -> None:
        self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(STOP_LIMIT)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)  # what is left of its session
        self.process.wait(STOP_LIMIT)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
