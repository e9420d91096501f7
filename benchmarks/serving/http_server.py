"""``vllm serve DIR`` as a process that is up when the block begins and gone when it ends."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Sequence
    from types import TracebackType

BOOT_LIMIT_S = 300
STOP_LIMIT_S = 30
SERVE = (sys.executable, "-m", "vllm.entrypoints.cli.main", "serve")


class Server:
    """``with Server(model, log, options) as server``: its ``url`` answers; ``boot_s`` says how long that took.

    ``options``: flags of ``vllm serve``. ``log``: where its output goes. ``command``: what stands before the model.
    Raises AssertionError with the end of the log when it stops early or is not up in BOOT_LIMIT_S.
    """

    def __init__(
        self, model: pathlib.Path, log: pathlib.Path, options: Sequence[str] = (), command: Sequence[str] = SERVE
    ) -> None:
        self.log, self.port, self.boot_s = log, free_port(), 0.0
        self.command = [*command, str(model), "--host", "127.0.0.1", "--port", str(self.port), *options]
        self.url = f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> Server:
        start = time.monotonic()
        with self.log.open("w") as log:
            # a session of its own, so that its engine processes can be ended with it
            self.process = subprocess.Popen(self.command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            while not self._healthy():
                if self.process.poll() is not None:
                    raise AssertionError(f"the server stopped with {self.process.returncode}:\n{self._tail()}")
                if time.monotonic() - start > BOOT_LIMIT_S:
                    raise AssertionError(f"the server was not up after {BOOT_LIMIT_S} s:\n{self._tail()}")
                time.sleep(0.25)
        except BaseException:
            self._stop()
            raise
        self.boot_s = round(time.monotonic() - start, 1)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        self._stop()

    def _healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=2):
                return True
        except OSError:
            return False

    def _tail(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-40:])

    def _stop(self) -> None:
        self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(STOP_LIMIT_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)  # what is left of its session
        self.process.wait(STOP_LIMIT_S)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
