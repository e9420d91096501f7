"""The two arms of the proof against each other: the plugin and vLLM's own path on the same GPU."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pathlib


def compare(model: pathlib.Path, out: pathlib.Path) -> dict[str, Any]:
    """The two arms' prompt log-probabilities, token by token, and what the outliers chose differently."""
    import torch

    arms = [torch.load(out / f"logprobs-{arm}.pt") for arm in ("plugin", "stock")]
    differences: list[float] = []
    flipped_rows: list[bool] = []
    largest: list[dict[str, Any]] = []
    for number, (ours, theirs) in enumerate(zip(*arms, strict=True)):
        gap = (ours["logprobs"] - theirs["logprobs"]).abs()
        rows = gap.numel()
        experts = {k: (ours["experts"][k] != theirs["experts"][k]).any(-1)[:rows] for k in theirs["experts"]}
        topk = {k: (ours["topk"][k] != theirs["topk"][k]).any(-1)[:rows] for k in theirs["topk"]}
        any_flip = torch.stack([*experts.values(), *topk.values()]).any(0)
        differences += gap.tolist()
        flipped_rows += any_flip.tolist()
        for row in gap.topk(min(3, rows)).indices.tolist():
            largest.append(
                {
                    "prompt": number,
                    "position": row,
                    "difference": round(gap[row].item(), 4),
                    "experts_flipped_in_layers": [k for k, v in experts.items() if v[row]],
                    "topk_flipped_in_layers": [k for k, v in topk.items() if v[row]],
                    "smallest_router_margin": min((m[row].item() for m in theirs["margins"].values()), default=None),
                }
            )
    ordered = sorted(differences)

    def quantile(q: float) -> float:
        return round(ordered[min(len(ordered) - 1, int(q * len(ordered)))], 5)

    same = [d for d, flip in zip(differences, flipped_rows, strict=True) if not flip]
    mean = statistics.fmean(differences)
    largest.sort(key=lambda entry: -entry["difference"])
    facts = {
        "tokens": len(differences),
        "mean": round(mean, 5),
        "p50": quantile(0.5),
        "p90": quantile(0.9),
        "p99": quantile(0.99),
        "largest": round(ordered[-1], 4),
        "rows_with_a_flip": f"{sum(flipped_rows) / len(flipped_rows):.1%}",
        "mean_without_flip": round(statistics.fmean(same), 5) if same else None,
    }
    return {"ok": mean <= 0.02, "facts": facts, "largest": largest[:12], "allowed_mean": 0.02}
