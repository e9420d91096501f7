"""Choices of a pass, watched and imposed: what must not change a bit, what must change, and how flips are judged."""

import math

import pytest
import torch

from deepinfer_sm80.errors import TensorContractError
from deepinfer_sm80.model.choices import Choices

TOKENS = 60
TOKEN_IDS = torch.arange(TOKENS) * 37 % 1000 + 5


@pytest.fixture(scope="module")
def model(choosy):
    return choosy()


@pytest.fixture(scope="module")
def watched(model):
    choices = Choices()
    with torch.no_grad():
        hidden = model.hidden(TOKEN_IDS, choices)
    return hidden, choices


def ids_of(mask):
    """bool [T, n] -> int64 [T, most], ascending behind -1s: what a recorder of another implementation would give."""
    columns = torch.where(mask, torch.arange(mask.shape[1]), -1)
    return columns.sort(-1).values[:, -int(mask.sum(-1).max()) :]


def own_choices(choices):
    return Choices(
        {layer: ids_of(found[0].own) for layer, found in choices.experts.items()},
        {layer: ids_of(found[0].own) for layer, found in choices.rows.items()},
    )


def run(model, choices):
    with torch.no_grad():
        return model.hidden(TOKEN_IDS, choices)


def test_watching_and_imposing_the_own_choices_change_no_bit(model, watched):
    hidden, seen = watched
    assert torch.equal(run(model, None), hidden)
    again = own_choices(seen)
    assert torch.equal(run(model, again), hidden)
    assert set(again.experts) == set(range(4))
    assert set(again.rows) == {1, 2, 3}
    for found in [*again.experts.values(), *again.rows.values()]:
        assert not found[0].flipped.any()
        assert (found[0].tie == 0).all()
        assert (found[0].surplus == 0).all()


def test_the_own_choices_are_as_many_as_the_model_says(watched):
    _, seen = watched
    assert all((found[0].own.sum(-1) == 3).all() for found in seen.experts.values())
    lengths = torch.arange(1, TOKENS + 1)
    assert torch.equal(seen.rows[1][0].own.sum(-1), (lengths // 2).clamp(max=8))
    assert torch.equal(seen.rows[2][0].own.sum(-1), lengths.clamp(max=8))
    assert all((found[0].margin >= 0).all() for found in [*seen.experts.values(), *seen.rows.values()])
    assert (seen.rows[2][0].margin[:8] == math.inf).all()


def test_another_expert_in_one_row_changes_that_row_and_later_ones_only_and_is_counted(model, watched):
    hidden, seen = watched
    own = seen.experts[0][0]
    forced, row = ids_of(own.own), 20
    forced[row, 0] = int((~own.own[row]).nonzero()[0])
    choices = Choices({0: forced})
    changed = (run(model, choices) != hidden).any(-1)
    assert not changed[:row].any()
    assert changed[row]
    assert choices.experts[0][0].flipped.nonzero().flatten().tolist() == [row]
    assert choices.experts[0][0].tie[row] >= own.margin[row] > 0


def test_other_rows_of_an_index_source_change_the_result_and_are_counted(model, watched):
    hidden, seen = watched
    own = seen.rows[1][0].own
    forced, row = ids_of(own), 50
    left_out = [c for c in range(25) if not own[row, c]]
    forced[row, 0] = left_out[0]
    choices = Choices(forced_rows={1: forced})
    changed = (run(model, choices) != hidden).any(-1)
    assert changed[row]
    assert not changed[:row].any()
    assert choices.rows[1][0].flipped.nonzero().flatten().tolist() == [row]


def test_chunks_take_the_forced_choices_of_their_positions(model, watched):
    _, seen = watched
    forced = own_choices(seen)
    for choice in forced.forced_experts.values():
        choice.copy_((choice + 1) % 6)
    whole = run(model, Choices(forced.forced_experts, forced.forced_rows))
    chunked, state = Choices(forced.forced_experts, forced.forced_rows), model.new_state()
    with torch.no_grad():
        parts = [model.step(part, state, choices=chunked).hidden for part in TOKEN_IDS.split(32)]
    assert torch.equal(torch.cat(parts), whole)
    assert len(chunked.experts[0]) == 2


def positions(count):
    return torch.arange(count)


def test_the_tie_of_an_expert_is_the_difference_of_the_scores():
    ranked = torch.tensor([[0.5, 0.75, 0.625, 0.25]])
    choices = Choices({5: torch.tensor([[0, 1]])})
    ids = choices.choose_experts(5, positions(1), ranked, torch.tensor([[1, 2]]))
    assert ids.tolist() == [[1, 0]], "best first"
    found = choices.experts[5][0]
    assert found.tie.tolist() == [0.125]
    assert found.margin.tolist() == [0.125]
    assert found.own.tolist() == [[False, True, True, False]]


def test_the_tie_of_a_row_is_a_part_of_the_largest_score():
    scores = torch.tensor([[4.0, -8.0, 3.0, 2.0, 99.0]])
    choices = Choices(forced_rows={2: torch.tensor([[-1, 0, 3]])})
    own = torch.tensor([[True, False, True, False, False]])
    taken = choices.choose_rows(2, positions(1), scores, torch.tensor([4]), own, None)
    assert taken.tolist() == [[True, False, False, True, False]]
    found = choices.rows[2][0]
    assert found.tie.tolist() == [1 / 8], "3 was left out for 2; -8 is the largest of the rows that exist"
    assert found.margin.tolist() == [1 / 8]
    assert found.surplus.tolist() == [0]


def behind_candidates(forced, scores=(1.0, 0.1)):
    """Blocks of two score 8, 6, 5, 1 and 3, the newest; two and the newest are candidates, all six rows are chosen."""
    choices = Choices(forced_rows={4: torch.tensor([forced])})
    candidates = torch.tensor([[True] * 4 + [False] * 4 + [True] * 2])
    source = torch.tensor([[8.0, 0.0, 6.0, 0.0, 0.0, 5.0, 1.0, 1.0, 3.0, 2.0]])
    choices.note_candidates(source, torch.tensor([10]), candidates, 2)
    own_scores = torch.linspace(*scores, 10)[None]
    choices.choose_rows(4, positions(1), own_scores, torch.tensor([10]), candidates, candidates)
    return choices.rows[4][0]


def test_another_candidate_block_is_judged_by_the_cut_between_blocks():
    assert behind_candidates([0, 1, 4, 5, 8, 9]).tie.tolist() == [1 / 8], "block 1 scores 6, block 2 scores 5, of 8"
    assert behind_candidates([0, 1, 6, 7, 8, 9]).tie.tolist() == [5 / 8], "block 3 scores 1"
    assert behind_candidates([2, 3, 4, 5, 8, 9]).tie.tolist() == [3 / 8], "block 0 scores 8, the best outside 5"


def test_the_newest_block_is_never_left_out_for_another_block():
    tie = behind_candidates([0, 1, 2, 3, 4, 5], scores=(0.1, 1.0)).tie.item()
    assert tie == pytest.approx(0.5), "row 9 scores 1.0, row 4 that took its place 0.5; no cut explains it"


def test_rows_beyond_the_candidates_are_surplus_and_no_tie():
    found = behind_candidates([0, 1, 2, 3, 7, 8, 9])
    assert found.surplus.tolist() == [1]
    assert found.tie.tolist() == [0]
    mixed = behind_candidates([0, 1, 4, 5, 7, 8, 9])
    assert mixed.surplus.tolist() == [1]
    assert mixed.tie.tolist() == [1 / 8]


def test_too_few_rows_are_no_tie():
    assert behind_candidates([0, 1, 2, 8, 9]).tie.tolist() == [math.inf], (
        "row 3 of a block at the cut, and nothing for it"
    )


@pytest.mark.parametrize(
    ("forced", "found"),
    [
        ({"forced_experts": {0: torch.zeros(TOKENS, 2, dtype=torch.int64)}}, "3 expert ids in each row"),
        ({"forced_experts": {0: torch.full((TOKENS, 3), -1)}}, "3 expert ids in each row"),
        ({"forced_experts": {0: torch.full((TOKENS, 3), 6)}}, "60 rows of options below 6"),
        ({"forced_experts": {0: torch.zeros(TOKENS - 1, 3, dtype=torch.int64)}}, "60 rows of options below 6"),
        ({"forced_rows": {1: torch.full((TOKENS, 8), 7)}}, "rows that exist for the query"),
    ],
)
def test_choices_that_cannot_be_are_refused_by_name(model, forced, found):
    with pytest.raises(TensorContractError, match=r"Choices: forced_(experts|rows)\[[01]\] must be .*" + found):
        run(model, Choices(**forced))
