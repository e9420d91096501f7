"""Launch configurations. Every number names the measurement that chose it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deepinfer_sm80.ops.variants import Variant

if TYPE_CHECKING:
    from collections.abc import Iterator

HEADS, DIM = 32, 128
KEYS = 128
PROGRAMS = 108 * 8
"""Programs wanted over all rows: eight for every SM of an A100. Fewer than that only when there are fewer tiles."""

_STAGES = 1

LOGITS = Variant(
    op="indexer_logits_paged",
    name="logits",
    kernel="deepinfer_sm80.ops.indexer.indexer_logits_paged.device:logits_paged_kernel",
    arguments={
        "codes_ptr": "*u8",
        "weights_ptr": "*fp32",
        "cache_ptr": "*u8",
        "lens_ptr": "*i32",
        "table_ptr": "*i32",
        "out_ptr": "*fp32",
        "page16": "i32",
        "lens_step": "i32",
        "table_row": "i32",
        "blocks": "i32",
        "block_size": "i32",
        "columns": "i32",
        "width": "i32",
    },
    constants={"HEADS": HEADS, "DIM": DIM, "KEYS": KEYS, "STAGES": _STAGES},
    num_warps=4,
    num_stages=_STAGES,
    unaligned=("lens_ptr", "table_ptr", "weights_ptr"),
)


def variants() -> Iterator[Variant]:
    """Everything the launcher launches."""
    yield LOGITS


def programs_per_row(rows: int, width: int) -> int:
    """Programs that share one row's columns. From shapes alone, so a captured graph keeps its grid."""
    return max(1, min(-(-width // KEYS), -(-PROGRAMS // rows)))
