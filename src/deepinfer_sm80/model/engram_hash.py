"""Engram's hash: token compression, multipliers, prime buckets and the row of every n-gram.

A position p looks back over the compressed ids c_0 (the token at p) .. c_3 (at p-3). With v_k = c_k, or the pad id once
a look-back left the sequence or met a dead (image) token, and m_k the multiplier of look-back k,

    rolling_k = v_0*m_0 XOR v_1*m_1 XOR .. XOR v_k*m_k          (int64, products below 2^63)
    row[n, h] = rolling_{n-1} mod prime[n, h] + offset[n, h]    for n = 2 .. max_ngram_size, h = 0 .. n_heads-1

Source: the released DeepSeek-V4.1 model definition; its constants are reproduced by tests/model/test_engram_hash.py.
"""

from __future__ import annotations

import functools
import itertools
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_INT64_MAX = 2**63 - 1
_LAYER_SEED = 10007
_REPLACEMENT = "\ufffd"  # what decoding a fragment of a UTF-8 sequence gives
_LONE_SPACE = "\ue000"  # private use: carries a token that is one space through the stripping


class RawTokenizer(Protocol):
    """What the compression needs of a ``tokenizers.Tokenizer``."""

    def get_vocab_size(self, with_added_tokens: bool = True) -> int: ...
    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str: ...
    def id_to_token(self, id: int) -> str | None: ...


def _is_prime(number: int) -> bool:
    if number < 4 or number % 2 == 0:
        return number in (2, 3)
    divisor = 3
    while divisor * divisor <= number:
        if number % divisor == 0:
            return False
        divisor += 2
    return True


def _primes_from(number: int) -> Iterator[int]:
    return filter(_is_prime, itertools.count(number))


@functools.lru_cache(maxsize=32)
def bucket_primes(num_layers: int, vocab_size: int, max_ngram_size: int, n_heads: int) -> tuple[tuple[int, ...], ...]:
    """Bucket counts [num_layers][(max_ngram_size - 1) * n_heads], n-gram major, head minor.

    They are the primes >= ``vocab_size`` in ascending order, each used once over all layers: a layer continues where
    the layer before it stopped.
    """
    columns = (max_ngram_size - 1) * n_heads
    source = _primes_from(vocab_size)
    return tuple(tuple(itertools.islice(source, columns)) for _ in range(num_layers))


def bucket_offsets(primes: Sequence[int]) -> tuple[int, ...]:
    """First table row of every column of one layer: the exclusive prefix sum of its primes."""
    return tuple(itertools.accumulate(primes[:-1], initial=0))


def table_rows(num_layers: int, vocab_size: int, max_ngram_size: int, n_heads: int) -> tuple[int, ...]:
    """Rows of each layer's table: the config field ``engram_num_embeddings``."""
    return tuple(sum(layer) for layer in bucket_primes(num_layers, vocab_size, max_ngram_size, n_heads))


def hash_multipliers(layer_id: int, max_ngram_size: int, compressed_vocab_size: int) -> tuple[int, ...]:
    """One odd multiplier per look-back 0 .. max_ngram_size-1 of layer ``layer_id``.

    Drawn from numpy's default generator seeded with 10007 * layer_id and bounded so that id * multiplier < 2^63.
    """
    from deepinfer_sm80.model.requirements import require

    numpy = require("numpy")
    bound = _INT64_MAX // compressed_vocab_size // 2
    drawn = numpy.random.default_rng(_LAYER_SEED * layer_id).integers(0, bound, size=max_ngram_size, dtype=numpy.int64)
    return tuple(2 * int(value) + 1 for value in drawn)


def compress_vocabulary(tokenizer: RawTokenizer) -> tuple[list[int], int]:
    """Map of every token id to its compressed id, and the number of compressed ids (99,092 for DeepSeek-V4.1).

    Tokens whose text agrees after folding case, accents, width and white space share an id; a token that is only a
    part of a character stands for itself. Ids count up in order of first appearance. ``tokenizer`` is the Rust
    tokenizer (``tokenizers.Tokenizer``, or ``backend_tokenizer`` of a transformers one).
    """
    fold = _folding()
    ids: dict[str, int] = {}
    mapping = []
    for token in range(tokenizer.get_vocab_size(with_added_tokens=True)):
        text = tokenizer.decode([token], skip_special_tokens=False)
        key = (tokenizer.id_to_token(token) or "") if _REPLACEMENT in text else (fold.normalize_str(text) or text)
        mapping.append(ids.setdefault(key, len(ids)))
    return mapping, len(ids)


def _folding() -> Any:
    from deepinfer_sm80.model.requirements import require

    n, regex = require("tokenizers.normalizers"), require("tokenizers").Regex
    unicode_folds = [n.NFKC(), n.NFD(), n.StripAccents(), n.Lowercase()]
    white_space = [n.Replace(regex(r"[ \t\r\n]+"), " "), n.Replace(regex(r"^ $"), _LONE_SPACE), n.Strip()]
    return n.Sequence([*unicode_folds, *white_space, n.Replace(_LONE_SPACE, " ")])


def ngram_rows(
    history: Sequence[int],
    multipliers: Sequence[int],
    primes: Sequence[int],
    pad: int,
) -> list[int]:
    """Table rows of one position, [(max_ngram_size - 1) * n_heads], n-gram major.

    history      compressed ids from the position backwards (c_0 first); shorter than ``multipliers`` at the start of
                 a sequence; -1 marks a dead (image) token, which blocks itself and everything older
    multipliers  of the layer, one per look-back
    primes       of the layer, from ``bucket_primes``
    pad          compressed id of the pad token

    One position in exact Python integers: the specification that the tensor operator is tested against.
    """
    heads = len(primes) // (len(multipliers) - 1)
    columns = zip(primes, bucket_offsets(primes), strict=True)
    rolling, blocked, rows = 0, False, []
    for back, multiplier in enumerate(multipliers):
        blocked = blocked or back >= len(history) or history[back] < 0
        rolling ^= (pad if blocked else history[back]) * multiplier
        if back:
            rows += [rolling % prime + offset for prime, offset in itertools.islice(columns, heads)]
    return rows
