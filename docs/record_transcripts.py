#!/usr/bin/env python3
"""Record ``make demo`` and ``make test`` as a newcomer meets them: docs/transcripts/demo.txt and test.txt.

    python3 docs/record_transcripts.py [demo] [test]

Both run one after the other, or those that are named, in a fresh clone of the committed state, with a home directory of
their own and an emptied environment: PATH, and what pip and TLS need to reach an index. Names of folders on this
machine are replaced, and pip's warnings about the machine's own index are left out. Takes ten minutes and more on two
cores. `make test` looks at the demo's transcript: where that is of other operators, record and commit `demo` first.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "docs/transcripts"
COMMANDS = {"demo": ("make", "demo"), "test": ("make", "test")}
KEPT = re.compile(r"PATH|LANG|PIP_\w+|SSL_CERT_\w+|REQUESTS_CA_BUNDLE|CURL_CA_BUNDLE|\w+_(proxy|PROXY)")
LEFT_OUT = re.compile(r"WARNING: Location 'file:")


def git(*words: str, at: Path = ROOT) -> str:
    return subprocess.run(["git", "-C", str(at), *words], check=True, capture_output=True, text=True).stdout.strip()


def recorded(command: tuple[str, ...], clone: Path, home: Path, commit: str) -> tuple[str, int]:
    """The transcript of one command, and its exit code."""
    environment = {name: value for name, value in os.environ.items() if KEPT.fullmatch(name)} | {"HOME": str(home)}
    start = time.monotonic()
    done = subprocess.run(
        command, cwd=clone, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    seconds = time.monotonic() - start
    said = [line.rstrip() for line in done.stdout.splitlines() if not LEFT_OUT.match(line)]
    head = (
        f"# commit {commit}, {time.strftime('%Y-%m-%d')}, {os.cpu_count()} cores, {platform.system()}, set-up included"
    )
    tail = f"# exit code {done.returncode} after {seconds:.0f} s"
    return scrubbed("\n".join([head, f"$ {' '.join(command)}", *said, tail]) + "\n", clone, home), done.returncode


def scrubbed(text: str, clone: Path, home: Path) -> str:
    """``text`` without the names of folders on this machine."""
    for path, name in ((clone, "~/DeepInfer-SM80"), (home, "~")):
        text = text.replace(str(path.resolve()), name).replace(str(path), name)
    return re.sub(r"/\S*/deepinfer-demo-\w+", "/tmp/deepinfer-demo", text)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="{demo,test}", help="default: both")
    names = parser.parse_args(argv).names or list(COMMANDS)
    if not set(names) <= set(COMMANDS):
        parser.error(f"names must be among {', '.join(COMMANDS)}, got {' '.join(names)}")
    if git("status", "--porcelain", "--untracked-files=no"):
        sys.stderr.write(
            "There are changes that are not committed: a transcript names the commit it is of. Commit first.\n"
        )
        return 2
    commit = git("rev-parse", "--short", "HEAD")
    OUT.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        clone, home = Path(scratch, "clone"), Path(scratch, "home")
        home.mkdir()
        git("clone", "--quiet", str(ROOT), str(clone))
        for name in names:
            command = COMMANDS[name]
            sys.stdout.write(f"recording {' '.join(command)}\n")
            sys.stdout.flush()
            text, code = recorded(command, clone, home, commit)
            (OUT / f"{name}.txt").write_text(text, encoding="utf-8")
            sys.stdout.write(text.splitlines()[-1] + "\n")
            if code:
                return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
