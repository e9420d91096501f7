"""vLLM's alignment, put into token order where the order can change a sum."""

import pytest
import torch

from deepinfer_sm80.vllm_plugin import experts, overrides


@pytest.fixture
def alignment(monkeypatch):
    """One expert, its rows in whatever order: as the atomic counters leave them."""

    def align(topk_ids, block_size, num_experts, *rest, return_scatter_idx):
        routes = topk_ids.numel()
        padded = -(-routes // block_size) * block_size
        ids = torch.cat((torch.arange(routes).flip(0), torch.full((padded - routes,), routes))).int()
        blocks = torch.zeros(padded // block_size, dtype=torch.int32)
        extra = ("scatter",) if return_scatter_idx else ()
        return (ids, blocks, torch.tensor([padded], dtype=torch.int32), *extra)

    monkeypatch.setitem(overrides._originals, experts._TARGET, align)


def test_more_rows_than_a_block_are_ordered(alignment):
    ids, blocks, used = experts.moe_align_block_size(torch.zeros(13, 1, dtype=torch.int32), 8, 1)
    assert ids.tolist() == [*range(13), 13, 13, 13]
    assert (blocks.tolist(), used.tolist()) == ([0, 0], [16])


def test_rows_of_one_block_are_left_alone(alignment):
    ids, _, _ = experts.moe_align_block_size(torch.zeros(5, 1, dtype=torch.int32), 8, 1)
    assert ids.tolist() == [4, 3, 2, 1, 0, 5, 5, 5]


@pytest.mark.parametrize(("tokens", "ordered"), [(8, False), (9, True)])
def test_an_expert_has_a_row_of_every_token_at_most(alignment, tokens, ordered):
    """Two routes of a token go to two experts: eight tokens fit a block of eight, sixteen routes or not."""
    ids, _, _ = experts.moe_align_block_size(torch.zeros(tokens, 2, dtype=torch.int32), 8, 1)
    routes = list(range(2 * tokens))
    assert ids.tolist()[: 2 * tokens] == (routes if ordered else routes[::-1])


def test_arguments_arrive_by_their_places(monkeypatch):
    given = []
    monkeypatch.setitem(
        overrides._originals, experts._TARGET, lambda *args, **named: given.extend([*args[1:], named]) or (0, 1, 2)
    )
    few = torch.zeros(1, 1, dtype=torch.int32)
    assert experts.moe_align_block_size(few, 16, 7, "map", "pad", "ignore") == (0, 1, 2)
    assert given == [16, 7, "map", "pad", "ignore", {"return_scatter_idx": False}]


def test_further_results_pass_through(alignment):
    found = experts.moe_align_block_size(torch.zeros(13, 1, dtype=torch.int32), 8, 1, return_scatter_idx=True)
    assert found[3] == "scatter"
