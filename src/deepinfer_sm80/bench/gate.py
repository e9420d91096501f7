"""No row without agreement: what was timed is compared with the reference, on the tensors that were timed.

Whole rows of a result are compared, some of them where the reference, a loop in Python, would take minutes for all;
``whole`` then holds every element to a second implementation, our PyTorch form.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from deepinfer_sm80 import ops
from deepinfer_sm80.testing.agreement import as_tuple
from deepinfer_sm80.testing.cloning import clone_arguments
from deepinfer_sm80.testing.compare import assert_agrees

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from deepinfer_sm80.ops.contract import Tolerance

PER_TOKEN = {
    "mhc_post": ("x", "residual", "post_mix", "comb"),
    "mhc_fused_post_pre_delayed": ("x", "residual", "post_mix", "comb", "pre_mix"),
    "indexer_q_rope_quant": ("positions", "q", "weights"),
    "indexer_topk": ("logits", "row_lens"),
    "global_topk_indices": ("topk_indices", "token_to_req_indices", "is_valid_token"),
    "sparse_mla_decode": ("q", "swa_indices", "swa_lens", "extra_indices", "extra_lens"),
    "sparse_mla_prefill": ("q", "indices", "lens"),
    "engram_lookup": ("ids",),
    "indexer_logits_prefill": ("q_codes", "weights", "row_start", "row_end"),
    "indexer_logits_paged": ("q_codes", "weights", "context_lens", "block_table"),
    "select_candidate_blocks": ("logits", "row_lens"),
    "inverse_rope_grouped": ("o", "positions"),
    "grouped_output_projection": ("x",),
}
"""Arguments with one row for each row of the results, of operators whose rows do not depend on each other."""

TOKENS = 8
"""Rows of a result that the reference computes: the first, the last and some between."""

GATHER = "dequantize_and_gather_k_cache"
_GATHERED = 64  # rows of each of three stretches of a request


@dataclass(frozen=True, slots=True)
class Part:
    """Arguments for the reference, and how to take what it computes out of a whole result."""

    arguments: dict[str, Any]
    select: Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Expected:
    """What a call must give: by the reference for parts of it, and every result by another implementation."""

    parts: list[tuple[Callable[[torch.Tensor], torch.Tensor], dict[str, torch.Tensor]]]
    whole: dict[str, torch.Tensor]


def expected(op: str, pristine: Mapping[str, Any], whole: Mapping[str, torch.Tensor] | None = None) -> Expected:
    """``pristine``: the arguments before the first call. ``whole``: results of another implementation, by name."""
    checked = []
    for part in parts(op, pristine):
        arguments = {name: _on_cpu(value) for name, value in part.arguments.items()}
        checked.append((part.select, named_results(op, arguments, ops.spec(op).reference(**arguments))))
    return Expected(checked, dict(whole or {}))


def disagreement(op: str, want: Expected, used: Mapping[str, Any], result: Any) -> str:
    """What is wrong with ``result``, and with the arguments ``used`` where they are written in place; or nothing."""
    spec, actual = ops.spec(op), named_results(op, used, result)
    on_cuda = any(t.is_cuda for t in actual.values())

    def bound(name: str) -> Tolerance:
        return spec.tolerance_of(name) if on_cuda else spec.tolerance_of(name).interpreted()

    try:
        for select, values in want.parts:
            for name, value in values.items():
                assert_agrees(f"{op}.{name}", select(actual[name]).cpu(), value, bound(name))
        for name, value in want.whole.items():
            assert_agrees(f"{op}.{name} beside PyTorch", actual[name], value, bound(name))
    except AssertionError as error:
        return str(error)
    return ""


def named_results(op: str, arguments: Mapping[str, Any], result: Any) -> dict[str, torch.Tensor]:
    """What ``op`` returned and what it wrote in place, by name."""
    spec = ops.spec(op)
    returned = dict(zip(spec.outputs, as_tuple(result), strict=True))
    return returned | {name: arguments[name] for name in spec.mutates}


def parts(op: str, kwargs: Mapping[str, Any]) -> Iterator[Part]:
    """The parts of a call that the reference checks."""
    if op == GATHER:
        yield from _gather_parts(kwargs)
    elif op in PER_TOKEN:
        tokens = kwargs[PER_TOKEN[op][0]].shape[0]
        chosen = torch.linspace(0, tokens - 1, min(TOKENS, tokens)).round().long().unique()
        arguments = {
            name: value[chosen.to(value.device)] if name in PER_TOKEN[op] and value is not None else value
            for name, value in kwargs.items()
        }
        yield Part(arguments, lambda t: t[chosen.to(t.device)])
    else:
        yield Part(clone_arguments(kwargs), lambda t: t)


def _gather_parts(kwargs: Mapping[str, Any]) -> Iterator[Part]:
    """Stretches at the beginning, in the middle and at the end of every request."""
    seq_lens = kwargs["seq_lens"].tolist()
    lengths = seq_lens if kwargs["gather_lens"] is None else kwargs["gather_lens"].tolist()
    for r, (seq_len, n) in enumerate(zip(seq_lens, lengths, strict=True)):
        for first in sorted({0, max(n - _GATHERED, 0) // 2, max(n - _GATHERED, 0)}):
            rows = min(_GATHERED, n - first)
            begin = kwargs["offset"] + first
            stretch = slice(begin, begin + rows)

            def select(t: torch.Tensor, r: int = r, stretch: slice = stretch) -> torch.Tensor:
                return t[r : r + 1, stretch]

            end = torch.tensor([seq_len - n + first + rows], dtype=torch.int32)
            yield Part(
                {
                    **kwargs,
                    "out": torch.zeros_like(kwargs["out"][:1, stretch]),
                    "seq_lens": end,
                    "gather_lens": torch.tensor([rows], dtype=torch.int32),
                    "block_table": kwargs["block_table"][r : r + 1],
                    "offset": 0,
                },
                select,
            )


def _on_cpu(value: Any) -> Any:
    """A tensor over a copy of the whole storage on the CPU, so that page strides stay."""
    if not isinstance(value, torch.Tensor):
        return value
    copy = torch.empty(0, dtype=value.dtype)
    storage = value.untyped_storage()
    held = storage.cpu() if value.is_cuda else storage.clone()
    return copy.set_(held, value.storage_offset(), value.size(), value.stride())
