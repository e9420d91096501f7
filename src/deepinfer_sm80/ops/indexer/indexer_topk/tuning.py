"""Launch configurations. Every number names the measurement that chose it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deepinfer_sm80.ops.indexer.tournament import LARGE, SMALL, WARPS
from deepinfer_sm80.ops.variants import Variant

if TYPE_CHECKING:
    from collections.abc import Iterator

ORDER_BLOCK, _ORDER_OTHERS = 256, 16

_OP = "indexer_topk"
_MODULE = "deepinfer_sm80.ops.indexer.indexer_topk.device"
_ROW = {"first_row": "i32", "logits_row": "i32", "lens_step": "i32"}
_SIZES = {"width": "i32", "topk": "i32", "out_row": "i32", "out_step": "i32"}
_RESULTS = {"out_ptr": "*i32", "keys_ptr": "*i32", "columns_ptr": "*i32"}

ORDER_CANDIDATES = Variant(
    op=_OP,
    name="order-candidates",
    kernel=f"{_MODULE}:order_candidates_kernel",
    arguments={"list_ptr": "*i32", "out_ptr": "*i32", "list_row": "i32", "entries": "i32", "blocks": "i32"},
    constants={"BLOCK": ORDER_BLOCK, "OTHERS": _ORDER_OTHERS},
    num_warps=4,
    num_stages=1,
    unaligned=("list_ptr",),
)


def first_round(chunk: int, last: bool) -> Variant:
    return Variant(
        op=_OP,
        name=f"first-{chunk}{'-last' if last else ''}",
        kernel=f"{_MODULE}:first_round_kernel",
        arguments={"logits_ptr": "*fp32", "lens_ptr": "*i32", **_RESULTS, **_ROW, **_SIZES},
        constants={"CHUNK": chunk, "LAST": last},
        num_warps=WARPS[chunk],
        num_stages=1,
        unaligned=("logits_ptr", "lens_ptr", "out_ptr"),
    )


def candidates_round(chunk: int, last: bool) -> Variant:
    return Variant(
        op=_OP,
        name=f"candidates-{chunk}{'-last' if last else ''}",
        kernel=f"{_MODULE}:candidates_round_kernel",
        arguments={
            "logits_ptr": "*fp32",
            "lens_ptr": "*i32",
            "list_ptr": "*i32",
            **_RESULTS,
            **_ROW,
            **_SIZES,
            "entries": "i32",
            "block_size": "i32",
        },
        constants={"CHUNK": chunk, "LAST": last},
        num_warps=WARPS[chunk],
        num_stages=1,
        unaligned=("logits_ptr", "lens_ptr", "out_ptr"),
    )


def next_round(chunk: int, last: bool) -> Variant:
    return Variant(
        op=_OP,
        name=f"next-{chunk}{'-last' if last else ''}",
        kernel=f"{_MODULE}:next_round_kernel",
        arguments={
            "in_keys_ptr": "*i32",
            "in_columns_ptr": "*i32",
            **_RESULTS,
            "first_row": "i32",
            **_SIZES,
        },
        constants={"CHUNK": chunk, "LAST": last},
        num_warps=WARPS[chunk],
        num_stages=1,
        unaligned=("out_ptr",),
    )


def variants() -> Iterator[Variant]:
    """Everything the launcher launches."""
    yield ORDER_CANDIDATES
    for kind in (first_round, candidates_round, next_round):
        for chunk, last in ((SMALL, True), (LARGE, True), (LARGE, False)):
            yield kind(chunk, last)
