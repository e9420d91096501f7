"""Launch configurations. Every number names the measurement that chose it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deepinfer_sm80.ops.indexer.tournament import LARGE, SMALL, WARPS
from deepinfer_sm80.ops.variants import Variant

if TYPE_CHECKING:
    from collections.abc import Iterator

BLOCKS = 256
"""Blocks of one program. Not measured on a GPU."""
_COLUMNS = 8
"""Columns of a block read at a time: all of the model's eight, which are one 32-byte sector."""

_OP = "select_candidate_blocks"
_MODULE = "deepinfer_sm80.ops.indexer.select_candidate_blocks.device"

KEYS = Variant(
    op=_OP,
    name="keys",
    kernel=f"{_MODULE}:block_keys_kernel",
    arguments={
        "logits_ptr": "*fp32",
        "lens_ptr": "*i32",
        "keys_ptr": "*i32",
        "first_row": "i32",
        "logits_row": "i32",
        "lens_step": "i32",
        "width": "i32",
        "blocks": "i32",
        "block_size": "i32",
    },
    constants={"BLOCKS": BLOCKS, "COLUMNS": _COLUMNS},
    num_warps=4,
    num_stages=1,
    unaligned=("logits_ptr", "lens_ptr"),
)


def first_round(chunk: int, last: bool) -> Variant:
    """The tournament's first round over block keys; further ones are indexer_topk's."""
    return Variant(
        op=_OP,
        name=f"first-{chunk}{'-last' if last else ''}",
        kernel=f"{_MODULE}:first_round_kernel",
        arguments={
            "in_keys_ptr": "*i32",
            "out_ptr": "*i32",
            "keys_ptr": "*i32",
            "columns_ptr": "*i32",
            "first_row": "i32",
            "width": "i32",
            "topk": "i32",
            "out_row": "i32",
            "out_step": "i32",
        },
        constants={"CHUNK": chunk, "LAST": last},
        num_warps=WARPS[chunk],
        num_stages=1,
        unaligned=("out_ptr",),
    )


def variants() -> Iterator[Variant]:
    """Everything the launcher launches, but for the variants of indexer_topk."""
    yield KEYS
    for chunk, last in ((SMALL, True), (LARGE, True), (LARGE, False)):
        yield first_round(chunk, last)
