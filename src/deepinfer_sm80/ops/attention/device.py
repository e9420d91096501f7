"""Steps of the online softmax, shared by the sparse attention kernels. Scores are in base 2: times log2(e)."""

import triton
import triton.language as tl
from triton import knobs

INTERPRETED = tl.constexpr(bool(knobs.runtime.interpret))
"""Whether kernels run in Triton's interpreter: without inline assembly, a bf16 dot or (3.6) rounding to bfloat16."""

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
def to_bf16(x):
    """float32 -> bfloat16, half to even, in the interpreter too."""
    if INTERPRETED:
        bits = x.to(tl.int32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return tl.where(x == x, rounded, 0x7FC0).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(tl.bfloat16)


@triton.jit
def step(s, valid, m, total, SUM_FIRST: tl.constexpr = True):
    """Take one tile of base-2 scores s [M, N] with ``valid`` [N] into the running maximum m and sum of p, both [M].

    Returns p = 2^(s - m') in bfloat16 (0 where not valid), the factor 2^(m - m') of what was summed so far, m', and
    the new sum. SUM_FIRST: p is summed before it is rounded and not after, which moves registers and shared memory
    about and no result.
    """
    # M[h] = max_n s[h, n]
    s = tl.where(valid[None, :], s, MASKED)
    largest = tl.maximum(m, tl.max(s, 1))
    shrink = tl.exp2(m - largest)
    # p[h, n] = exp(s[h, n] - M[h]); a NaN score stays NaN here whatever the maximum made of it
    p = tl.where(valid[None, :], tl.exp2(s - largest[:, None]), 0.0)
    if SUM_FIRST:
        total = total * shrink + tl.sum(p, 1)
        rounded = to_bf16(p)
    else:
        rounded = to_bf16(p)
        total = total * shrink + tl.sum(p, 1)
    return rounded, shrink, largest, total


@triton.jit
def finish(m, total, sink):
    """Factor that turns the sum of p * row into the output; ``sink`` in natural units, -inf for none."""
    # M[h] = max(M[h], attn_sink[h]); denominator sum_n p[h, n] + exp(attn_sink[h] - M[h])
    sink = sink * 1.4426950408889634  # log2(e)
    largest = tl.maximum(m, sink)
    weight = tl.exp2(m - largest)
    # Without a valid row the output is 0. Only then is the sum 0: the largest p of any row is 1.
    some = total != 0.0
    return tl.where(some, weight / tl.where(some, total * weight + tl.exp2(sink - largest), 1.0), 0.0)
