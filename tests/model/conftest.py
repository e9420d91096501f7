"""A model with every kind of layer at the real head, index and record widths, but narrow: about 60 MB, two seconds."""

import dataclasses
import functools
import pydoc_data.topics
import types

import pytest
import torch
from tokenizers import Tokenizer

from deepinfer_sm80.model.checkpoint import Reader, write_checkpoint
from deepinfer_sm80.model.config import preset
from deepinfer_sm80.model.draft import Draft
from deepinfer_sm80.model.engram_hash import compress_vocabulary, table_rows
from deepinfer_sm80.model.forward import TextModel
from deepinfer_sm80.model.schema import expected_tensors
from deepinfer_sm80.model.switches import Switches
from deepinfer_sm80.model.tokenizer_files import tokenizer_files
from deepinfer_sm80.model.weights import random_tensors


def micro_config():
    return dataclasses.replace(
        preset("tiny"),
        hidden_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=4,
        q_lora_rank=32,
        o_lora_rank=32,
        n_routed_experts=2,
        num_experts_per_tok=1,
        compress_ratios=(0, 2, 1, 1, 0),
        kv_source_layer_ids=(1, 2),
        index_source_layer_ids=(1, 2, 3),
        candidate_source_layer_id=2,
        engram_layer_ids=(1,),
        engram_vocab_size=100,
        engram_num_embeddings=table_rows(1, 100, 4, 8),
        num_nextn_predict_layers=1,
        dspark_target_layer_ids=(1, 2, 3),
        dspark_markov_rank=32,
        dspark_n_routed_experts=2,
        dspark_num_experts_per_tok=1,
    )


@pytest.fixture(scope="session")
def micro():
    return micro_config()


@pytest.fixture(scope="session")
def choosy(micro):
    """``choosy(**switches)``: a TextModel that has to choose in few tokens. Six experts, three of them for a token; 8
    compressed rows, behind the candidate source among 2 blocks of 8."""
    from deepinfer_sm80.model.forward import TextModel
    from deepinfer_sm80.model.schema import expected_tensors
    from deepinfer_sm80.model.switches import Switches
    from deepinfer_sm80.model.weights import random_tensors

    config = dataclasses.replace(
        micro, index_topk=8, candidate_topk_blocks=2, n_routed_experts=6, num_experts_per_tok=3
    )

    class Tensors:
        headers = expected_tensors(config, draft=False)
        load = dict(random_tensors(config, headers, seed=11)).__getitem__

    ids = [i % config.engram_compressed_vocab_size for i in range(config.vocab_size)]
    return lambda **switches: TextModel(config, Tensors, ids, Switches(**switches))


@pytest.fixture(scope="session")
def micro_checkpoint(micro, tmp_path_factory):
    directory = tmp_path_factory.mktemp("checkpoints") / "micro"
    write_checkpoint(directory, micro, seed=3)
    return directory


@pytest.fixture(scope="module")
def one_thread():
    """Two threads split a tensor at any element, and the last ones of each part go through another exponential."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.no_grad():
        yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def micro_model(micro, micro_checkpoint):
    """``micro_model(switch=value)``: micro that chooses 48 rows and 6 candidate blocks, so that 100 tokens are many."""
    config = dataclasses.replace(micro, index_topk=48, candidate_topk_blocks=6)
    source = Reader(micro_checkpoint)
    tokenizer = Tokenizer.from_file(str(micro_checkpoint / "tokenizer.json"))
    compressed = compress_vocabulary(tokenizer)[0]

    @functools.cache
    def make(**switches):
        return TextModel(config, source, compressed, Switches(**switches))

    return make


@pytest.fixture(scope="session")
def prompt(micro_model):
    """300 token ids without a pattern."""
    most = len(micro_model().compressed_ids)
    return torch.randint(0, most, (300,), generator=torch.Generator().manual_seed(11)).tolist()


@pytest.fixture(scope="session")
def whole(micro_model, prompt):
    """The prompt in one step of the exact model: its output and the state behind it."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    state = micro_model().new_state()
    with torch.no_grad():
        out = micro_model().step(prompt, state)
    torch.set_num_threads(threads)
    return out, state


class InMemory:
    """A source with every tensor of ``config``."""

    def __init__(self, config, seed):
        self.headers = expected_tensors(config)
        self.tensors = dict(random_tensors(config, self.headers, seed))

    def load(self, name):
        return self.tensors[name]


@pytest.fixture(scope="session")
def speculative():
    """A narrow target with three draft layers, as released, whose experts are not of the target's number; and token
    ids of English text: about five seconds."""
    config = dataclasses.replace(
        micro_config(),
        num_hidden_layers=5,
        compress_ratios=(0, 2, 1, 1, 1, 0, 0, 0),
        num_nextn_predict_layers=3,
        dspark_target_layer_ids=(2, 3, 4),
        dspark_n_routed_experts=4,
        dspark_num_experts_per_tok=2,
        index_topk=32,
        candidate_topk_blocks=10,
        max_position_embeddings=1000,
    )
    return with_draft(config, seed=4)


@pytest.fixture(scope="module")
def tiny_speculative():
    """The same of the preset ``tiny``: about 2.5 GB and a minute."""
    return with_draft(preset("tiny"), seed=0)


def with_draft(config, seed):
    source = InMemory(config, seed)
    tokenizer = Tokenizer.from_str(tokenizer_files(config)["tokenizer.json"])
    target = TextModel(config, source, compress_vocabulary(tokenizer)[0])
    topics = pydoc_data.topics.topics
    text = tokenizer.encode("\n\n".join(topics[name] for name in sorted(topics))[:8000]).ids
    return types.SimpleNamespace(config=config, source=source, target=target, draft=Draft(target, source), text=text)
