"""What the caches keep: key rows and index keys as a profile's records hold them.

    profile   window rows                            compressed rows      index keys and queries
    fp8_584   dims 0..447 e4m3, a scale per 64;      as window rows       e4m3, one scale a vector
              dims 448..511 bfloat16
    sm100     e4m3, a scale per 32                   as window rows       e4m3, one scale a vector
    official  e4m3, a scale per 32                   e2m1, an e4m3        e2m1, a scale per 32
                                                     scale per 16
Scales are powers of two but where e4m3 is said; the rule of the latter is vLLM's (``ops/formats/nvfp4``), the released
definition's kernel was not at hand. Records are made of rotated rows that were rounded to bfloat16.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from deepinfer_sm80.model import rope
from deepinfer_sm80.ops.formats import e4m3, mxfp4, mxfp8, nvfp4
from deepinfer_sm80.ops.indexer import vectors
from deepinfer_sm80.ops.kv_cache.layout import NOPE_DIM, QUANT_GROUP

if TYPE_CHECKING:
    from collections.abc import Callable

    from deepinfer_sm80.model.switches import Switches


class Vectors(NamedTuple):
    """Index keys or queries as stored: value = ``values`` float32 [..., 128] * ``scale`` float32 [...]."""

    values: torch.Tensor
    scale: torch.Tensor


def fp8_584(rotated: torch.Tensor) -> torch.Tensor:
    """The 584-byte record: ``rope_quant_insert`` writes it."""
    nope = mxfp8.decode(*mxfp8.encode(rotated[..., :NOPE_DIM], QUANT_GROUP))
    return torch.cat((nope.bfloat16(), rotated[..., NOPE_DIM:]), dim=-1)


def mxfp8_528(rotated: torch.Tensor) -> torch.Tensor:
    """The 528-byte record: every dim e4m3, the rotated ones too."""
    return mxfp8.decode(*mxfp8.encode(rotated)).bfloat16()


def nvfp4_288(rotated: torch.Tensor) -> torch.Tensor:
    """The 288-byte record of compressed rows: every dim e2m1."""
    return nvfp4.decode(*nvfp4.encode(rotated)).bfloat16()


def e4m3_vectors(x: torch.Tensor) -> Vectors:
    """float32 [..., 128] -> e4m3 under one power of two a vector."""
    codes, scale = vectors.quantise(x)
    return Vectors(e4m3.decode(codes), scale)


def mxfp4_vectors(x: torch.Tensor) -> Vectors:
    """float32 [..., 128] -> e2m1 under a power of two per 32, which stays in the values."""
    values = mxfp4.decode(*mxfp4.encode(x))
    return Vectors(values, torch.ones(values.shape[:-1], device=values.device))


class Profile(NamedTuple):
    """How rows are stored: window and compressed rows bfloat16 [T, 512] -> what a reader finds, bfloat16 [T, 512];
    index vectors float32 [..., 128] -> Vectors."""

    window: Callable[[torch.Tensor], torch.Tensor]
    compressed: Callable[[torch.Tensor], torch.Tensor]
    index_vectors: Callable[[torch.Tensor], Vectors]


PROFILES = {
    "fp8_584": Profile(fp8_584, fp8_584, e4m3_vectors),
    "sm100": Profile(mxfp8_528, mxfp8_528, e4m3_vectors),
    "official": Profile(mxfp8_528, nvfp4_288, mxfp4_vectors),
}


def profile_of(switches: Switches) -> Profile:
    """The profile that ``switches`` name."""
    return PROFILES[switches.kv_profile]


def as_recorded(
    latent: torch.Tensor, cos_sin: torch.Tensor, record: Callable[[torch.Tensor], torch.Tensor] = fp8_584
) -> torch.Tensor:
    """latent bfloat16 [T, 512], cos_sin float32 [T, 64] -> bfloat16 [T, 512], rotated and read back from ``record``."""
    return record(rope.rotate(latent, cos_sin))
