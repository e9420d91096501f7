"""Launch configurations of sparse_mla_decode, frozen. No measurement on an Ampere GPU has chosen them yet."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deepinfer_sm80.ops.variants import Variant

if TYPE_CHECKING:
    from collections.abc import Iterator

_OP = "sparse_mla_decode"
_STRIDES = ("stride", "block_size", "rows", "width", "list_stride")
_ARGUMENTS = {
    "q_ptr": "*bf16",
    "swa_ptr": "*u8",
    "swa_slots_ptr": "*i32",
    "swa_lens_ptr": "*i32",
    "extra_ptr": "*u8",
    "extra_slots_ptr": "*i32",
    "extra_lens_ptr": "*i32",
    "sink_ptr": "*fp32",
    "out_ptr": "*bf16",
    "partial_ptr": "*fp32",
    "state_ptr": "*fp32",
    "heads": "i32",
    "q_stride": "i32",
    "out_stride": "i32",
    **{f"swa_{name}": "i32" for name in _STRIDES},
    **{f"extra_{name}": "i32" for name in _STRIDES},
    "scale_log2": "fp32",
    "splits": "i32",
}
_MERGE_ARGUMENTS = {
    "partial_ptr": "*fp32",
    "state_ptr": "*fp32",
    "sink_ptr": "*fp32",
    "out_ptr": "*bf16",
    "heads": "i32",
    "out_stride": "i32",
    "splits": "i32",
}
