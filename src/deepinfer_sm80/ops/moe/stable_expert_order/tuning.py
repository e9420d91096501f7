"""Launch configuration of stable_expert_order, frozen."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deepinfer_sm80.ops.variants import Variant

if TYPE_CHECKING:
    from collections.abc import Iterator

# No measurement on an Ampere GPU has chosen these yet. Rows times rows of a segment are compared: 16 rows serve block
# sizes 16, 32, 48 and 64 whole, and 8 half.
ORDER = Variant(
    "stable_expert_order",
    "rows16",
    f"{__package__}.device:order_kernel",
    {
        **dict.fromkeys(("ids_ptr", "experts_ptr", "used_ptr", "out_ptr"), "*i32"),
        **dict.fromkeys(("length", "num_blocks", "block_size", "num_routes"), "i32"),
    },
    {"BLOCKS": 512, "ROWS": 16, "OTHERS": 128},
    num_warps=4,
    num_stages=1,
    unaligned=("ids_ptr", "experts_ptr", "used_ptr"),
)


def variants() -> Iterator[Variant]:
    yield ORDER
