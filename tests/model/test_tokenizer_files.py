"""The tokenizer of a written checkpoint, as transformers loads it."""

import dataclasses

import pytest

from deepinfer_sm80.errors import CheckpointError
from deepinfer_sm80.model import tokenizer_files


@pytest.fixture(scope="module")
def tokenizer(micro_checkpoint):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(micro_checkpoint)


def test_special_tokens_are_where_the_configuration_says(tokenizer, micro):
    assert len(tokenizer) == micro.vocab_size
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (0, 1, 2)
    assert tokenizer.model_max_length == micro.max_position_embeddings
    assert tokenizer.convert_tokens_to_ids(tokenizer_files.IMAGE_PLACEHOLDER) == micro.image_token_id == 129264
    assert "place" in tokenizer.convert_ids_to_tokens(micro.dspark_noise_token_id)


def test_the_names_the_chat_encoding_uses_are_single_tokens(tokenizer):
    bar = "\uff5c"
    for name in (f"<{bar}User{bar}>", f"<{bar}Assistant{bar}>", "<think>", "</think>", f"{bar}DSML{bar}"):
        assert len(tokenizer.encode(name, add_special_tokens=False)) == 1, name


def test_text_survives_and_nothing_is_added(tokenizer):
    text = "Two caf\u00e9s, \u4f60\u597d.\n\n  def f(x):\treturn x\n"
    ids = tokenizer.encode(text)
    assert tokenizer.bos_token_id not in ids
    assert tokenizer.decode(ids) == text


def test_the_placeholder_is_one_token_inside_text(tokenizer):
    ids = tokenizer.encode(f"see{tokenizer_files.IMAGE_PLACEHOLDER}here")
    assert ids.count(129264) == 1
    assert len(ids) == 3


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"engram_compressed_vocab_size": 99091}, "compress to 99092 ids.* exactly 99091"),
        ({"vocab_size": 129279}, "has 129280 tokens.* 129279"),
    ],
)
def test_a_tokenizer_that_does_not_fit_is_refused(micro, change, said):
    with pytest.raises(CheckpointError, match=said):
        tokenizer_files.tokenizer_files(dataclasses.replace(micro, **change))


def test_a_tokenizer_without_a_place_for_the_placeholder_is_refused(micro, monkeypatch):
    monkeypatch.setattr(tokenizer_files, "installed_tokenizer", lambda: {"added_tokens": [{"id": 5}]})
    with pytest.raises(CheckpointError, match="no reserved token 129264"):
        tokenizer_files.tokenizer_files(micro)
