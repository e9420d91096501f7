"""``deepinfer-sm80 sensitivity``: what a missing component, and what rounding, changes in a text's log-probability."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepinfer_sm80.cli.devices import usable
from deepinfer_sm80.cli.needs import need
from deepinfer_sm80.errors import OptionError, reason
from deepinfer_sm80.model.prose import LENGTHS

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from deepinfer_sm80.model.sensitivity import Change, Table

MEASURED = ("preset", "lengths", "device", "tokens", "complete", "changes")
TEXT = (1500,)  # long enough for every component; docs/sensitivity.md adds the prompts of 700 and 3,000 tokens


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "sensitivity",
        help="measure how much each missing component lowers a checkpoint's log-probability of a text",
        description="Run the specification over the prompt of 1,500 tokens, complete, with rounding noise and without "
        "each component: fourteen passes, about a minute each on two cores. Exit code 0: rounding stays within its "
        "limit and every component is noticed, 1: not so, and the last lines say which.",
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("directory", metavar="DIR", nargs="?", type=Path, help="a checkpoint from make-checkpoint")
    what.add_argument(
        "--page", metavar="JSON", type=Path, nargs="+", help="print the page of measurements instead of measuring"
    )
    parser.add_argument(
        "--lengths",
        type=int,
        nargs="+",
        choices=LENGTHS[1:],
        default=TEXT,
        metavar="TOKENS",
        help=f"prompts to take, of {', '.join(map(str, LENGTHS[1:]))} tokens (default: 1500); shorter ones are quicker "
        "and do not notice every component",
    )
    parser.add_argument("--device", default="cpu", help="where to compute: cpu, cuda or cuda:N (default: cpu)")
    parser.add_argument("--json", metavar="FILE", type=Path, help="also write the measurement here, for --page")


def run(args: argparse.Namespace) -> int:
    """Print a page or measure. Returns 1 when a component is too small or rounding too large, else 0.

    Raises OptionError, CheckpointError, MissingTorchError.
    """
    if args.page:
        print(page([_measurement(path) for path in args.page]), end="")
        return 0
    if args.json:
        _require_writable(args.json)
    need("sensitivity", "torch", "numpy", "tokenizers")
    table = measure(args.directory, tuple(args.lengths), args.device)
    for line in rows(table):
        print(line)
    print("\n" + "\n".join(verdict(table, args.lengths)))
    if args.json:
        facts = {"preset": preset_of(args.directory), "lengths": list(args.lengths), "device": _named(args.device)}
        facts |= dataclasses.asdict(table)
        args.json.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    return 0 if within_limits(table) else 1


def _measurement(path: Path) -> dict[str, Any]:
    """What ``--json`` wrote to ``path``. Raises OptionError for anything else."""
    found = ""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        found = reason(error)
    else:
        lacking = [key for key in MEASURED if not isinstance(content, dict) or key not in content]
        if not lacking:
            return dict(content)
        found = f"one without {', '.join(lacking)}"
    allowed = "files that deepinfer-sm80 sensitivity DIR --json FILE wrote"
    raise OptionError(option="--page", allowed=allowed, found=f"{found} ({path})", remedy="Name such a file.")


def _require_writable(path: Path) -> None:
    """Before fourteen passes are run. Raises OptionError."""
    folder = path.resolve().parent
    found = ""
    if not folder.is_dir():
        found = f"{path}, whose folder does not exist"
    elif path.is_dir():
        found = f"{path}, a folder"
    elif not os.access(path if path.exists() else folder, os.W_OK):
        found = f"{path}, where this user may not write"
    if found:
        remedy = "Create the folder, or name another file."
        raise OptionError(option="--json", allowed="a file in an existing folder", found=found, remedy=remedy)


def verdict(table: Table, lengths: Sequence[int]) -> list[str]:
    """What the exit code means, in sentences."""
    from deepinfer_sm80.model.sensitivity import ROUNDING, SENSITIVITY

    rounding, *components = table.changes
    small = [change for change in components if change.mean > -SENSITIVITY]
    limit = f"leaving a component out must lower the mean by {SENSITIVITY} or more"
    if not small:
        lines = [f"Noticed: all {len(components)} components ({limit})."]
    else:
        names = ", ".join(f"{change.what} ({change.mean:+.4f})" for change in small)
        lines = [f"NOT NOTICED: {len(small)} of {len(components)} components ({limit}): {names}."]
        if max(lengths) < TEXT[0]:
            lines.append(
                f"Prompts of {', '.join(map(str, lengths))} tokens are too short to notice every component: take "
                f"--lengths {TEXT[0]}, the default."
            )
        else:
            lines.append("Heads are fitted to the presets' seed 0: write one with deepinfer-sm80 make-checkpoint.")
    moved = f"Rounding moves a log-probability by {rounding.size:.4f} on average; {ROUNDING} is allowed."
    return [*lines, moved if rounding.size <= ROUNDING else f"TOO MUCH: {moved}"]


def preset_of(directory: Path) -> str:
    """The name of the preset that the checkpoint in ``directory`` was written from; "another" if none fits."""
    from deepinfer_sm80.model.checkpoint_files import read_config
    from deepinfer_sm80.model.config import preset, preset_names

    config = read_config(directory)
    return next((name for name in preset_names() if preset(name) == config), "another")


def _named(device: str) -> str:
    """The GPU's name for a CUDA device: a figure names its machine."""
    import torch

    return torch.cuda.get_device_name(device) if device.startswith("cuda") else device


def measure(directory: Path, lengths: tuple[int, ...], device: str, components: tuple[str, ...] | None = None) -> Table:
    """The table of ``components`` (default: all) for the checkpoint over the frozen text's prompts of ``lengths``."""
    from deepinfer_sm80.model import prose, sensitivity
    from deepinfer_sm80.model.checkpoint_files import read_tokenizer
    from deepinfer_sm80.model.switches import COMPONENTS

    model = sensitivity.Model.from_checkpoint(directory, usable(device))
    tokenizer = read_tokenizer(directory)
    found = prose.prompts(lambda text: tokenizer.encode(text, add_special_tokens=False).ids)
    chosen = [prompt for prompt in found if len(prompt) in lengths]
    return sensitivity.measure(model, chosen, components or tuple(COMPONENTS))


def within_limits(table: Table) -> bool:
    """Whether rounding stays below its limit and every component of the table moves the mean by its own."""
    from deepinfer_sm80.model.sensitivity import ROUNDING, SENSITIVITY

    rounding, *components = table.changes
    return rounding.size <= ROUNDING and all(change.mean <= -SENSITIVITY for change in components)


def rows(table: Table) -> list[str]:
    """The table as markdown lines."""
    head = ["| left out | mean change | mean size of a change | largest |", "|---|---|---|---|"]
    return head + [_row(change) for change in table.changes]


def _row(change: Change) -> str:
    from deepinfer_sm80.model.sensitivity import ROUNDING_NOISE
    from deepinfer_sm80.model.switches import COMPONENTS

    name = "nothing; rounding only" if change.what == ROUNDING_NOISE else f"{change.what}: {COMPONENTS[change.what]}"
    return f"| {name} | {change.mean:+.4f} | {change.size:.4f} | {change.largest:.3f} |"


def page(measurements: list[dict[str, Any]]) -> str:
    """``docs/sensitivity.md`` from what ``--json`` wrote."""
    from deepinfer_sm80.model.sensitivity import ROUNDING, SENSITIVITY

    return f"""# What the written checkpoints notice

Written by `deepinfer-sm80 sensitivity --page`; do not edit. Log-probabilities, in nats, of tokens of the frozen text
under a preset's checkpoint of seed 0, by the specification. The heads were fitted to the prompts of 700, 1,500 and
3,000 tokens; other text notices less. A model that knew nothing would give -11.77.

A component counts as noticed when leaving it out lowers the mean by {SENSITIVITY} or more. Rounding is that of another
correct implementation (TF32 mixing, unrounded probabilities, every product off by 2^-10 of itself) and may move a
log-probability by {ROUNDING} on average.

{chr(10).join(_section(measured) for measured in measurements)}
How a checkpoint comes to know the text: `src/deepinfer_sm80/model/readout.py`.
"""


def _section(measured: dict[str, Any]) -> str:
    from deepinfer_sm80.model.sensitivity import Change, Table

    changes = tuple(Change(**change) for change in measured["changes"])
    table = Table(measured["tokens"], measured["complete"], changes)
    *others, last = (f"{length:,}" for length in measured["lengths"])
    lengths = f"{', '.join(others)} and {last}" if others else last
    return f"""## Preset `{measured["preset"]}`

{table.tokens:,} tokens (prompts of {lengths} tokens) on: {measured["device"]}. Complete, the mean is
{table.complete:.4f}.

{chr(10).join(rows(table))}
"""
