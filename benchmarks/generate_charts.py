"""Charts from benchmarks/results/sm80_benchmark_summary.json; one GPU a chart, named in its title.

Figures that others have published for other hardware (benchmarks/published.json) stand beside ours, hollow and named.

    python3 benchmarks/generate_charts.py [--summary FILE] [--out FOLDER] [--refresh]

Writes SVG and PNG. Needs matplotlib and torch. --refresh first writes the summary anew from the recorded rows and from
docs/resources.md. A chart is drawn on a light card of its own, so that it reads on light and on dark pages.
"""

import argparse
import json
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

from deepinfer_sm80.cli import needs

try:
    import matplotlib

    matplotlib.use("agg")

    from matplotlib.figure import Figure

    from deepinfer_sm80.bench import rows
    from deepinfer_sm80.bench.providers import PROVIDERS
    from deepinfer_sm80.bench.rows import gpu_folder
except ModuleNotFoundError as error:
    needs.leave("benchmarks/generate_charts.py", error)

from deepinfer_sm80.errors import reason

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks/results"
CHARTS = RESULTS / "charts"
PUBLISHED = ROOT / "benchmarks/published.json"
ARCHITECTURES = ("sm_80", "sm_86")
CARD, INK, FAINT = "#f7f7f4", "#222222", "#c9c9c4"
# Okabe and Ito's colours, which differ for colour-blind readers too
HUES = ("#0072b2", "#e69f00", "#d55e00", "#cc79a7", "#009e73", "#56b4e9", "#5f5f5f", "#9c755f")
COLOURS = dict(zip(PROVIDERS, HUES, strict=True))
PALE = ("#9ecae1", "#fdd49e", "#fcae91", "#e7cfe0", "#a1d9c3", "#333333", "#c4a995", "#f0e442")
ARMS = {"kernels": "this plugin", "stock": "vLLM's own path for this GPU"}
LEAST_SHARE = 0.04
STYLE = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "text.color": INK,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.facecolor": CARD,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": FAINT,
    "grid.linewidth": 0.6,
    "xtick.color": INK,
    "ytick.color": INK,
    "figure.facecolor": CARD,
    "savefig.facecolor": CARD,
    "svg.hashsalt": "deepinfer-sm80",
    "svg.fonttype": "none",
}


def charts(summary):
    """Name -> figure of everything that the summary has data for."""
    found = {f"resources-{arch}": resources(summary["resources"], arch) for arch in ARCHITECTURES}
    for gpu, lowering in sorted({(row["gpu"], row["lowering"]) for row in summary["rows"]}):
        chosen = [row for row in summary["rows"] if (row["gpu"], row["lowering"]) == (gpu, lowering)]
        title, end = f"{gpu}, lowering {lowering}", f"{gpu_folder(gpu)}-{lowering}"
        found[f"speedup-{end}"] = speedup(chosen, title)
        found[f"roofline-{end}"] = roofline(chosen, title)
        for axis in AXES:
            figure = latency(chosen, title, axis)
            if figure is not None:
                found[f"latency-{axis}-{end}"] = figure
    for gpu, checkpoint in sorted({(row["gpu"], row["checkpoint"]) for row in summary.get("steps", [])}):
        chosen = [row for row in summary["steps"] if (row["gpu"], row["checkpoint"]) == (gpu, checkpoint)]
        found[f"steps-{gpu_folder(gpu)}-{checkpoint}"] = steps(chosen, f"{gpu}, checkpoint {checkpoint}")
    return found


def resources(table, arch):
    """Bars of what each operator's most demanding kernel needs on ``arch``; the newest Triton of the table."""
    triton = max((r["triton"] for r in table), key=lambda version: [int(part) for part in version.split(".")])
    here = [r for r in table if r["arch"] == arch and r["triton"] == triton]
    operators = list(dict.fromkeys(r["op"] for r in here))
    worst = {
        "shared memory of a CTA (KiB)": [max(r["shared"] for r in here if r["op"] == op) / 1024 for op in operators],
        "registers of a thread": [max(r["registers"] for r in here if r["op"] == op) for op in operators],
        "CTAs on an SM (fewest)": [min(r["ctas_per_sm"] for r in here if r["op"] == op) for op in operators],
    }
    figure = Figure(figsize=(11, 0.6 + 0.3 * (len(operators) + 2)), layout="constrained")
    for axes, (label, values), colour in zip(
        figure.subplots(1, 3, sharey=True), worst.items(), ("#0072b2", "#009e73", "#e69f00"), strict=True
    ):
        bars = axes.barh(operators, values, color=colour, height=0.65)
        axes.bar_label(bars, fmt="%.3g", padding=2, fontsize=8)
        axes.margins(x=0.18)
        axes.set_xlabel(label)
        axes.grid(axis="x")
        axes.tick_params(axis="y", length=0)
    axes.invert_yaxis()  # shared by the three
    figure.suptitle(f"What the kernels need on {arch}: compiled with Triton {triton}, not timed")
    return figure


def speedup(chosen, title):
    """How many times ours is as fast as each provider: the geometric mean over the cases both have, per operator."""
    ours = {(r["op"], r["case"]): r["p50_us"] for r in chosen if r["provider"] == "ours"}
    ratios = {}
    for r in chosen:
        if r["provider"] != "ours" and (r["op"], r["case"]) in ours:
            ratios.setdefault((r["op"], r["provider"]), []).append(r["p50_us"] / ours[r["op"], r["case"]])
    operators = list(dict.fromkeys(op for op, _ in ratios))
    providers = [p for p in PROVIDERS if any(key[1] == p for key in ratios)]
    figure = Figure(figsize=(9, 1.4 + 0.22 * max(len(ratios), 4) + 0.2 * len(operators)), layout="constrained")
    axes = figure.subplots()
    height = 0.8 / max(len(providers), 1)
    for i, provider in enumerate(providers):
        at = [n + i * height - 0.4 for n, op in enumerate(operators) if (op, provider) in ratios]
        values = [geometric_mean(ratios[op, provider]) for op in operators if (op, provider) in ratios]
        bars = axes.barh(at, values, height * 0.9, align="edge", color=COLOURS[provider], label=provider)
        axes.bar_label(bars, fmt="%.2f", padding=2, fontsize=8)
    published = [item for item in json.loads(PUBLISHED.read_text(encoding="utf-8")) if item["op"] in operators]
    if published:
        at = [operators.index(item["op"]) for item in published]
        others = ", ".join(sorted({f"{item['hardware']}, against {item['against']}" for item in published}))
        label, ratios = f"published, not ours ({others})", [item["ratio"] for item in published]
        axes.scatter(ratios, at, s=34, marker="D", facecolors="none", edgecolors=INK, label=label, zorder=3)
    axes.set_yticks(range(len(operators)), operators)
    axes.set_xscale("log")
    axes.margins(x=0.12, y=0.01)
    axes.axvline(1.0, color=INK, linewidth=0.9)
    axes.invert_yaxis()
    axes.set_xlabel("time over ours (geometric mean over cases, log scale); right of 1 ours is faster")
    axes.grid(axis="x")
    if providers:
        figure.legend(frameon=False, loc="outside lower center", ncols=3)
    axes.set_title(f"Ours beside its baselines\n{title}")
    return figure


def roofline(chosen, title):
    """Our points under the copy and dot ceilings that their own run measured."""
    points = [r for r in chosen if r["provider"] == "ours" and r["flops"]]
    figure = Figure(figsize=(10, 5), layout="constrained")
    axes = figure.subplots()
    axes.set_title(f"Roofline, measured ceilings\n{title}")
    axes.set_xlabel("least FLOP per least byte")
    axes.set_ylabel("TFLOP/s")
    axes.grid(which="major")
    axes.set_xscale("log")
    axes.set_yscale("log")
    if not points:
        return figure
    copy, dot = (max(r[key] for r in points) for key in ("copy_bytes_per_s", "dot_flops_per_s"))
    intensity = [r["flops"] / r["bytes"] for r in points]
    edge = [min(*intensity, 1.0) / 2, dot / copy, max(*intensity, dot / copy) * 4]
    axes.plot(edge, [min(x * copy, dot) / 1e12 for x in edge], color=INK, linewidth=1.4)
    label = f"{copy / 1e9:.0f} GB/s, {dot / 1e12:.0f} TFLOP/s"
    axes.annotate(label, (edge[1], dot / 1e12), (4, 5), textcoords="offset points")
    operators = list(dict.fromkeys(r["op"] for r in points))
    for op, colour, marker in zip(operators, cycle(list(COLOURS.values())), cycle("osD^vPX"), strict=False):
        mine = [r for r in points if r["op"] == op]
        x = [r["flops"] / r["bytes"] for r in mine]
        y = [r["flops"] / r["p50_us"] / 1e6 for r in mine]
        axes.scatter(x, y, s=26, color=colour, marker=marker, label=op)
    axes.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return figure


AXES = {"tokens": ("tokens (of a decode: batch)", r"\b(?:T|rows)(\d+)"), "context": ("rows of context", r"\bctx(\d+)")}


def latency(chosen, title, axis):
    """A panel for each operator whose cases differ along ``axis``, everything else in the case's name being equal."""
    label, pattern = AXES[axis]
    lines = {}
    for r in chosen:
        found = re.search(pattern, r["case"])
        if found:
            rest = re.sub(pattern, "", r["case"]).strip("-").replace("--", "-")
            key = (r["op"], r["provider"], rest)
            lines.setdefault(key, []).append((int(found[1]), r["p50_us"]))
    lines = {key: sorted(points) for key, points in lines.items() if len(points) > 1}
    operators = list(dict.fromkeys(op for op, _, _ in lines))
    if not operators:
        return None
    columns = min(3, len(operators))
    deep = -(-len(operators) // columns)
    figure = Figure(figsize=(4.2 * columns + 0.6, 3.2 * deep + 0.7), layout="constrained")
    panels = figure.subplots(deep, columns, squeeze=False).flat
    handles = {}
    for panel, op in zip(panels, operators, strict=False):
        for (name, provider, _), points in lines.items():
            if name == op:
                panel.plot(
                    *zip(*points, strict=True), color=COLOURS[provider], marker="o", markersize=3, label=provider
                )
        panel.set(title=op, xlabel=label, ylabel="median, µs", xscale="log", yscale="log")
        panel.grid()
        for handle, provider in zip(*panel.get_legend_handles_labels(), strict=True):
            handles.setdefault(provider, handle)
    for panel in list(figure.axes)[len(operators) :]:
        panel.set_axis_off()
    figure.legend(handles.values(), handles.keys(), frameon=False, loc="outside lower center", ncols=len(handles))
    figure.suptitle(f"Median time of a call\n{title}")
    return figure


def steps(chosen, title):
    """A decode step's time by batch for each arm, and the shares of the operators in the plugin's steps."""
    figure = Figure(figsize=(11, 4.6), layout="constrained")
    times, shares = figure.subplots(1, 2, width_ratios=(1, 1.5))
    size = {row["step"]: int(row["step"].rpartition("-")[2]) for row in chosen}
    for arm, colour in zip(ARMS, (COLOURS["ours"], COLOURS["vllm"]), strict=True):
        points = sorted(
            (size[r["step"]], r["ms"]) for r in chosen if r["arm"] == arm and r["step"].startswith("decode")
        )
        if points:
            times.plot(*zip(*points, strict=True), color=colour, marker="o", label=ARMS[arm])
    times.set(xscale="log", xlabel="requests that decode", ylabel="ms of a step")
    times.set_ylim(bottom=0)
    times.grid()
    times.legend(frameon=False)
    mine = sorted((r for r in chosen if r["arm"] == "kernels"), key=lambda r: (r["step"][:2], size[r["step"]]))
    groups = list(dict.fromkeys(g for r in mine for g, facts in r["groups"].items() if facts["share"] >= LEAST_SHARE))
    left = [0.0] * len(mine)
    for group, colour in zip([*groups, "all others"], [*cycle([*HUES, *PALE])[: len(groups)], FAINT], strict=True):
        if group == "all others":
            values = [1 - done for done in left]
        else:
            values = [r["groups"].get(group, {"share": 0.0})["share"] for r in mine]
        shares.barh([r["step"] for r in mine], values, left=left, color=colour, edgecolor=CARD, label=group)
        left = [done + value for done, value in zip(left, values, strict=True)]
    shares.invert_yaxis()
    shares.set(xlim=(0, 1), xlabel="share of the kernel time of a step with this plugin")
    shares.legend(frameon=False, fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=3)
    figure.suptitle(f"A whole step inside vLLM\n{title}")
    return figure


def cycle(items):
    return [items[i % len(items)] for i in range(64)]


def geometric_mean(values):
    product = 1.0
    for value in values:
        product *= value ** (1 / len(values))
    return product


def draw(summary, out):
    """Write every chart as SVG and PNG into ``out``, the same bytes from the same summary. Returns the paths."""
    out.mkdir(parents=True, exist_ok=True)
    written = []
    with matplotlib.rc_context(STYLE):
        for name, figure in charts(summary).items():
            for end, metadata in (("svg", {"Date": None, "Creator": None}), ("png", {"Software": None})):
                path = out / f"{name}.{end}"
                figure.savefig(path, metadata=metadata, dpi=110)
                written.append(path)
    return written


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--summary", type=Path, default=RESULTS / rows.SUMMARY)
    parser.add_argument("--out", type=Path, default=CHARTS)
    parser.add_argument("--refresh", action="store_true", help="write the summary anew first")
    args = parser.parse_args(argv)
    if args.refresh:
        rows.write_summary(args.summary.parent, ROOT / "docs/resources.md")
    try:
        summary = json.loads(args.summary.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        parser.error(
            f"--summary must be a summary of rows, such as {RESULTS / rows.SUMMARY}, found {reason(error)} "
            f"({args.summary}): name another file, or write it with --refresh"
        )
    needs.folder(parser, "--out", args.out)
    for path in draw(summary, args.out):
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
