"""Launch configuration of inverse_rope_grouped, frozen."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deepinfer_sm80.ops.variants import Variant

if TYPE_CHECKING:
    from collections.abc import Iterator

UNIT = 8  # elements: tokens 16 bytes apart, or a multiple

# No measurement on an Ampere GPU has chosen these yet: 8 KB of reads in flight a CTA, 8 heads the least a rank has.
UNROTATE = Variant(
    "inverse_rope_grouped",
    "heads8",
    f"{__package__}.device:unrotate_kernel",
    {
        "o_ptr": "*bf16",
        "positions_ptr": "*i64",
        "table_ptr": "*fp32",
        "out_ptr": "*bf16",
        "heads": "i32",
        "token_units": "i64",
        "table_rows": "i64",
        "table_stride": "i64",
    },
    {"NOPE": 448, "ROPE": 64, "UNIT": UNIT, "HEADS": 8},
    num_warps=4,
    num_stages=1,
    unaligned=("positions_ptr", "table_ptr"),
)


def variants() -> Iterator[Variant]:
    yield UNROTATE
