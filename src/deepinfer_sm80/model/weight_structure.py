"""The part of the random weights that is not noise, as in trained weights: what keeps rounding from changing choices.

Topics. Every token belongs to one of TOPICS directions of the hidden state, which holds TOPIC of its embedding's RMS.
    A router scores each topic's experts on evenly spaced levels, shuffled per topic and layer; of ``draws`` shuffles
    the one is taken whose last chosen and first rejected expert, bias included, are furthest apart. So few tokens are
    near a tie: with gaussians 5 percent of a layer's tokens change an expert through rounding, here 0.01 percent.
    The head weights of an indexer are positive on every topic: a row's score means the same under all heads.
Code. The unrotated 448 dims of a key row carry CODE values, each spread over all dims; queries and wo_a read them back.
    The e4m3 rounding of a row then averages out: the attention output of layer 0 is off by 0.5 percent instead of 1.2.
Index. Index keys read that code. Where a layer chooses rows, its index queries and attention queries share a part, so
    that the rows at the edge of the choice, which rounding exchanges, carry little attention.
Head. The tokens of the frozen text are likely while the model is complete: see ``readout``.

All structures are functions of (seed, a name): tensors that share one draw it again.
"""

from __future__ import annotations

import re
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import pad, softplus

from deepinfer_sm80.model import prose, readout
from deepinfer_sm80.ops.kv_cache.layout import HEAD_DIM, INDEX_DIM, NOPE_DIM, ROPE_DIM

if TYPE_CHECKING:
    from collections.abc import Callable

    from deepinfer_sm80.model.config import ModelConfig

TOPICS, TOPIC = 8, 0.6
LEVELS = 8.0  # router scores of a token's topic run from -LEVELS to LEVELS before the square root of the softplus
BIAS = 1.0
CODE = 16
QUERY, ROPE_QUERY = 0.7, 0.7
ATTENTION = 1.1
QUERIES_ALIKE, INDEX_QUERIES_ALIKE = 0.8, 0.9  # correlation with the part that a layer's queries share
INDEX_ROPE_QUERY = 0.5

_STRENGTHS = (1.0, 0.75, 0.5)  # of a topic in the normed hidden state, from the first layers to the last
_INDEX_NOPE = INDEX_DIM - ROPE_DIM


def generator_of(seed: int, name: str) -> torch.Generator:
    """The generator of everything called ``name``."""
    return torch.Generator().manual_seed(zlib.crc32(f"{seed}:{name}".encode()))


@dataclass(frozen=True)
class Structure:
    """``gaussians * dense + added(start, end)`` for rows start .. end - 1.

    dense  float32 [N, 1] or [1, K]: which of the gaussians stay, and how large
    """

    added: Callable[[int, int], torch.Tensor]
    dense: torch.Tensor | None = None

    def apply(self, gaussians: torch.Tensor, start: int, end: int) -> torch.Tensor:
        """float32 [end - start, K] -> the rows of the weight."""
        if self.dense is not None:
            gaussians = gaussians * (self.dense[start:end] if len(self.dense) > 1 else self.dense)
        return gaussians + self.added(start, end)


def structure_of(config: ModelConfig, name: str, shape: tuple[int, ...], seed: int) -> Structure | None:
    """The structure of the tensor ``name`` of (dequantised) ``shape``; None for plain gaussians."""
    for pattern, build in _BUILDERS:
        if re.search(pattern, name):
            return build(config, name, shape, seed)
    return None


def topics(config: ModelConfig, seed: int) -> torch.Tensor:
    """float32 [TOPICS, hidden]: orthogonal directions of unit RMS."""
    hidden = config.hidden_size
    directions: torch.Tensor = _orthonormal(seed, "topics", hidden, TOPICS).T * hidden**0.5
    return directions


def code(seed: int) -> torch.Tensor:
    """float32 [512, CODE]: how a key row carries its code, in dims of unit variance for a code of unit variance."""
    return pad(_orthonormal(seed, "code", NOPE_DIM, CODE) * (NOPE_DIM / CODE) ** 0.5, (0, 0, 0, ROPE_DIM))


def _index_code(seed: int) -> torch.Tensor:
    """float32 [128, CODE], as ``code``; the rotated dims come last here too."""
    return pad(_orthonormal(seed, "index code", _INDEX_NOPE, CODE) * (_INDEX_NOPE / CODE) ** 0.5, (0, 0, 0, ROPE_DIM))


def _randn(seed: int, name: str, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=generator_of(seed, name))


def _orthonormal(seed: int, name: str, rows: int, columns: int) -> torch.Tensor:
    basis: torch.Tensor = torch.linalg.qr(_randn(seed, name, rows, columns).double()).Q
    return basis.float()


def _rotated(rows: int, width: int) -> torch.Tensor:
    """float32 [rows]: 1 for the rotated last 64 of every ``width`` dims, else 0."""
    return (torch.arange(rows) % width >= width - ROPE_DIM).float()


def _embedding(config: ModelConfig, name: str, shape: tuple[int, ...], seed: int) -> Structure:
    directions = topics(config, seed)
    topic = torch.randint(0, TOPICS, (shape[0],), generator=generator_of(seed, "topic of token"))
    return Structure(lambda start, end: TOPIC * directions[topic[start:end]])


def _router(config: ModelConfig, name: str, shape: tuple[int, ...], seed: int) -> Structure:
    bias = BIAS * _randn(seed, name.replace("weight", "bias"), shape[0])
    draft = name.startswith("mtp.")
    chosen = config.dspark_num_experts_per_tok if draft else config.num_experts_per_tok
    generator, even = generator_of(seed, f"{name}.levels"), torch.linspace(-LEVELS, LEVELS, shape[0])
    count = draws(shape[0])
    best = []
    for _ in range(TOPICS):
        drawn = torch.stack([even[torch.randperm(shape[0], generator=generator)] for _ in range(count)])
        best.append(drawn[_margins(drawn, bias, chosen).argmax()])
    rows = torch.stack(best, dim=1) @ topics(config, seed) / (TOPIC * config.hidden_size)
    return Structure(lambda start, end: rows[start:end])


def draws(experts: int) -> int:
    """Shuffles to choose among. The levels of 16 experts lie closer than those of 8: with 128 shuffles two of
    ``layer``'s routers come within 0.04 of a tie as a topic's strength falls; with 1,024 none nearer than 0.39."""
    return 16 if experts <= 8 else 1024


def _margins(levels: torch.Tensor, bias: torch.Tensor, chosen: int) -> torch.Tensor:
    """float32 [shuffles] of [shuffles, experts]: how far each one's last chosen and first rejected expert are apart,
    at the worst strength of the topic."""
    if chosen >= levels.shape[1]:
        return torch.zeros(len(levels))
    ranked = [(softplus(levels * s).sqrt() + bias).sort(-1, descending=True).values for s in _STRENGTHS]
    return torch.stack([r[:, chosen - 1] - r[:, chosen] for r in ranked]).amin(0)


def _index_weights(config: ModelConfig, name: str, shape: tuple[int, ...], seed: int) -> Structure:
    levels = 0.5 + torch.rand(shape[0], TOPICS, generator=generator_of(seed, f"{name}.levels"))
    rows = levels @ topics(config, seed) / (TOPIC * config.hidden_size)
    return Structure(lambda start, end: rows[start:end])


def _key_rows(config: ModelConfig, name: str, shape: tuple[int, ...], seed: int) -> Structure:
    written = code(seed) @ _randn(seed, f"{name}.read", CODE, shape[1]) / shape[1] ** 0.5
    return Structure(lambda start, end: written[start:end], _rotated(HEAD_DIM, HEAD_DIM)[:, None])


def _shared_queries(config: ModelConfig, name: str, width: int, seed: int) -> torch.Tensor:
    """float32 [CODE, width]: what index queries and queries have in common, one for each choice of rows."""
    found = re.match(r"layers\.(\d+)\.", name)
    layer = int(found.group(1)) if found else -1
    source = max((s for s in config.index_source_layer_ids if s <= layer), default=-1)
    return _randn(seed, f"common {source}", CODE, width)


def _queries(config: ModelConfig, name: str, shape: tuple[int, ...], seed: int) -> Structure:
    heads, width = shape[0] // HEAD_DIM, shape[1]
    own = _randn(seed, f"{name}.heads", heads, CODE, width) * (1 - QUERIES_ALIKE**2) ** 0.5
    asked = own + QUERIES_ALIKE * _shared_queries(config, name, width, seed)
    gain = QUERY * (HEAD_DIM * CODE / width) ** 0.5 / NOPE_DIM  # scores of deviation QUERY
    return _by_heads(code(seed), asked * gain, _rotated(shape[0], HEAD_DIM))


def _index_queries(config: ModelConfig, name: str, shape: tuple[int, ...], seed: int) -> Structure:
    heads, width = shape[0] // INDEX_DIM, shape[1]
    own = _randn(seed, f"{name}.heads", heads, CODE, width) * (1 - INDEX_QUERIES_ALIKE**2) ** 0.5
    asked = own + INDEX_QUERIES_ALIKE * _shared_queries(config, name, width, seed)
    return _by_heads(_index_code(seed), asked * width**-0.5, INDEX_ROPE_QUERY * _rotated(shape[0], INDEX_DIM))


def _by_heads(carrier: torch.Tensor, asked: torch.Tensor, dense: torch.Tensor) -> Structure:
    """carrier [D, CODE], asked [heads, CODE, K] -> rows head-major, built one head at a time."""
    size = len(carrier)

    def added(start: int, end: int) -> torch.Tensor:
        first, last = start // size, -(-end // size)
        rows = (carrier @ asked[first:last]).flatten(0, 1)
        return rows[start - first * size : end - first * size]

    return Structure(added, dense[:, None])


def _output(config: ModelConfig, name: str, shape: tuple[int, ...], seed: int) -> Structure:
    heads = shape[1] // HEAD_DIM
    gain = ATTENTION * (CODE / heads) ** 0.5 / NOPE_DIM
    read, carrier = _randn(seed, f"{name}.read", shape[0], heads, CODE) * gain, code(seed)
    return Structure(lambda start, end: (read[start:end] @ carrier.T).flatten(1), _rotated(shape[1], HEAD_DIM)[None])


def _head(config: ModelConfig, name: str, shape: tuple[int, ...], seed: int) -> Structure | None:
    u = readout.direction(config, seed)
    if u is None:
        return None
    unlikely = torch.full((shape[0], 1), -readout.GAIN)
    unlikely[sorted(prose.token_ids())] = 0.0
    return Structure(lambda start, end: unlikely[start:end] * u)


def _index_keys(config: ModelConfig, name: str, shape: tuple[int, ...], seed: int) -> Structure:
    rows = _index_code(seed) @ code(seed).T * (CODE / NOPE_DIM)
    return Structure(lambda start, end: rows[start:end], _rotated(INDEX_DIM, INDEX_DIM)[:, None])


_BUILDERS: tuple[tuple[str, Callable[[ModelConfig, str, tuple[int, ...], int], Structure | None]], ...] = (
    (r"^embed\.weight$", _embedding),
    (r"^head\.weight$", _head),
    (r"\.gate\.weight$", _router),
    (r"\.weights_proj\.weight$", _index_weights),
    (r"\.(attn|compressor)\.wkv\.weight$", _key_rows),
    (r"\.attn\.wq_b\.weight$", _queries),
    (r"\.indexer\.wq_b\.weight$", _index_queries),
    (r"\.wo_a\.weight$", _output),
    (r"\.indexer\.wk\.weight$", _index_keys),
)
