"""Triton launcher of sparse_mla_prefill. The maths is in reference.py beside this file."""

from __future__ import annotations

import math

import torch

from deepinfer_sm80.ops.attention.sparse_mla_prefill.tuning import MAX_TOKENS, choose
from deepinfer_sm80.ops.checks import Shapes
from deepinfer_sm80.ops.variants import run

_HEAD_DIM = 512


def sparse_mla_prefill(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    lens: torch.Tensor,
    attn_sink: torch.Tensor,
    softmax_scale: float,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """``out``: bfloat16 [T, H, 512], dim 0 may be strided, overwritten whole and returned.

    p is rounded to bfloat16 against the maximum so far, in base 2 with softmax_scale * log2(e) as one float32 factor.
    Raises TensorContractError, beside wrong shapes and dtypes, for a tensor that is not aligned to 16 bytes or a
    stride(0) of ``q`` or ``out`` that is no multiple of 8 elements.
    """
    s = Shapes("sparse_mla_prefill")
    s.check_view(q, "q", ("T", "H", _HEAD_DIM), torch.bfloat16, dense=2)
    s.check(kv, "kv", ("S", _HEAD_DIM), torch.bfloat16)
    s.check_view(indices, "indices", ("T", "K"), torch.int32)
    s.check(lens, "lens", ("T",), torch.int32)
    s.check(attn_sink, "attn_sink", ("H",), torch.float32)
    if out is None:
        out = torch.empty(q.shape, dtype=torch.bfloat16, device=q.device)
    else:
        s.check_view(out, "out", ("T", "H", _HEAD_DIM), torch.bfloat16, dense=2)

    tokens, heads = s["T"], s["H"]
    if tokens * heads == 0:
        return out
    q_stride, out_stride, list_stride = (x.stride(0) if tokens > 1 else 0 for x in (q, out, indices))
    s.require(q_stride % 8 == 0, "q", "strided along tokens by a multiple of 8 elements", q_stride)
    s.require(out_stride % 8 == 0, "out", "strided along tokens by a multiple of 8 elements", out_stride)
    variant = choose(heads)
    blocks = -(-heads // variant.constants["BLOCK_M"])
    for first in range(0, tokens, MAX_TOKENS):
        some = slice(first, min(first + MAX_TOKENS, tokens))
        run(
            variant,
            (blocks, some.stop - first),
            q[some],
            kv,
            indices[some],
            lens[some],
            attn_sink,
            out[some],
            heads,
            min(s["S"], 2**31 - 1),
            s["K"],
            q_stride // 8,
            list_stride,
            out_stride // 8,
            softmax_scale * math.log2(math.e),
        )
    return out
