"""WIP"""

from __future__ import annotations

import dataclasses
import fnmatch
import re
import zlib
from typing import TYPE_CHECKING

import torch

from deepinfer_sm80.errors import CheckpointError
from deepinfer_sm80.ops.formats import fp8_block, mxfp4

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from deepinfer_sm80.model.config import ModelConfig
    from deepinfer_sm80.model.schema import Tensors

LOGITS = 1.0
TOPICS, TOPIC = 8, 0.5
GATE, GATE_DENSE = 4.0, 0.0
BIAS = 0.3
CODE, INDEX_CODE = 32, 32
QUERY, ROPE_QUERY = 1.4, 1.4
ALIGNED = 0.7
INDEX_ALIGNED = 0.7
SINK_MEAN, SINK_STD = 5.5, 1.0
EXPERT = 4.5
SUBLAYER = 0.25
ATTENTION = 1.5

ACTIVATION_RMS = 13.5

_STRIPE = 1 << 21
_TABLE_LARGEST_CODE = 0x3F


@dataclasses.dataclass(frozen=True)
class Recipe:
    std: float
    mean: float = 0.0
    per_fan_in: bool = False


def _gain(gain: float) -> Recipe:
    return Recipe(gain, per_fan_in=True)


def recipes():
    return (
    ("*norm.weight", Recipe(0.1, mean=1.0)),
    ("embed.weight", Recipe((1-TOPIC**2)**.5)),
    ("head.weight", _gain(LOGITS)),
    ("*.markov_head.embed.weight", Recipe(1.0)),
    ("*.attn_sink", Recipe(SINK_STD, mean=SINK_MEAN)),
    ("*.attn.wq_b.weight", _gain(ROPE_QUERY)),
    ("*.attn.wo_a.weight", _gain(ATTENTION)),
    ("*.compressor.wgate.weight", _gain(2.0)),
    ("*.gate.bias", Recipe(BIAS)),
    ("*.gate.bias_vl", Recipe(BIAS)),
    ("*.gate.weight", _gain(GATE_DENSE)),
    ("*.w[13].weight", _gain(EXPERT)),
    ("*.w2.weight", _gain(SUBLAYER / ACTIVATION_RMS)),
    ("*.engram.[qk]_weight", Recipe(0.3, mean=1.0)),
    ("*.engram.wkv.weight", _gain(ENGRAM)),
    ("*.weights_proj.weight", _gain(INDEX_WEIGHT_DENSE)),
    ("*.hc_*_scale", Recipe(0.1, mean=1.0)),
    ("*.hc_*_base", Recipe(2.0)),
    ("*.weight", _gain(1.0)),
    ("*.hc_*_fn", _gain(1.0)),
)
ENGRAM = 0.5
DRAWS = 16
INDEX_ROPE = 0.5
FOLLOW = 0.6
INDEX_WEIGHT_DENSE = 0.5


def recipe(name: str) -> Recipe:
    for pattern, found in recipes():
        if fnmatch.fnmatchcase(name, pattern):
            return found
    raise CheckpointError(path="weights", problem=f"no recipe for {name}", remedy="Add one to model/weights.py")


def _generator(seed: int, name: str) -> torch.Generator:
    return torch.Generator().manual_seed(zlib.crc32(f"{seed}:{name}".encode()))


def _randn(seed, name, *shape):
    return torch.randn(*shape, generator=_generator(seed, name))


def _orthonormal(seed: int, name: str, rows: int, columns: int) -> torch.Tensor:
    """float32 [rows, columns], columns orthonormal."""
    return torch.linalg.qr(_randn(seed, name, rows, columns).double())[0].float()


class Structure:
    """dense factor rows [N] or None, and added(rows)"""

    def __init__(self, config, name, seed, shape):
        self.c, self.name, self.seed, self.shape = config, name, seed, shape
        self.build = None
        self.rows = None  # factor of the dense part per row
        self.cols = None
        H = config.hidden_size
        m = re.match(r"(layers|mtp)\.(\d+)\.", name)
        layer = int(m.group(2)) if m and m.group(1) == "layers" else -1
        nope = torch.arange(512) < 448
        COPIES = globals()["COPIES"]
        v = _pattern(seed, H)
        spread = lambda W: W.repeat_interleave(COPIES, -1) * v  # readers get / COPIES
        topics = spread(_orthonormal(seed, "topics", H // COPIES, TOPICS).T * (H // COPIES) ** 0.5)  # unit rms
        read = topics / H  # topic . read = 1
        self.dense = None
        if name == "embed.weight":
            k = torch.randint(0, TOPICS, (shape[0],), generator=_generator(seed, "topic of token"))
            self.dense = lambda t: spread(t)
            self.build = lambda a, b: TOPIC * topics[k[a:b]]
        elif name.endswith(".gate.weight"):
            g = _generator(seed, name + ".levels")
            levels = torch.linspace(-1, 1, shape[0])
            bias = _randn(seed, name.replace("weight", "bias"), shape[0]) * BIAS
            k = config.num_experts_per_tok if layer >= 0 else config.dspark_num_experts_per_tok
            def draw():
                best = (-1.0, None)
                for _ in range(DRAWS):
                    L = levels[torch.randperm(shape[0], generator=g)]
                    m = []
                    for f in (1.0, 0.75, 0.5):
                        t = (torch.nn.functional.softplus(L * GATE * f).sqrt() + bias).sort(descending=True).values
                        m.append((t[k - 1] - t[k]).item() if k < len(t) else 1.0)
                    best = max(best, (min(m), L), key=lambda v: v[0])
                return best[1]
            L = torch.stack([draw() for _ in range(TOPICS)], 1)
            self.build = lambda a, b: (GATE / TOPIC) * (L @ read)[a:b]
        elif name.endswith("weights_proj.weight"):
            L = 0.5 + torch.rand(shape[0], TOPICS, generator=_generator(seed, name + ".levels"))
            self.build = lambda a, b: (1 / TOPIC) * (L @ read)[a:b]
        elif name.endswith(("attn.wkv.weight", "compressor.wkv.weight")):
            B = self.code()
            A = spread(_randn(seed, name + ".read", CODE, H // COPIES)) / COPIES / (H // COPIES) ** 0.5
            self.rows = (~nope).float()
            self.build = lambda a, b: (B @ A)[a:b]
        elif name.endswith("attn.wq_b.weight"):
            B, K, heads = self.code(), shape[1], shape[0] // 512
            M = _randn(seed, name + ".heads", heads, CODE, K) * (1 - ALIGNED**2) ** 0.5 + ALIGNED * self.common(layer, K)
            M *= K**-0.5 * QUERY * 512**0.5 * CODE**0.5 / 448
            self.rows = (~nope).float().repeat(heads)
            self.build = lambda a, b: (B @ M).flatten(0, 1)[a:b]
        elif name.endswith("attn.wo_a.weight"):
            B, heads = self.code(), shape[1] // 512
            D = _randn(seed, name + ".read", shape[0], heads, CODE) * ATTENTION * (CODE / 448) * (heads * CODE) ** -0.5
            self.cols = (~nope).float().repeat(heads)
            self.build = lambda a, b: (D[a:b] @ B.T).flatten(1)
        elif name.endswith("indexer.wk.weight"):
            E = torch.cat((self.index_code(), torch.zeros(64, INDEX_CODE)))
            self.rows = (torch.arange(128) >= 64).float()
            self.build = lambda a, b: (E @ self.code().T * (CODE / 448))[a:b]
        elif name.endswith("indexer.wq_b.weight"):
            E, K, heads = torch.cat((self.index_code(), torch.zeros(64, INDEX_CODE))), shape[1], shape[0] // 128
            M = _randn(seed, name + ".heads", heads, CODE, K) * (1 - INDEX_ALIGNED**2) ** 0.5
            M = (M + INDEX_ALIGNED * self.common(layer, K)) * K**-0.5
            self.rows = INDEX_ROPE * (torch.arange(128) >= 64).float().repeat(heads)
            self.build = lambda a, b: (E @ M).flatten(0, 1)[a:b]
        self.reads = name == "head.weight" or name.endswith(("wq_a.weight", "attn.wkv.weight", "compressor.wkv.weight", "wgate.weight",
            "weights_proj.weight", "gate.weight", ".w1.weight", ".w3.weight", "main_proj.weight")) or bool(re.search(r"hc_\w+_fn$", name))
        self.writes = name.endswith(("wo_b.weight", ".w2.weight", "engram.wkv.weight"))
        self.v = v

    def code(self):
        B = _orthonormal(self.seed, "code", 448, CODE) * (448 / CODE) ** 0.5 * 1.0
        return torch.cat((B * 1.0, torch.zeros(64, CODE)))

    def index_code(self):
        return _orthonormal(self.seed, "index code", 64, INDEX_CODE) * (64 / INDEX_CODE) ** 0.5

    def common(self, layer, K):
        src = max((s for s in self.c.index_source_layer_ids if s <= layer), default=-1)
        own = _randn(self.seed, f"common {src}", CODE, K)
        can = self.c.candidate_source_layer_id
        if src > can >= 0:
            own = FOLLOW * _randn(self.seed, f"common {can}", CODE, K) + (1 - FOLLOW**2) ** 0.5 * own
        return own

    def apply(self, stripe, a, b):
        if self.rows is not None:
            stripe = stripe * self.rows[a:b, None]
        if self.cols is not None:
            stripe = stripe * self.cols
        if self.build is not None:
            stripe = stripe + self.build(a, b)
        return stripe


def _pattern(seed, H):
    v = 0.5 + torch.rand(H, generator=_generator(seed, "pattern"))
    v = v * (torch.randint(0, 2, (H,), generator=_generator(seed, "signs")) * 2 - 1)
    v = v.view(-1, COPIES)
    return (v / v.square().mean(-1, keepdim=True).sqrt()).flatten()


COPIES = 4


def random_tensors(config: ModelConfig, tensors: Tensors, seed: int) -> Iterator[tuple[str, torch.Tensor]]:
    pending: dict[str, torch.Tensor] = {}
    for name, (dtype, shape) in tensors.items():
        if name in pending:
            yield name, pending.pop(name)
            continue
        generator = _generator(seed, name)
        if name.endswith("engram.embed.weight"):
            weight, scale = _table(shape, generator)
        elif dtype in ("F8_E4M3", "I8"):
            columns = shape[1] * (2 if dtype == "I8" else 1)
            encode = mxfp4.encode if dtype == "I8" else fp8_block.encode
            pairs = [encode(stripe) for stripe in _stripes(config, seed, name, (shape[0], columns), generator)]
            weight, scale = (torch.cat(parts) for parts in zip(*pairs, strict=True))
        else:
            target = torch.bfloat16 if dtype == "BF16" else torch.float32
            parts = [stripe.to(target) for stripe in _stripes(config, seed, name, shape, generator)]
            yield name, torch.cat(parts)
            continue
        pending[name.removesuffix("weight") + "scale"] = scale
        yield name, weight


def _stripes(config, seed, name: str, shape: tuple[int, ...], generator: torch.Generator) -> Iterator[torch.Tensor]:
    chosen = recipe(name)
    st = Structure(config, name, seed, shape)
    std = chosen.std / shape[-1] ** 0.5 if chosen.per_fan_in else chosen.std
    rows = max(_STRIPE // shape[-1] // 32, 1) * 32 if len(shape) > 1 else shape[0]
    for start in range(0, shape[0], rows):
        n = min(rows, shape[0] - start)
        if st.reads or st.dense:
            stripe = torch.randn(n, shape[1] // COPIES, generator=generator).repeat_interleave(COPIES, 1) * st.v.repeat(shape[1] // len(st.v))
            stripe *= std * (COPIES**-0.5 if st.reads else 1)
        elif st.writes:
            stripe = torch.randn(n // COPIES, shape[1], generator=generator).repeat_interleave(COPIES, 0)
            at = torch.arange(start, start + n) % len(st.v)
            stripe = stripe * st.v[at, None] * std
        else:
            stripe = torch.randn(n, *shape[1:], generator=generator).mul_(std).add_(chosen.mean)
        yield st.apply(stripe, start, start + n)


def _table(shape: tuple[int, ...], generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    codes = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    codes &= 0x80 | _TABLE_LARGEST_CODE
    scale = torch.randint(126, 130, (shape[0], shape[1] // 32), dtype=torch.uint8, generator=generator)
    return codes, scale
