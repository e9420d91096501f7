"""The frozen text: the same tokens everywhere, enough of them, prompts that share nothing."""

import hashlib

import pytest

from deepinfer_sm80.errors import UnsupportedOptionError
from deepinfer_sm80.model.config import preset
from deepinfer_sm80.model.prose import LENGTHS, prompts, prose
from deepinfer_sm80.model.tokenizer_files import tokenizer_files


@pytest.fixture(scope="module")
def encode():
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(tokenizer_files(preset("tiny"))["tokenizer.json"])
    return lambda text: tokenizer.encode(text, add_special_tokens=False).ids


def test_the_text_is_frozen_flowing_and_says_nothing_twice():
    text = prose()
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == "c2d96e1fe5c46fae"
    paragraphs = text.strip().split("\n\n")
    assert len(set(paragraphs)) == len(paragraphs) > 300
    assert all(p[0].isupper() and p.endswith(".") and "\n" not in p and "|" not in p for p in paragraphs)


def test_prompts_have_their_lengths_and_share_no_text(encode):
    ids, found = encode(prose()), prompts(encode)
    assert len(ids) == 11391
    assert [len(p) for p in found] == list(LENGTHS)
    assert len({tuple(p[:1]) for p in found}) == len(found), "no two share a prefix"
    assert all(0 <= token < 129280 for p in found for token in p)
    pieces = [tuple(p[-60:]) for p in found if len(p) > 100]
    places = [next(i for i in range(len(ids)) if tuple(ids[i : i + 60]) == piece) for piece in pieces]
    assert places == sorted(places)
    assert all(
        b - a > len(p) for a, b, p in zip(places, places[1:], [p for p in found if len(p) > 100][1:], strict=False)
    )


def test_a_text_that_is_too_short_is_said(encode):
    with pytest.raises(UnsupportedOptionError, match="11391 tokens"):
        prompts(encode, (9000, 3000))
