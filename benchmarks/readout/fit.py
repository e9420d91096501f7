#!/usr/bin/env python3
"""Fits the direction that a preset's head reads, and stores it in src/deepinfer_sm80/model/readout.json.

    python benchmarks/readout/fit.py tiny [--lengths 700 1500 3000] [--device cuda] [--states DIR] [--table FILE]

Fourteen passes of the specification over prompts of the frozen text: complete, with rounding noise, and without each
component. On two CPU cores a pass of 1,500 tokens of ``tiny`` takes about a minute, on a GPU some seconds; ``layer``
wants a GPU and 40 GB of memory. ``--states``
keeps the last hidden states, and takes those that are there; ``--only NAME`` computes those of one pass and stops.
``--table`` measures the new head on the same states: what ``deepinfer-sm80 sensitivity --json`` does pass by pass.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer

from deepinfer_sm80.model import prose, readout
from deepinfer_sm80.model.config import ModelConfig, preset
from deepinfer_sm80.model.engram_hash import compress_vocabulary
from deepinfer_sm80.model.forward import logprobs_of
from deepinfer_sm80.model.schema import expected_tensors
from deepinfer_sm80.model.sensitivity import ROUNDING_NOISE, Generated, Model, Table, change_of, rounding_noise
from deepinfer_sm80.model.switches import COMPONENTS
from deepinfer_sm80.model.tokenizer_files import tokenizer_files
from deepinfer_sm80.model.weights import random_tensors_ahead

LONG = 1500  # a prompt of this length notices every component by itself, not only together with the others
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


@torch.no_grad()
def states(model: Model, prompts: list[list[int]], what: str, kept: Path | None) -> torch.Tensor:
    """float32 [sum of lengths, hidden]: last hidden states, complete ("") or without ``what``."""
    file = kept / f"{what or 'complete'}.pt" if kept else None
    if file and file.exists():
        return torch.load(file)
    found = model.without(*[what] if what in COMPONENTS else [])
    if what == ROUNDING_NOISE:
        with rounding_noise():
            result = torch.cat([found.hidden(prompt) for prompt in prompts]).float().cpu()
    else:
        result = torch.cat([found.hidden(prompt) for prompt in prompts]).float().cpu()
    if file:
        file.parent.mkdir(parents=True, exist_ok=True)
        torch.save(result, file)
    return result


@torch.no_grad()
def measured(source: Generated, prompts: list[list[int]], kept: Path, device: str) -> Table:
    """The table of the stored head over the states in ``kept``."""
    head = source.load("head.weight").to(device)

    def logprobs(what: str) -> torch.Tensor:
        hidden = torch.load(kept / f"{what}.pt").bfloat16().to(device)
        parts = zip(hidden.split([len(p) for p in prompts]), prompts, strict=True)
        return torch.cat([logprobs_of(h, head, torch.tensor(p, device=device)) for h, p in parts]).cpu()

    complete = logprobs("complete")
    changes = [change_of(name, logprobs(name) - complete) for name in (ROUNDING_NOISE, *COMPONENTS)]
    return Table(len(complete), complete.mean().item(), tuple(changes))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("preset")
    parser.add_argument("--lengths", type=int, nargs="+", default=[700, 1500, 3000])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--states", type=Path)
    parser.add_argument("--table", type=Path, help="needs --states")
    parser.add_argument("--only", nargs="+", choices=["complete", ROUNDING_NOISE, *COMPONENTS])
    args = parser.parse_args()
    if args.table and not args.states:
        parser.error("--table reads the states of every pass: name their folder with --states DIR")

    config = preset(args.preset)
    tokenizer = Tokenizer.from_str(tokenizer_files(config)["tokenizer.json"])
    found = prose.prompts(lambda text: tokenizer.encode(text, add_special_tokens=False).ids)
    prompts = [prompt for prompt in found if len(prompt) in args.lengths]
    model = Model(config, Held(config, args.seed), compress_vocabulary(tokenizer)[0], args.device)

    for name in args.only or ():
        states(model, prompts, "" if name == "complete" else name, args.states)
    if args.only:
        return 0
    complete = states(model, prompts, "", args.states)
    rounding = states(model, prompts, ROUNDING_NOISE, args.states) - complete
    ends = list(itertools.accumulate(map(len, prompts)))
    long = [slice(end - len(p), end) for p, end in zip(prompts, ends, strict=True) if len(p) >= LONG]
    shifts = []
    for name in COMPONENTS:
        change = states(model, prompts, name, args.states) - complete
        if not change.any():
            parser.error(f"prompts of {args.lengths} tokens do not notice {name}: name longer ones with --lengths")
        shifts += [change.mean(0), *(change[rows].mean(0) for rows in long)]
        print(
            f"{name:20} mean shift {change.mean(0).norm() / complete.norm(dim=1).mean():.4f} of the state", flush=True
        )
    u = readout.fit(complete, shifts, rounding)
    read, moved = complete @ u, (rounding @ u).abs()
    print(f"u . h: {read.mean():.4f}, deviation {read.std():.4f}, rounding {moved.mean():.5f}")
    stored = json.loads(STORED.read_text(encoding="utf-8"))
    stored[args.preset] = {"lengths": args.lengths, **readout.stored_form(u, args.seed)}
    STORED.write_text(json.dumps(stored, indent=1) + "\n", encoding="utf-8")
    if args.table:
        readout.forget()
        table = measured(Generated(config, args.seed), prompts, args.states, args.device)
        where = torch.cuda.get_device_name() if args.device.startswith("cuda") else args.device
        facts = {"preset": args.preset, "lengths": args.lengths, "device": where, **dataclasses.asdict(table)}
        args.table.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
        print(f"complete {table.complete:.4f}", *table.changes, sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
