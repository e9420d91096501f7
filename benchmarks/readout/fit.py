#!/usr/bin/env python3
"""Fits the direction that a preset's head reads, and stores it in src/deepinfer_sm80/model/readout.json.

    python benchmarks/readout/fit.py tiny [--lengths 700 1500 3000] [--device cuda] [--states DIR] [--table FILE]

Nineteen passes of the specification over prompts of the frozen text: complete, without each component, with the
rounding noise of five implementations, and with its sums in another order. The last two are not fitted to: they
choose the smoothing. The passes with noise also see the text's tokens shuffled, for what a random model generates is
no text. With ``--table`` the margin is then set so that the weakest component lowers the mean by 0.102. On two CPU
cores a pass of 1,500 tokens of ``tiny`` takes about a minute, on a GPU some seconds; ``layer`` wants a GPU and 40 GB
of memory. ``--states`` keeps the last hidden states, and takes those that are there; ``--only NAME`` computes those
of some passes and stops. ``--table`` measures the new head on the same states: what ``deepinfer-sm80 sensitivity
--json`` does.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import itertools
import json
import random
import sys
from pathlib import Path
from typing import TYPE_CHECKING
from unittest import mock

from deepinfer_sm80.cli import needs

try:
    import torch
    from tokenizers import Tokenizer

    from deepinfer_sm80.model import linear, prose, readout
    from deepinfer_sm80.model.checkpoint import Reader
    from deepinfer_sm80.model.config import ModelConfig, preset
    from deepinfer_sm80.model.engram_hash import compress_vocabulary
    from deepinfer_sm80.model.forward import logprobs_of
    from deepinfer_sm80.model.schema import expected_tensors
    from deepinfer_sm80.model.sensitivity import (
        ROUNDING_NOISE,
        SENSITIVITY,
        Generated,
        Model,
        Table,
        change_of,
        other_order,
        rounding_noise,
    )
    from deepinfer_sm80.model.switches import COMPONENTS
    from deepinfer_sm80.model.tokenizer_files import tokenizer_files
    from deepinfer_sm80.model.weights import random_tensors_ahead
except ModuleNotFoundError as error:
    needs.leave("benchmarks/readout/fit.py", error)

if TYPE_CHECKING:
    from deepinfer_sm80.model.linear import Source

LONG = 1500  # a prompt of this length notices every component by itself, not only together with the others
COMPLETE = "complete"
FITTED = {f"{ROUNDING_NOISE}-{seed}": functools.partial(rounding_noise, seed) for seed in (2, 3, 4, 5)}
HELD = {ROUNDING_NOISE: rounding_noise, "order": other_order}
NOISES = FITTED | HELD
LEAST = 1.02 * SENSITIVITY  # what the weakest component shall lower the mean by
ROWS = (
    512  # of a product at once: sixteen times the specification's, five times as fast, noise of its own for all alike
)
STRANGE = 1500  # shuffled tokens
SMOOTHING = (0.03, 0.1, 0.3, 1.0)
STORED = Path(readout.__file__).with_name("readout.json")


class Held:
    """The random tensors of ``config`` and ``seed`` as a source, all made at the first use by as many threads as
    PyTorch would use."""

    def __init__(self, config: ModelConfig, seed: int) -> None:
        self.config, self.seed, self.headers = config, seed, expected_tensors(config, draft=False)
        self._made: dict[str, torch.Tensor] = {}

    def load(self, name: str) -> torch.Tensor:
        if not self._made:
            self._made = dict(random_tensors_ahead(self.config, self.headers, self.seed, torch.get_num_threads()))
        return self._made.pop(name)


class OnDevice:
    """``source``, each tensor moved to ``device`` once: every pass reads all of them."""

    def __init__(self, source: Source, device: str) -> None:
        self.source, self.device, self.headers = source, device, source.headers
        self._moved: dict[str, torch.Tensor] = {}

    def load(self, name: str) -> torch.Tensor:
        if name not in self._moved:
            self._moved[name] = self.source.load(name).to(self.device)
        return self._moved[name]


@torch.no_grad()
def states(model: Model, prompts: list[list[int]], what: str, kept: Path | None) -> torch.Tensor:
    """float32 [sum of lengths, hidden]: last hidden states, complete, without a component, or with one of NOISES."""
    file = kept / f"{what}.pt" if kept else None
    if file and file.exists():
        return torch.load(file)
    found = model.without(*[what] if what in COMPONENTS else [])
    with NOISES.get(what, contextlib.nullcontext)(), mock.patch.object(linear, "_ROWS", ROWS):
        result = torch.cat([found.hidden(prompt) for prompt in prompts]).float().cpu()
    if file:
        file.parent.mkdir(parents=True, exist_ok=True)
        torch.save(result, file)
    return result


@torch.no_grad()
def measured(args: argparse.Namespace, prompts: list[list[int]]) -> Table:
    """The table of the stored head over the states in ``args.states``."""
    device, config = args.device, preset(args.preset)
    head = Generated(config, args.seed).load("head.weight").to(device)

    def logprobs(what: str) -> torch.Tensor:
        hidden = torch.load(args.states / f"{what}.pt")[: sum(map(len, prompts))].bfloat16().to(device)
        parts = zip(hidden.split([len(p) for p in prompts]), prompts, strict=True)
        return torch.cat([logprobs_of(h, head, torch.tensor(p, device=device)) for h, p in parts]).cpu()

    complete = logprobs("complete")
    changes = [change_of(name, logprobs(name) - complete) for name in (ROUNDING_NOISE, *COMPONENTS)]
    return Table(len(complete), complete.mean().item(), tuple(changes))


def store(args: argparse.Namespace, u: torch.Tensor) -> None:
    """Keep u [hidden] as the preset's direction."""
    stored = json.loads(STORED.read_text(encoding="utf-8"))
    stored[args.preset] = {"lengths": args.lengths, **readout.stored_form(u.cpu(), args.seed)}
    STORED.write_text(json.dumps(stored, indent=1) + "\n", encoding="utf-8")
    readout.forget()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("preset")
    parser.add_argument("--lengths", type=int, nargs="+", default=[700, 1500, 3000])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--checkpoint", type=Path, help="one of this preset and seed: read it instead of drawing anew")
    parser.add_argument("--states", type=Path)
    parser.add_argument("--table", type=Path, help="needs --states")
    parser.add_argument("--only", nargs="+", choices=[COMPLETE, *NOISES, *COMPONENTS])
    args = parser.parse_args()
    if args.table and not args.states:
        parser.error("--table reads the states of every pass: name their folder with --states DIR")
    if args.table and not args.table.resolve().parent.is_dir():
        parser.error(f"--table {args.table}: its folder does not exist")

    config = preset(args.preset)
    tokenizer = Tokenizer.from_str(tokenizer_files(config)["tokenizer.json"])
    found = prose.prompts(lambda text: tokenizer.encode(text, add_special_tokens=False).ids)
    prompts = [prompt for prompt in found if len(prompt) in args.lengths]
    source: Source = Reader(args.checkpoint) if args.checkpoint else Held(config, args.seed)
    model = Model(config, source, compress_vocabulary(tokenizer)[0], args.device)
    model.source = OnDevice(model.source, args.device)

    tokens = [token for prompt in prompts for token in prompt]
    strange = random.Random(0).sample(tokens, min(STRANGE, len(tokens)))
    for name in args.only or ():
        states(model, prompts if name in COMPONENTS else [*prompts, strange], name, args.states)
    if args.only:
        return 0
    text = len(tokens)
    everything = states(model, [*prompts, strange], COMPLETE, args.states).to(args.device)
    complete = everything[:text]
    rounding, held = (
        torch.cat(
            [states(model, [*prompts, strange], name, args.states).to(args.device) - everything for name in names]
        )
        for names in (FITTED, HELD)
    )
    of_text = (torch.arange(len(held), device=args.device) % len(everything)) < text
    ends = list(itertools.accumulate(map(len, prompts)))
    long = [slice(end - len(p), end) for p, end in zip(prompts, ends, strict=True) if len(p) >= LONG]
    shifts = []
    for name in COMPONENTS:
        change = states(model, prompts, name, args.states).to(args.device) - complete
        if not change.any():
            parser.error(f"prompts of {args.lengths} tokens do not notice {name}: name longer ones with --lengths")
        shifts += [change.mean(0), *(change[rows].mean(0) for rows in long)]
        print(
            f"{name:20} mean shift {change.mean(0).norm() / complete.norm(dim=1).mean():.4f} of the state", flush=True
        )

    def fitted(smoothing: float, margin: float) -> torch.Tensor:
        u = readout.fit(complete, shifts, rounding, margin, smoothing).to(args.device)
        moved = [(part @ u).abs().mean().item() for part in (rounding, held[of_text], held[~of_text])]
        print(
            f"smoothing {smoothing}, margin {margin:.4f}: noise moves u . h by {moved[0]:.5f}, noise held out by "
            f"{moved[1]:.5f}, in shuffled text by {moved[2]:.5f}; deviation {(complete @ u).std():.4f}",
            flush=True,
        )
        return u

    tried = {s: fitted(s, readout.MARGIN) for s in SMOOTHING}
    smoothing = min(tried, key=lambda s: (held @ tried[s]).abs().mean().item())
    store(args, tried[smoothing])
    if args.table:
        table = measured(args, prompts)
        weakest = max(change.mean for change in table.changes[1:])
        store(args, fitted(smoothing, readout.MARGIN * LEAST / -weakest))
        table = measured(args, prompts)
        where = torch.cuda.get_device_name() if args.device.startswith("cuda") else args.device
        facts = {"preset": args.preset, "lengths": args.lengths, "device": where, **dataclasses.asdict(table)}
        args.table.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
        print(f"complete {table.complete:.4f}", *table.changes, sep="\n")
        weak = [change.what for change in table.changes[1:] if change.mean > -SENSITIVITY]
        if weak:
            print(f"not noticed: {', '.join(weak)}")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
