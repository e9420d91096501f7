"""Steps of the online softmax, shared by the sparse attention kernels. Scores are in base 2: softmax_scale * log2(e)."""

import triton
import triton.language as tl
from triton import knobs

INTERPRETED = tl.constexpr(bool(knobs.runtime.interpret))
"""Whether the kernels of this process run in Triton's interpreter, which has no inline assembly and no bf16 dot."""

MASKED = tl.constexpr(-1.0e30)
"""Score of an entry that is not valid, and the maximum of no entries: finite, so that MASKED - MASKED is 0, not NaN."""


@triton.jit
def dot(a, b, acc):
    """acc + a . b of bfloat16 tiles on the tensor cores, float32 accumulation."""
    if INTERPRETED:  # its dot multiplies the 16-bit patterns of bfloat16 as integers
        return acc + tl.dot(a.to(tl.float32), b.to(tl.float32))
    else:
        return tl.dot(a, b, acc)


@triton.jit
def step(s, valid, m, l):
    """Take one tile of base-2 scores s [M, N] with ``valid`` [N] into the running maximum m and sum l, both [M].

    Returns p = 2^(s - m') in bfloat16 (0 where not valid), the factor 2^(m - m') of what was summed so far, m', l'.
    """
    # M[h] = max_n s[h, n]
    s = tl.where(valid[None, :], s, MASKED)
    largest = tl.maximum(m, tl.max(s, 1))
    shrink = tl.exp2(m - largest)
    # p[h, n] = exp(s[h, n] - M[h]); a NaN score stays NaN here whatever the maximum made of it
    p = tl.where(valid[None, :], tl.exp2(s - largest[:, None]), 0.0)
    return p.to(tl.bfloat16), shrink, largest, l * shrink + tl.sum(p, 1)


@triton.jit
def finish(m, l, sink):
    """Factor that turns the sum of p * row into the output, [M]; ``sink`` [M] in natural units, -inf for none."""
    # M[h] = max(M[h], attn_sink[h]); denominator sum_n p[h, n] + exp(attn_sink[h] - M[h])
    sink = sink * 1.4426950408889634  # log2(e)
    largest = tl.maximum(m, sink)
    weight = tl.exp2(m - largest)
    # without a valid row the output is 0 (and l 0: no row's p is, the largest is 1)
    return tl.where(l == 0.0, 0.0, weight / (l * weight + tl.exp2(sink - largest)))
