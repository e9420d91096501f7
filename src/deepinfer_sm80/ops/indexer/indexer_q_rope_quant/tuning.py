"""Launch configurations. Every number names the measurement that chose it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deepinfer_sm80.ops.variants import Variant

if TYPE_CHECKING:
    from collections.abc import Iterator

HEADS, DIM, ROPE = 32, 128, 64

_ARGUMENTS = {
    "positions_ptr": "*i64",
    "q_ptr": "*bf16",
    "table_ptr": "*fp32",
    "weights_ptr": "*bf16",
    "codes_ptr": "*u8",
    "folded_ptr": "*fp32",
    "position_step": "i32",
    "q_row": "i32",
    "q_head": "i32",
    "w_row": "i32",
    "table_rows": "i32",
    "softmax_scale": "fp32",
    "head_scale": "fp32",
}

# A token is 4,096 elements: 32 a thread with four warps. Not measured on a GPU.
_NUM_WARPS = 4


def variant(unit: int) -> Variant:
    """``unit``: elements that the query's strides are multiples of: 8 (16-byte loads) or 1."""
    return Variant(
        op="indexer_q_rope_quant",
        name=f"unit{unit}",
        kernel=f"{__package__}.device:q_rope_quant_{'' if unit == 8 else 'unaligned_'}kernel",
        arguments=_ARGUMENTS,
        constants={"HEADS": HEADS, "DIM": DIM, "ROPE": ROPE, "UNIT": unit},
        num_warps=_NUM_WARPS,
        num_stages=1,
        unaligned=("positions_ptr", "weights_ptr") + (() if unit == 8 else ("q_ptr",)),
    )


def variants() -> Iterator[Variant]:
    """Everything the launcher launches."""
    yield variant(8)
    yield variant(1)
