"""The demo's last table: how closely each operator agreed, and what its kernels need on sm_80 and sm_86."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from deepinfer_sm80 import ops
from deepinfer_sm80.errors import DemoError

if TYPE_CHECKING:
    from types import TracebackType

DISAGREES = "DISAGREES"
ARCHITECTURES = {"sm_80": "8.0", "sm_86": "8.6"}


@dataclass
class Tally:
    """What one operator's comparisons came to: their number, how many failed, and the loosest agreement."""

    runs: int = 0
    failed: int = 0
    seconds: float = 0.0
    details: set[str] = field(default_factory=set)

    def add(self, agrees: bool, detail: str, seconds: float) -> None:
        self.runs += 1
        self.failed += not agrees
        self.seconds += seconds
        self.details.add(detail if agrees else DISAGREES)

    @property
    def agreement(self) -> str:
        """DISAGREES, or the loosest of the others: "bit for bit" is the shortest."""
        return DISAGREES if self.failed else max(self.details, key=len, default="not run")


class Compilation:
    """``with Compilation() as compiled``: every kernel is compiled in another process meanwhile; no GPU is needed."""

    def __enter__(self) -> Compilation:
        environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        arguments = ["ops", "--resources", "--json", "--workers", str(max(1, (os.cpu_count() or 2) // 2))]
        for arch in ARCHITECTURES.values():
            arguments += ["--arch", arch]
        self._out, self._err = tempfile.TemporaryFile("w+"), tempfile.TemporaryFile("w+")
        command = [sys.executable, "-m", "deepinfer_sm80.cli", *arguments]
        self._process = subprocess.Popen(command, stdout=self._out, stderr=self._err, env=environment)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        self._out.close()
        self._err.close()

    def done(self) -> bool:
        return self._process.poll() is not None

    def resources(self) -> list[dict[str, Any]]:
        """One dict a variant and architecture, as ``ops --resources --json`` prints them; waits for it.

        Raises DemoError with the compiler's last words.
        """
        code = self._process.wait()
        self._out.seek(0)
        self._err.seek(0)
        if code != 0:
            said = self._err.read().strip().splitlines() or ["nothing"]
            raise DemoError(what="compiling the kernels for sm_80 and sm_86", found=f"exit code {code}: {said[-1]}")
        found: list[dict[str, Any]] = json.loads(self._out.read())
        return found


def table(tallies: dict[str, Tally], resources: list[dict[str, Any]]) -> list[str]:
    """Lines: operator, agreement, and for each architecture the largest need of its kernels' variants."""
    head = f"{'operator':30} {'agreement':16}" + "".join(f" {arch:>8} shared  regs spills" for arch in ARCHITECTURES)
    lines = [head, "-" * len(head)]
    for op in ops.OPS:
        line = f"{op:30} {tallies[op].agreement if op in tallies else 'not run':16}"
        for arch in ARCHITECTURES:
            mine = [r for r in resources if r["op"] == op and r["arch"] == arch]
            if mine:
                largest = [max(r[key] for r in mine) for key in ("shared_bytes", "registers", "spill_bytes")]
                line += f" {largest[0]:15,} {largest[1]:5} {largest[2]:6}"
            else:
                line += f" {'a matrix product':>28}"
        lines.append(line)
    return lines
