"""``deepinfer-sm80 plan``: whether and how the model fits a set of GPUs, before anything is downloaded."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import TYPE_CHECKING

from deepinfer_sm80.errors import PlanError, reason
from deepinfer_sm80.model.config import ModelConfig
from deepinfer_sm80.topology import answer, explain, offers, page, serve
from deepinfer_sm80.topology.cluster import KNOWN, LINKS, Cluster, cluster, shown, size
from deepinfer_sm80.topology.footprint import Weights, weights
from deepinfer_sm80.topology.layout import Setting, legal_tp
from deepinfer_sm80.topology.search import ANY, Only, Row, holds, plan, shapes

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

MAX_SPECULATION = 16
RELEASED = "deepseek-ai/DeepSeek-V4.1-Flash"


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "plan",
        help="whether and how the model fits a set of GPUs",
        description="Every layout of DeepSeek-V4.1 on a set of GPUs: memory per rank, KV capacity by vLLM's own "
        "formula, estimated speed, the vllm serve command, and why the others lost. What cannot be served yet comes "
        "after what can. Exit code 0: a layout that vLLM serves holds what was asked for, one request of "
        "--context in a cache that --streams share; 1: none does; 2: an option is wrong. The last line says which, "
        "with --json the key held.",
    )
    parser.add_argument("--gpus", metavar="NxCARD", help="6xA100-64GB, or 8xMyCard:48GB:900GB/s:150TFLOPS")
    parser.add_argument("--hosts", metavar="N", help="hosts the GPUs are spread over evenly (default 1)")
    parser.add_argument("--ram", metavar="SIZE", help="memory of each host, such as 512GB (default: enough)")
    parser.add_argument("--link", help=f"between the GPUs of a host: {', '.join(LINKS)} (default: by card)")
    parser.add_argument("--context", metavar="TOKENS", help="such as 1M or 128K (default: the model's longest)")
    parser.add_argument("--streams", metavar="N", default="4", help="requests at a time (default 4)")
    parser.add_argument("--speculation", default="5", metavar="K", help="DSpark tokens, 0: off (default 5)")
    parser.add_argument("--tp", metavar="N", help="only layouts of this tensor-parallel size")
    parser.add_argument("--pp", metavar="N", help="only layouts of so many pipeline stages; 1: no pipeline")
    parser.add_argument("--dp", metavar="N", help="only layouts of so many data-parallel replicas")
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
    """Print the plan; 0 where a layout that vLLM serves holds what was asked for, else 1. Raises PlanError for what
    cannot be planned."""
    if args.page:
        print(page.page(), end="")
        return 0
    if args.gpus is None and not args.smallest:
        raise PlanError(
            option="--gpus", allowed="a number and a card", found="nothing", remedy="For example: --gpus 8xA100-80GB."
        )
    found = weights(_config(args.checkpoint))
    setting = _setting(args, found.config)
    if args.gpus is None:
        return _without_gpus(args, found, setting)
    hosts = 1 if args.hosts is None else whole("--hosts", args.hosts)
    group = cluster(args.gpus, hosts, args.ram, args.link)
    only = _only(args, found.config, group.count)
    checkpoint = args.checkpoint or RELEASED
    rows = plan(found, group, setting, checkpoint, only)
    offer = offers.servable(found, group, setting, checkpoint, only, rows)
    fits, served = any(row.fits for row in rows), any(row.servable for row in rows)
    instead = "" if fits else _instead(found, group, setting, checkpoint, only, rows, offer)
    if args.json:
        sets = offers.smallest_sets(found, setting, only, group.ram) if args.smallest else []
        more = {"smallest": answer.smallest_json(sets)} if args.smallest else {}
        plain = answer.as_json(rows, group, setting, found.config, offer)
        print(json.dumps({**plain, "held": served, "instead": instead, **more}, indent=1))
        return 0 if served else 1
    show = explain.every if args.all else explain.text
    print(show(rows, group, setting, found.config, offer, only))
    if instead:
        print("\n" + instead)
    elif args.smallest:
        print("\n" + explain.smallest(offers.smallest_sets(found, setting, only, group.ram), setting, only))
    print("\n" + explain.verdict(setting, only, served))
    return 0 if served else 1


def _without_gpus(args: argparse.Namespace, found: Weights, setting: Setting) -> int:
    """Print the smallest sets alone; 0 where vLLM serves one, else 1."""
    for option in ("hosts", "link", "all"):
        if getattr(args, option) not in (None, False):
            raise PlanError(
                option=f"--{option}",
                allowed="left out where --gpus is",
                found="--all" if option == "all" else getattr(args, option),
                remedy="The smallest sets are of every known card, in hosts of up to eight; add --gpus to plan one.",
            )
    only = _only(args, found.config)
    ram = None if args.ram is None else size(args.ram, "--ram")
    if not serve.processes_fit(Cluster(KNOWN[0], 1, ram=ram)):
        least = f"{serve.HOST_RESERVE + serve.RANK_RESERVE:.0f}GB"
        raise PlanError(
            option="--ram",
            allowed=f"{least} or more: the system and one process take so much (assumed), without Engram's tables",
            found=args.ram,
            remedy="Name the memory of a host; left out, it is taken to be enough.",
        )
    sets = offers.smallest_sets(found, setting, only, ram)
    served = any(entry.servable for entry in sets)
    if args.json:
        plain = {"context": setting.context, "held": served, "smallest": answer.smallest_json(sets)}
        print(json.dumps(plain, indent=1))
    else:
        print(explain.smallest(sets, setting, only) + "\n\n" + explain.verdict(setting, only, served))
    return 0 if served else 1


def _instead(
    found: Weights,
    group: Cluster,
    setting: Setting,
    checkpoint: str,
    only: Only,
    rows: Sequence[Row],
    offer: offers.Offer | None,
) -> str:
    """What is possible where nothing fits, within what was asked and, said so, beyond it."""
    usable = group.count * group.gpu.usable * setting.utilisation
    why = (
        f"the weights that go to the GPUs, all but Engram's tables, are {offers.weights_gib(found, setting):.0f} GiB "
        f"in the checkpoint, vLLM may use {usable:.0f} GiB of these GPUs, and every rank needs a workspace as well"
    )
    short_of_ram = next((row.why for row in rows if row.engram == "disk" and holds(row.memory)), "")
    sizes = explain.with_sizes(only)
    lines = [
        f"{group.label} does not hold a context of {setting.context:,} tokens{sizes}: {short_of_ram or why}.",
        *_within(offer, sizes),
    ]
    if only != ANY:
        free = offers.servable(found, group, setting, checkpoint)
        if free and free.context > (offer.context if offer else 0):
            lines.append(f"Without {only}: {explain.offered(free)}.")
    sets = offers.smallest_sets(found, setting, only, group.ram)
    return "\n".join([*lines, "", explain.smallest(sets, setting, only)])


def _within(offer: offers.Offer | None, sizes: str) -> list[str]:
    """The longest context that vLLM serves, with the host memory it takes and its command."""
    if offer is None:
        return [f"No context fits{sizes}."]
    name, context = offer.row.layout.name, offer.context
    return [
        f"What fits is a context of {context:,} tokens, as {name}: --context {context}.",
        f"Host memory: {explain.host_memory(offer.row)}.",
        explain.command_lines(offer.row),
        explain.LIMIT,
    ]


def _config(checkpoint: str | None) -> ModelConfig:
    if checkpoint is None:
        return ModelConfig()
    path = Path(checkpoint, "config.json")
    wrong = {"option": "--checkpoint", "allowed": "a directory with the model's config.json"}
    remedy = f"Leave it out to plan for the released {RELEASED.partition('/')[2]}."
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        why = "what is no JSON" if isinstance(error, RecursionError) else reason(error)
        raise PlanError(**wrong, found=f"{path} ({why})", remedy=remedy) from error
    if not isinstance(content, dict):
        raise PlanError(**wrong, found=f"{path} (what describes no model)", remedy=remedy)
    return ModelConfig.from_dict(content)


def _setting(args: argparse.Namespace, config: ModelConfig) -> Setting:
    longest = config.max_position_embeddings
    context = longest if args.context is None else tokens(args.context)
    if not 0 < context <= longest:
        raise PlanError(
            option="--context",
            allowed=f"1 to {longest:,} tokens, the model's longest",
            found=args.context if args.context.isdigit() or not context else f"{args.context} ({context:,} tokens)",
            remedy=f"Ask for --context {longest} or less.",
        )
    sizes = []
    for option, text, low, high, remedy in (
        ("--streams", args.streams, 1, 1024, "Requests served at a time; 4 is the default."),
        ("--speculation", args.speculation, 0, MAX_SPECULATION, "5 is the tested speculation."),
    ):
        sizes.append(whole(option, text))
        if not low <= sizes[-1] <= high:
            raise PlanError(option=option, allowed=f"{low} to {high}", found=sizes[-1], remedy=remedy)
    return Setting(context=context, streams=sizes[0], speculation=sizes[1])


def tokens(text: str) -> int:
    """``1M`` is 1,048,576, ``128K`` 131,072, ``0.5M`` 524,288, a plain number itself."""
    plain = text.strip().upper().replace(",", "").replace("_", "")
    found = re.fullmatch(r"([0-9]{1,12})(?:(\.[0-9]{1,6})?([KM]))?", plain)
    if not found:
        allowed = "tokens, such as 1M, 128K or 100000"
        raise PlanError(option="--context", allowed=allowed, found=shown(text), remedy="Write the number so.")
    unit = {None: 1, "K": 1024, "M": 1024**2}[found[3]]
    return int(found[1]) * unit + int(float(found[2] or 0) * unit)


def whole(option: str, text: str) -> int:
    """The whole number ``text``. Raises PlanError for anything else."""
    if not re.fullmatch(r"[+-]?[0-9]{1,9}", text.strip()):
        raise PlanError(option=option, allowed="a whole number", found=shown(text), remedy="Write it in digits.")
    return int(text)


def _only(args: argparse.Namespace, config: ModelConfig, count: int | None = None) -> Only:
    """The sizes that were asked for. Raises PlanError for those that ``count`` GPUs (None: any set) cannot have."""
    only = Only(
        *(None if (text := getattr(args, name)) is None else whole(f"--{name}", text) for name in ("tp", "pp", "dp"))
    )
    counts = range(1, offers.MAX_SET + 1) if count is None else (count,)
    every = [(w[0], len(w), dp) for n in counts for w, dp, _ in shapes(config, n)]
    of = f"with {count} GPU{'s' * (count > 1)}" if count else f"in sets of up to {offers.MAX_SET} GPUs"
    remedies = (
        f"{config.num_attention_heads} heads, {config.o_groups} output groups and {config.engram_columns} Engram "
        f"columns divide by {', '.join(map(str, legal_tp(config)))} only; --dp and --pp take the rest.",
        f"Stages share the {config.num_hidden_layers} layers; 1 leaves pipelines out.",
        "Replicas share the GPUs evenly.",
    )
    for place, (name, remedy) in enumerate(zip(("tp", "pp", "dp"), remedies, strict=True)):
        asked, possible = getattr(only, name), sorted({shape[place] for shape in every})
        if asked is not None and asked not in possible:
            allowed = f"{'one of ' * (len(possible) > 1)}{', '.join(map(str, possible))} {of}"
            raise PlanError(option=f"--{name}", allowed=allowed, found=asked, remedy=remedy)
    if not any(only.admits((tp,) * pp, dp) for tp, pp, dp in every):
        sizes = [size for size in (only.tp, only.pp, only.dp) if size is not None]
        product = count or f"{offers.MAX_SET} or less"
        raise PlanError(
            option=only,
            allowed=f"sizes of a layout {of}: TP x PP x DP = {product}, at most {config.num_hidden_layers} stages",
            found=f"{' x '.join(map(str, sizes))} = {math.prod(sizes)}",
            remedy="Leave one of them out.",
        )
    return only
