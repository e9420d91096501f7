"""Engram's hash against the constants of the released model and against a second way of computing it."""

import numpy as np
import pytest

from deepinfer_sm80.model import engram_hash
from deepinfer_sm80.model.config import preset

RELEASED = (2, 16_000_000, 4, 8)


@pytest.fixture(scope="module")
def compressed(micro_checkpoint):
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(micro_checkpoint / "tokenizer.json"))
    return tokenizer, *engram_hash.compress_vocabulary(tokenizer)


def test_released_primes_and_table_rows():
    first, second = engram_hash.bucket_primes(*RELEASED)
    assert (first[0], first[-1], len(first)) == (16000057, 16000463, 24)
    assert (second[0], second[-1], len(second)) == (16000477, 16000889, 24)
    assert engram_hash.table_rows(*RELEASED) == (384006168, 384016682)


@pytest.mark.parametrize("start", [2, 3, 100, 2000, 2003])
def test_primes_are_those_of_a_sieve(start):
    sieve = np.ones(6000, dtype=bool)
    sieve[:2] = False
    for factor in range(2, 78):
        sieve[factor * factor :: factor] = False
    expected = np.flatnonzero(sieve)
    expected = expected[expected >= start][:48].tolist()
    assert [p for layer in engram_hash.bucket_primes(2, start, 4, 8) for p in layer] == expected


@pytest.mark.parametrize("name", ["tiny", "layer"])
def test_presets_carry_the_derived_rows(name):
    config = preset(name)
    primes = engram_hash.bucket_primes(2, config.engram_vocab_size, 4, 8)
    assert config.engram_num_embeddings == tuple(map(sum, primes))


def test_offsets_are_disjoint_ranges():
    primes = (5, 7, 11)
    assert engram_hash.bucket_offsets(primes) == (0, 5, 12)


@pytest.mark.parametrize(
    ("layer", "expected"),
    [
        (1, (76632096046245, 4839876093313, 35959672319349, 73987337458391)),
        (14, (67716810739261, 51510806800915, 30921347202721, 82619226485591)),
    ],
)
def test_released_multipliers(layer, expected):
    assert engram_hash.hash_multipliers(layer, 4, 99092) == expected
    assert all(m % 2 and m * 99091 < 2**63 for m in expected)


def test_vocabulary_compresses_to_the_released_size(compressed):
    _, mapping, count = compressed
    assert (len(mapping), count) == (129280, 99092)
    assert mapping[0] == 0
    assert set(mapping) == set(range(99092))
    first = {}
    for token, new in enumerate(mapping):
        first.setdefault(new, token)
    assert list(first) == sorted(first), "ids count up in order of first appearance"


def test_tokens_that_read_alike_share_an_id(compressed):
    tokenizer, mapping, _ = compressed

    def of(text):
        (token,) = tokenizer.encode(text, add_special_tokens=False).ids
        return mapping[token]

    assert of("The") == of("the") == of(" the") == of(" THE")
    assert of("é") == of("e")
    assert of("\n") == of(" ")
    assert of(" ") != of("the")


def rows_by_arrays(history, multipliers, primes, pad):
    """int64 arrays with wrap-around, all columns at once, the blocking as a cumulative maximum."""
    depth = len(multipliers)
    padded = np.full(depth, -1, dtype=np.int64)
    padded[: len(history)] = history[:depth]
    values = np.where(np.maximum.accumulate(padded < 0), pad, padded)
    rolling = np.bitwise_xor.accumulate(values * np.array(multipliers, dtype=np.int64))[1:]
    sizes = np.array(primes, dtype=np.int64)
    offsets = np.cumsum(sizes) - sizes
    return (np.repeat(rolling, len(primes) // (depth - 1)) % sizes + offsets).tolist()


@pytest.mark.parametrize("length", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("dead", [None, 0, 1, 3])
def test_rows_of_a_position(length, dead):
    rng = np.random.default_rng(length)
    history = rng.integers(0, 99092, size=length).tolist()
    if dead is not None and dead < length:
        history[dead] = -1
    for layer, primes in zip((1, 14), engram_hash.bucket_primes(*RELEASED), strict=True):
        multipliers = engram_hash.hash_multipliers(layer, 4, 99092)
        rows = engram_hash.ngram_rows(history, multipliers, primes, 5)
        assert rows == rows_by_arrays(history, multipliers, primes, 5)
        assert all(
            offset <= row < offset + p
            for row, p, offset in zip(rows, primes, engram_hash.bucket_offsets(primes), strict=True)
        )


def test_everything_behind_a_dead_token_is_pad():
    multipliers, primes = engram_hash.hash_multipliers(1, 4, 99092), engram_hash.bucket_primes(*RELEASED)[0]
    assert engram_hash.ngram_rows([7, -1, 9, 11], multipliers, primes, 2) == engram_hash.ngram_rows(
        [7], multipliers, primes, 2
    )
    assert engram_hash.ngram_rows([7, 8, 9, 11], multipliers, primes, 2) != engram_hash.ngram_rows(
        [7], multipliers, primes, 2
    )
