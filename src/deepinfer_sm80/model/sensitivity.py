"""Whether a checkpoint tells right from wrong: its mean log-probability of the frozen text, complete and without each
component, beside what rounding alone changes.

The rounding is that of another correct implementation, and more: TF32 operands in the streams' mixture, attention
probabilities that are not rounded, and every product off by 2^-10 of itself before it is rounded to bfloat16.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from unittest import mock

import torch

from deepinfer_sm80.model import attention, linear, streams
from deepinfer_sm80.model.checkpoint import Reader
from deepinfer_sm80.model.checkpoint_files import read_config, read_tokenizer
from deepinfer_sm80.model.engram_hash import compress_vocabulary
from deepinfer_sm80.model.forward import TextModel
from deepinfer_sm80.model.schema import expected_tensors
from deepinfer_sm80.model.switches import COMPONENTS, Switches
from deepinfer_sm80.model.weights import random_tensors

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from deepinfer_sm80.model.config import ModelConfig
    from deepinfer_sm80.model.linear import Source

SENSITIVITY, ROUNDING = 0.1, 0.01
LONG_ONLY = ("index_selection", "candidates")  # act where more rows exist than are chosen
ROUNDING_NOISE = "rounding"

_RELATIVE = 2.0**-10
_HEAD_ROWS = 100_000  # more rows than any other matrix has


@dataclass(frozen=True)
class Change:
    """Log-probabilities of the text's tokens against the complete model's: ``mean`` change, mean ``size`` of a change,
    the ``largest`` one. ``what``: a component or ROUNDING_NOISE; nats."""

    what: str
    mean: float
    size: float
    largest: float


@dataclass(frozen=True)
class Table:
    """``complete``: mean log-probability of the ``tokens`` tokens; ``changes``: rounding first, then the components."""

    tokens: int
    complete: float
    changes: tuple[Change, ...]


class Model:
    """A checkpoint without any of its components in turn; matrices are decoded once.

    ``source`` and ``compressed_ids`` are those of ``TextModel``.
    """

    def __init__(
        self, config: ModelConfig, source: Source, compressed_ids: Sequence[int], device: str | torch.device = "cpu"
    ) -> None:
        self.config, self.source = config, Decoded(source)
        self.compressed_ids, self.device = compressed_ids, device

    @classmethod
    def from_checkpoint(cls, directory: str | Path, device: str | torch.device = "cpu") -> Model:
        """The checkpoint in ``directory``. Raises CheckpointError or ModelConfigError if there is none."""
        path = Path(directory)
        reader = Reader(path)
        config = read_config(path)
        tokenizer = read_tokenizer(path)
        return cls(config, reader, compress_vocabulary(tokenizer)[0], device)

    def without(self, *components: str) -> TextModel:
        """The model without ``components``. Raises UnsupportedOptionError for an unknown one."""
        return TextModel(self.config, self.source, self.compressed_ids, Switches(frozenset(components)), self.device)

    @torch.no_grad()
    def logprobs(self, prompts: Sequence[Sequence[int]], *components: str) -> torch.Tensor:
        """Token ids -> float32 [sum of (length - 1)]: log-probability of every token but each prompt's first."""
        model = self.without(*components)
        return torch.cat([model.prompt_logprobs(prompt) for prompt in prompts])


def measure(model: Model, prompts: Sequence[Sequence[int]], components: Sequence[str] = tuple(COMPONENTS)) -> Table:
    """The table of ``components`` over ``prompts``; LONG_ONLY ones need prompts far longer than ``index_topk``."""
    complete = model.logprobs(prompts)
    with rounding_noise():
        changes = [change_of(ROUNDING_NOISE, model.logprobs(prompts) - complete)]
    changes += [change_of(name, model.logprobs(prompts, name) - complete) for name in components]
    return Table(len(complete), complete.mean().item(), tuple(changes))


def change_of(what: str, change: torch.Tensor) -> Change:
    """The row of ``what`` from the changes of all log-probabilities, float32 [tokens]."""
    size = change.abs()
    return Change(what, change.mean().item(), size.mean().item(), size.max().item())


class Decoded:
    """A source whose matrices are bfloat16 whatever they are stored as; every tensor is loaded and decoded once."""

    def __init__(self, source: Source) -> None:
        self.source, self.kept = source, dict[str, torch.Tensor]()
        self.headers = {
            name: ("BF16" if self._coded(name) else source.headers[name][0], source.headers[name][1])
            for name in source.headers
        }

    def _coded(self, name: str) -> bool:
        matrix = name.endswith(".weight") and not name.endswith("engram.embed.weight")
        return matrix and self.source.headers[name][0] in ("F8_E4M3", "I8")

    def load(self, name: str) -> torch.Tensor:
        """The tensor ``name``; a coded matrix as bfloat16 [N, K]."""
        if name not in self.kept:
            self.kept[name] = (
                linear.Weights(self.source, torch.device("cpu")).matrix(name.removesuffix(".weight"))
                if self._coded(name)
                else self.source.load(name)
            )
        return self.kept[name]


class Generated:
    """The text model's random tensors of ``config`` and ``seed`` as a source, made when they are asked for."""

    def __init__(self, config: ModelConfig, seed: int = 0) -> None:
        self.config, self.seed = config, seed
        self.headers = expected_tensors(config, draft=False)
        self._pending: dict[str, torch.Tensor] = {}

    def load(self, name: str) -> torch.Tensor:
        """As ``checkpoint.Reader.load``."""
        if name in self._pending:
            return self._pending.pop(name)
        stem = name.removesuffix(".scale").removesuffix(".weight")
        pair = {n: self.headers[n] for n in (f"{stem}.weight", f"{stem}.scale", name) if n in self.headers}
        made = dict(random_tensors(self.config, pair, self.seed))
        wanted = made.pop(name)
        self._pending = made
        return wanted


@contextlib.contextmanager
def rounding_noise(seed: int = 1) -> Iterator[None]:
    """Inside, the specification computes with the rounding of another implementation, another one for each ``seed``.
    The head is left alone."""
    generators: dict[torch.device, torch.Generator] = {}
    exact, mixed = linear.product, streams.mix_product

    def off(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        y = exact(x, weight)
        generator = generators.setdefault(y.device, torch.Generator(y.device).manual_seed(seed))
        return y * (1 + _RELATIVE * torch.randn(y.shape, generator=generator, device=y.device))

    def project(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x @ weight.T if len(weight) > _HEAD_ROWS else off(x, weight).bfloat16()

    with (
        mock.patch.object(linear, "product", off),
        mock.patch.object(linear, "project", project),
        mock.patch.object(streams, "mix_product", lambda x, fn: mixed(tf32(x), tf32(fn))),
        mock.patch.object(attention, "round_probabilities", lambda p: p),
    ):
        yield


@contextlib.contextmanager
def other_order() -> Iterator[None]:
    """Inside, every matrix product of the specification sums from the last column to the first."""
    matmul = linear.matmul  # what ``product`` and ``project`` call
    with mock.patch.object(linear, "matmul", lambda x, weight: matmul(x.flip(-1), weight.flip(-1))):
        yield


def tf32(x: torch.Tensor) -> torch.Tensor:
    """float32 with the low 13 bits rounded away, to the nearest, ties to even."""
    bits = x.view(torch.int32)
    return ((bits + 0xFFF + ((bits >> 13) & 1)) & ~0x1FFF).view(torch.float32)
