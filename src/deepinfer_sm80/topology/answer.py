"""The plan as JSON can hold it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from deepinfer_sm80.topology import measured, reckoning, roofline
from deepinfer_sm80.topology.explain import widths
from deepinfer_sm80.topology.tiles import tile

if TYPE_CHECKING:
    from collections.abc import Sequence

    from deepinfer_sm80.model.config import ModelConfig
    from deepinfer_sm80.topology.cluster import Cluster
    from deepinfer_sm80.topology.layout import Setting
    from deepinfer_sm80.topology.offers import Offer, Smallest
    from deepinfer_sm80.topology.search import Row


def as_json(
    rows: Sequence[Row], cluster: Cluster, setting: Setting, config: ModelConfig, offer: Offer | None
) -> dict[str, Any]:
    """The plan, best layout first. ``gib_per_rank``: one entry per rank of a replica; the key
    ``engram_host`` (or ``engram_disk``) is host memory, every other key GPU memory. ``expert_columns`` and
    ``tile_efficiency``: one entry per stage, padding included, and the share of it that the model has. ``servable``: it
    fits and vLLM has a command; ``cautions``: what in that never ran, or is left out.
    ``host_gib``: of RAM on the fullest host. ``prefill_tok_s``: the sum over replicas.
    ``best_servable``: the best such layout and its context, the one asked for or the longest that fits.
    ``estimates``: how ``prefill_tok_s`` and ``decode_ms`` were reckoned, and what was measured."""
    return {
        "cluster": {"gpus": cluster.label, "hosts": cluster.hosts, "link": cluster.link.name, "taken": cluster.taken},
        "context": setting.context,
        "streams": setting.streams,
        "speculation": setting.speculation,
        "gpu_memory_utilization": setting.utilisation,
        "best_servable": offer and {"context": offer.context, "layout": _row_json(offer.row, config)},
        "layouts": [_row_json(row, config) for row in rows],
        "estimates": {
            "formulas": list(roofline.FORMULAS),
            "inputs": reckoning.inputs(cluster),
            "prompt": min(roofline.PROMPT, setting.context),
            "measured": measured.as_json(cluster.gpu),
        },
    }


def _row_json(row: Row, config: ModelConfig) -> dict[str, Any]:
    layout, kept, speed = row.layout, row.memory, row.estimate
    held = [tile(width, config.hidden_size) for width in widths(row, config)]
    per_rank = []
    for parts, tables, tp in zip(kept.gib, kept.tables, layout.tp_per_stage, strict=True):
        entry = {name: round(size, 3) for name, size in parts.items()}
        if tables and row.engram != "gpu":
            entry[f"engram_{row.engram}"] = round(tables, 3)
        per_rank += [entry] * tp
    return {
        "tp": layout.tp,
        "pp": layout.pp,
        "dp": layout.dp,
        "ep": layout.ep,
        "split": list(layout.split),
        "tp_per_stage": list(layout.tp_per_stage),
        "legal_stock": row.legal,
        "fits": row.fits,
        "servable": row.servable,
        "cautions": list(row.cautions),
        "why": row.why,
        "kv_tokens": kept.tokens,
        "contexts": round(row.contexts, 3),
        "gib_per_rank": per_rank,
        "host_gib": {"engram_tables": round(row.host_gib[0], 3), "processes": round(row.host_gib[1], 3)},
        "prefill_tok_s": round(speed.prefill, 1),
        "prefill_one_prompt_tok_s": round(speed.prefill / layout.dp, 1),
        "prefill_replay_off_tok_s": round(speed.replay_off, 1),
        "decode_ms": round(speed.decode_ms, 3),
        "read_gib": round(speed.read, 3),
        "decoder_replay": row.replay,
        "expert_columns": [t.padded for t in held],
        "tile_efficiency": [round(t.useful, 3) for t in held],
        "command": row.command,
        "command_with_replicas": row.with_replicas,
    }


def smallest_json(found: Sequence[Smallest]) -> list[dict[str, Any]]:
    """The smallest sets, those that there are."""
    return [
        {
            "gpus": entry.cluster.label,
            "hosts": entry.cluster.hosts,
            "tp": entry.layout.tp,
            "pp": entry.layout.pp,
            "dp": entry.layout.dp,
            "ep": entry.layout.ep,
            "split": list(entry.layout.split),
            "tp_per_stage": list(entry.layout.tp_per_stage),
            "source_replicas": entry.replicas,
            "servable": entry.servable,
        }
        for entry in found
        if entry.layout
    ]
