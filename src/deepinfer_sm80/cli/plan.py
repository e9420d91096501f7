"""``deepinfer-sm80 plan``: whether and how the model fits a set of GPUs, before anything is downloaded."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

from deepinfer_sm80.errors import PlanError
from deepinfer_sm80.model.config import ModelConfig
from deepinfer_sm80.topology import explain, page
from deepinfer_sm80.topology.cluster import LINKS, Cluster, cluster
from deepinfer_sm80.topology.footprint import Weights, weights
from deepinfer_sm80.topology.layout import LEGAL_TP, Setting
from deepinfer_sm80.topology.search import longest_context, plan, smallest_sets

if TYPE_CHECKING:
    import argparse

MAX_SPECULATION = 16


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "plan",
        help="whether and how the model fits a set of GPUs",
        description="Every layout of DeepSeek-V4.1 on a set of GPUs: memory per rank, KV capacity by vLLM's own "
        "formula, estimated speed, the vllm serve command, and why the others lost. Exits with 1 where nothing fits.",
    )
    parser.add_argument("--gpus", metavar="NxCARD", help="6xA100-64GB, or 8xMyCard:48GB:900GB/s:150TFLOPS")
    parser.add_argument("--hosts", type=int, default=1, help="hosts the GPUs are spread over evenly (default 1)")
    parser.add_argument("--ram", metavar="SIZE", help="memory of each host, such as 512GB (default: enough)")
    parser.add_argument("--link", help=f"between the GPUs of a host: {', '.join(LINKS)} (default: by card)")
    parser.add_argument("--context", metavar="TOKENS", help="such as 1M or 128K (default: the model's longest)")
    parser.add_argument("--streams", type=int, default=4, help="requests at a time (default 4)")
    parser.add_argument("--speculation", type=int, default=5, metavar="K", help="DSpark tokens, 0: off (default 5)")
    parser.add_argument("--tp", type=int, help="only layouts of this tensor-parallel size")
    parser.add_argument(
        "--checkpoint", metavar="DIR", help="plan for this checkpoint's config.json (default: released)"
    )
    parser.add_argument(
        "--smallest", action="store_true", help="the smallest sets of known cards that would do; --gpus may be left out"
    )
    parser.add_argument("--all", action="store_true", help="every layout in full, not the best alone")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--page", action="store_true", help="print docs/05_TOPOLOGY_1M_CONTEXT_ANALYSIS_SM80.md")


def run(args: argparse.Namespace) -> int:
    """Print the plan; 0 where a layout fits, else 1. Raises PlanError for what cannot be planned."""
    if args.page:
        print(page.page(), end="")
        return 0
    if not args.gpus and not args.smallest:
        raise PlanError(
            option="--gpus", allowed="a number and a card", found="nothing", remedy="For example: --gpus 8xA100-80GB."
        )
    found = weights(_config(args.checkpoint))
    setting = _setting(args, found.config)
    if not args.gpus:
        sets = smallest_sets(found, setting)
        as_json = {"context": setting.context, "smallest": explain.smallest_json(sets)}
        print(json.dumps(as_json, indent=1) if args.json else explain.smallest(sets, setting))
        return 0
    group = cluster(args.gpus, args.hosts, args.ram, args.link)
    _check_tp(args.tp, group)
    rows = plan(found, group, setting, args.checkpoint or "deepseek-ai/DeepSeek-V4.1-Flash", args.tp)
    fits = any(row.fits for row in rows)
    instead = "" if fits else _instead(found, group, setting)
    if args.json:
        more = {"smallest": explain.smallest_json(smallest_sets(found, setting))} if args.smallest else {}
        print(json.dumps({**explain.as_json(rows, group, setting, found.config), "instead": instead, **more}, indent=1))
        return 0 if fits else 1
    print((explain.every if args.all else explain.text)(rows, group, setting, found.config))
    if instead:
        print("\n" + instead)
    elif args.smallest:
        print("\n" + explain.smallest(smallest_sets(found, setting), setting))
    return 0 if fits else 1


def _instead(found: Weights, group: Cluster, setting: Setting) -> str:
    """What is possible where nothing fits."""
    device = sum(found.stored(name) for name in found.components if name != "engram_tables") / 2**30
    offered = group.count * group.gpu.usable * setting.utilisation
    lines = [
        f"{group.label} does not hold a context of {setting.context:,} tokens: the weights on the GPUs are "
        f"{device:.0f} GiB, vLLM may use {offered:.0f} GiB of these GPUs, and every rank needs a workspace as well."
    ]
    longest = longest_context(found, group, setting)
    if longest:
        lines.append(f"What fits is a context of {longest[0]:,} tokens, as {longest[1].name}: --context {longest[0]}.")
    return "\n".join([*lines, explain.smallest(smallest_sets(found, setting), setting)])


def _config(checkpoint: str | None) -> ModelConfig:
    if checkpoint is None:
        return ModelConfig()
    path = Path(checkpoint, "config.json")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise PlanError(
            option="--checkpoint",
            allowed="a directory with the model's config.json",
            found=f"{path} ({type(error).__name__})",
            remedy="Leave it out to plan for the released DeepSeek-V4.1-Flash.",
        ) from error
    return ModelConfig.from_dict(content)


def _setting(args: argparse.Namespace, config: ModelConfig) -> Setting:
    longest = config.max_position_embeddings
    context = longest if args.context is None else tokens(args.context)
    if not 0 < context <= longest:
        raise PlanError(
            option="--context",
            allowed=f"1 to {longest:,} tokens, the model's longest",
            found=f"{args.context} ({context:,} tokens)",
            remedy=f"Ask for --context {longest} or less.",
        )
    for option, value, low, high, remedy in (
        ("--streams", args.streams, 1, 1024, "Requests served at a time; 4 is the default."),
        ("--speculation", args.speculation, 0, MAX_SPECULATION, "5 is the tested speculation."),
    ):
        if not low <= value <= high:
            raise PlanError(option=option, allowed=f"{low} to {high}", found=value, remedy=remedy)
    return Setting(context=context, streams=args.streams, speculation=args.speculation)


def tokens(text: str) -> int:
    """``1M`` is 1,048,576, ``128K`` 131,072, a plain number itself."""
    found = re.fullmatch(r"(\d+)([KM]?)", text.strip().upper().replace(",", "").replace("_", ""))
    if not found:
        raise PlanError(option="--context", allowed="tokens, such as 1M, 128K or 100000", found=text, remedy="Say one.")
    return int(found[1]) * {"": 1, "K": 1024, "M": 1024**2}[found[2]]


def _check_tp(tp: int | None, group: Cluster) -> None:
    possible = [t for t in LEGAL_TP if group.count % t == 0]
    if tp is not None and tp not in possible:
        raise PlanError(
            option="--tp",
            allowed=f"one of {', '.join(map(str, possible))} with {group.count} GPUs",
            found=tp,
            remedy="64 heads, 8 output groups, 72 scale groups of an expert and 24 Engram columns divide by 1, 2, 4 "
            "and 8 only; use pipeline stages for the rest.",
        )
