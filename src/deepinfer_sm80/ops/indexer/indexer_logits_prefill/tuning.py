"""Launch configurations. Every number names the measurement that chose it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from deepinfer_sm80.ops.variants import Variant

if TYPE_CHECKING:
    from collections.abc import Iterator

HEADS, DIM = 32, 128
KEYS = 128
"""Keys of a tile; with four warps each holds 32."""
TOKENS = 64
"""Queries that one decoded key tile serves: its decoding is then a few per cent of the work. Even: see QUERIES."""
DECODE_BLOCK = 4096

_OP = "indexer_logits_prefill"
_MODULE = "deepinfer_sm80.ops.indexer.indexer_logits_prefill.device"

DECODE = Variant(
    op=_OP,
    name="decode",
    kernel=f"{_MODULE}:query_values_kernel",
    arguments={"codes_ptr": "*u8", "out_ptr": "*bf16", "count": "i32"},
    constants={"BLOCK": DECODE_BLOCK},
    num_warps=4,
    num_stages=1,
)


@dataclass(frozen=True, slots=True)
class Config:
    """``queries`` scored at a time, ``stages`` of the loop over them."""

    queries: int
    stages: int

    @classmethod
    def for_capability(cls, capability: tuple[int, int] | None) -> Config:
        """From offline compiles, not measured on a GPU.

        Per tile and query the tensor cores of 8.0 work 512 clocks; shared memory 512 with one query at a time (keys
        and query are read again each time), 384 with two: three CTAs an SM either way. In 8.6 the tensor cores take at
        least twice as long, and two CTAs fit an SM only with the smaller tile.
        """
        return cls(queries=1, stages=3) if capability == (8, 6) else cls(queries=2, stages=2)


def logits(config: Config) -> Variant:
    return Variant(
        op=_OP,
        name=f"logits-q{config.queries}",
        kernel=f"{_MODULE}:logits_prefill_kernel",
        arguments={
            "query_ptr": "*bf16",
            "weights_ptr": "*fp32",
            "codes_ptr": "*u8",
            "scale_ptr": "*fp32",
            "start_ptr": "*i32",
            "end_ptr": "*i32",
            "out_ptr": "*fp32",
            "start_step": "i32",
            "end_step": "i32",
            "tokens": "i32",
            "keys": "i32",
            "max_k": "i32",
        },
        constants={
            "HEADS": HEADS,
            "DIM": DIM,
            "KEYS": KEYS,
            "TOKENS": TOKENS,
            "QUERIES": config.queries,
            "STAGES": config.stages,
        },
        num_warps=4,
        num_stages=config.stages,
        unaligned=("scale_ptr", "start_ptr", "end_ptr"),
    )


def variants() -> Iterator[Variant]:
    """Everything the launcher launches."""
    yield DECODE
    for capability in ((8, 0), (8, 6)):
        yield logits(Config.for_capability(capability))
