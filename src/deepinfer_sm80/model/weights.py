"""Random weights that make a well-conditioned DeepSeek-V4.1: leaving out any part lowers the mean log-probability of
a text by 0.1 or more, while two correct implementations agree to 0.01 per token.

Most weights are gaussians; only their gain is chosen, as (standard deviation of the output for an input of unit RMS).
With fan-in K that is a standard deviation of gain / sqrt(K). Gaussians alone are chaotic: rounding noise turns into
other experts and other rows, and log-probabilities differ by 0.16 on average (1,100 tokens, ``tiny``). What is not
gaussian is in ``weight_structure``. The gains that are not 1, and why:

    head               LOGITS: greedy tokens differ, and rounding moves a log-probability by 0.012 times LOGITS
    attn.wq_b          QUERY, ROPE_QUERY: scores with these deviations (the rotated dims count a third) give a softmax
                       that is neither flat nor a choice of one row
    attn_sink          near the log-sum-exp of such a row of scores
    attn.wo_a          ATTENTION: attention adds a quarter of the streams' RMS per layer: a sublayer must not drown the
                       others, or its rounding noise is the model's
    w1, w3             EXPERT, routed and shared: gate and up pass the clamp at 10 in a tenth of the values
    w2                 SUBLAYER: see ATTENTION
    engram.wkv         ENGRAM: likewise
    gate.bias          BIAS: wider than the scores of neighbouring experts are apart
    compressor.wgate   WGATE: pooling of two tokens that is far from their average
    hc_*_base          mixtures close enough to permutations that the four streams stay different

Generators are seeded by (seed, tensor name) alone; structures shared by several tensors have names of their own. A
tensor does not depend on what else is written.
"""

from __future__ import annotations

import dataclasses
import fnmatch
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import TYPE_CHECKING

import torch

from deepinfer_sm80.errors import CheckpointError
from deepinfer_sm80.model import weight_structure
from deepinfer_sm80.model.weight_structure import ATTENTION, BIAS, ROPE_QUERY, TOPIC, generator_of
from deepinfer_sm80.ops.formats import fp8_block, mxfp4

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator
    from concurrent.futures import Future

    from deepinfer_sm80.model.config import ModelConfig
    from deepinfer_sm80.model.schema import Tensors

LOGITS = 0.25
SINK_MEAN, SINK_STD = 4.2, 1.0
EXPERT = 6.0
SUBLAYER = 0.18
ENGRAM = 0.35
WGATE = 4.0
INDEX_WEIGHTS = 0.5

# RMS of clamped silu(g) * u for g and u of standard deviation EXPERT, see tests/model/test_weights.py.
ACTIVATION_RMS = 21.3

_STRIPE = 1 << 18  # gaussians in flight in a thread: a stripe of 1 MB stays in the cache of a core
_TABLE_LARGEST_CODE = 0x3F  # E4M3 codes 0x00..0x3F: magnitudes 0 .. 1.875, no NaN


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Gaussians ``mean + std * randn``; with ``per_fan_in`` std is a gain and divided by sqrt(last dimension)."""

    std: float
    mean: float = 0.0
    per_fan_in: bool = False


def _gain(gain: float) -> Recipe:
    return Recipe(gain, per_fan_in=True)


# First match wins. Patterns are shell patterns on the tensor name.
RECIPES: tuple[tuple[str, Recipe], ...] = (
    ("*norm.weight", Recipe(0.1, mean=1.0)),
    ("embed.weight", Recipe((1 - TOPIC**2) ** 0.5)),
    ("head.weight", _gain(LOGITS)),
    ("*.markov_head.embed.weight", Recipe(1.0)),
    ("*.attn_sink", Recipe(SINK_STD, mean=SINK_MEAN)),
    ("*.attn.wq_b.weight", _gain(ROPE_QUERY)),
    ("*.attn.wo_a.weight", _gain(ATTENTION)),
    ("*.compressor.wgate.weight", _gain(WGATE)),
    ("*.gate.bias", Recipe(BIAS)),
    ("*.gate.bias_vl", Recipe(BIAS)),
    ("*.gate.weight", Recipe(0.0)),
    ("*.w[13].weight", _gain(EXPERT)),
    ("*.w2.weight", _gain(SUBLAYER / ACTIVATION_RMS)),
    ("*.engram.[qk]_weight", Recipe(0.3, mean=1.0)),
    ("*.engram.wkv.weight", _gain(ENGRAM)),
    ("*.indexer.weights_proj.weight", _gain(INDEX_WEIGHTS)),
    ("*.hc_*_scale", Recipe(0.1, mean=1.0)),
    ("*.hc_*_base", Recipe(2.0)),
    ("*.weight", _gain(1.0)),
    ("*.hc_*_fn", _gain(1.0)),
)


def recipe(name: str) -> Recipe:
    """The recipe of a tensor by its released name. Raises CheckpointError for a name without one."""
    for pattern, found in RECIPES:
        if fnmatch.fnmatchcase(name, pattern):
            return found
    raise CheckpointError(path="weights", problem=f"no recipe for {name}", remedy="Add one to model/weights.py")


def random_tensors(config: ModelConfig, tensors: Tensors, seed: int) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor on the CPU) for every entry of ``tensors``, in its order.

    BF16 as bfloat16, F32 as float32, everything else as uint8 codes of the shape in ``tensors``. A ``.scale`` must
    directly follow its ``.weight``. The same ``seed`` gives the same bits with the same PyTorch build.
    """
    for group in _groups(tensors):
        yield from _made(config, group, seed)


def random_tensors_ahead(
    config: ModelConfig, tensors: Tensors, seed: int, threads: int
) -> Generator[tuple[str, torch.Tensor]]:
    """``random_tensors`` with ``threads`` weights in the making while the caller has another: the same bits.

    Until it is exhausted or closed, PyTorch computes with one thread per operation. Threads that share an operation
    wait for each other at its end: ``tiny`` took 14 s with one, and 120 s with two on two cores that others used too.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(threads) as pool:
            groups = iter(_groups(tensors))
            coming: deque[Future[list[tuple[str, torch.Tensor]]]] = deque()
            while True:
                coming.extend(pool.submit(_made, config, g, seed) for g in islice(groups, threads + 1 - len(coming)))
                if not coming:
                    return
                yield from coming.popleft().result()
    finally:
        torch.set_num_threads(before)


def _groups(tensors: Tensors) -> list[Tensors]:
    """Every weight with its scale, if it has one."""
    groups: list[Tensors] = []
    for name, entry in tensors.items():
        if name.endswith(".scale"):
            groups[-1][name] = entry
        else:
            groups.append({name: entry})
    return groups


def _made(config: ModelConfig, group: Tensors, seed: int) -> list[tuple[str, torch.Tensor]]:
    name, (dtype, shape) = next(iter(group.items()))
    made: tuple[torch.Tensor, ...]
    if name.endswith("engram.embed.weight"):
        made = _table(shape, generator_of(seed, name))
    elif dtype in ("F8_E4M3", "I8"):
        columns = shape[1] * (2 if dtype == "I8" else 1)
        encode = mxfp4.encode if dtype == "I8" else fp8_block.encode
        pairs = [encode(stripe) for stripe in _stripes(config, name, (shape[0], columns), seed)]
        made = tuple(torch.cat(parts) for parts in zip(*pairs, strict=True))
    else:
        target = torch.bfloat16 if dtype == "BF16" else torch.float32
        made = (torch.cat([stripe.to(target) for stripe in _stripes(config, name, shape, seed)]),)
    return list(zip(group, made, strict=True))


def _stripes(config: ModelConfig, name: str, shape: tuple[int, ...], seed: int) -> Iterator[torch.Tensor]:
    """float32 values of ``shape`` in stripes of whole 32-row blocks."""
    chosen, generator = recipe(name), generator_of(seed, name)
    structure = weight_structure.structure_of(config, name, shape, seed)
    std = chosen.std / shape[-1] ** 0.5 if chosen.per_fan_in else chosen.std
    rows = max(_STRIPE // shape[-1] // 32, 1) * 32 if len(shape) > 1 else shape[0]
    for start in range(0, shape[0], rows):
        end = min(start + rows, shape[0])
        stripe = torch.randn(end - start, *shape[1:], generator=generator).mul_(std).add_(chosen.mean)
        yield stripe if structure is None else structure.apply(stripe, start, end)


def _table(shape: tuple[int, ...], generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Engram rows straight as codes: signs and magnitudes uniform over the codes up to 1.875, scales 1/2 to 4."""
    codes = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    codes &= 0x80 | _TABLE_LARGEST_CODE
    scale = torch.randint(126, 130, (shape[0], shape[1] // 32), dtype=torch.uint8, generator=generator)
    return codes, scale
