"""Verification keeps the target's distribution: every outcome enumerated, none sampled."""

import itertools

import pytest
import torch

from deepinfer_sm80.model.rejection import acceptance, best_token, residual, verify_greedy, verify_sampled

# Target p and draft distribution q in quarters, so that every acceptance and every residual is in quarters too.
FLAT, HALVES, UPPER, SURE = [1, 1, 1, 1], [2, 2, 0, 0], [0, 0, 2, 2], [0, 4, 0, 0]
PAIRS = [(FLAT, HALVES), (HALVES, FLAT), (UPPER, HALVES), (FLAT, FLAT), (SURE, FLAT), (FLAT, SURE), (SURE, SURE)]
MIDDLES = (torch.arange(4) + 0.5) / 4  # a grid of uniforms that meets every share of a quarter equally often


def quarters(*rows):
    return torch.tensor(rows) / 4


def distributions(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).mul(2).softmax(-1).double()


@pytest.mark.parametrize("seed", range(5))
def test_acceptance_and_residual_give_the_targets_distribution(seed):
    p, q = distributions(2, 7, seed=seed)
    q[seed] = 0
    q /= q.sum()
    kept = q * acceptance(p, q)
    assert torch.allclose(kept + (1 - kept.sum()) * residual(p, q), p, atol=1e-12)


def test_acceptance_is_the_ratio_and_at_most_one():
    p, q = quarters(FLAT, HALVES, SURE, FLAT), quarters(HALVES, FLAT, FLAT, SURE)
    want = [[0.5, 0.5, 1, 1], [1, 1, 0, 0], [0, 1, 0, 0], [1, 0.25, 1, 1]]
    assert acceptance(p, q).tolist() == want
    third = 1 / 3
    want = torch.tensor([[0, 0, 0.5, 0.5], [0.5, 0.5, 0, 0], [0, 1, 0, 0], [third, 0, third, third]])
    assert torch.allclose(residual(p, q), want)


def test_no_residual_where_nothing_can_fall():
    p = quarters(FLAT)
    assert torch.equal(residual(p, p.clone()), p)


@pytest.mark.parametrize(("p", "q"), PAIRS[:5])
def test_one_draft_enumerated(p, q):
    """The token in the draft's place is distributed as p, the one behind it as the target's next row."""
    behind = [0, 1, 1, 2]
    first, second = torch.zeros(4), torch.zeros(4)
    for draft, keep, draw in itertools.product(range(4), MIDDLES, MIDDLES):
        weight = q[draft] / 4 / 16
        verdict = verify_sampled(quarters(p, behind), quarters(q), torch.tensor([draft]), torch.stack((keep, draw)))
        first[draft if verdict.accepted else verdict.following] += weight
        if verdict.accepted:
            second[verdict.following] += weight
    assert torch.allclose(first, quarters(p)[0])
    assert torch.allclose(second, second.sum() * quarters(behind)[0])


def test_three_drafts_enumerated():
    """The target's probability of a token depends on the one before it, as in a model; so does the draft's."""
    p_rows, q_rows = {0: FLAT, 1: HALVES, 2: UPPER, 3: FLAT}, {0: HALVES, 1: FLAT, 2: UPPER, 3: FLAT}
    found = {}
    for drafts in itertools.product(range(4), repeat=3):
        context = (0, *drafts)
        p, q = quarters(*(p_rows[c] for c in context)), quarters(*(q_rows[c] for c in context[:3]))
        chance = q.gather(1, torch.tensor(drafts)[:, None]).prod().item()
        if not chance:
            continue
        for uniforms in itertools.product(MIDDLES.tolist(), repeat=4):
            accepted, following = verify_sampled(p, q, torch.tensor(drafts), torch.tensor(uniforms))
            output = (*drafts[:accepted], following)
            found[output] = found.get(output, 0) + chance / 4**4
    # Any output is a prefix of the text: tokens that verification did not reach follow by the target itself.
    text = {}
    for output, chance in found.items():
        for rest in itertools.product(range(4), repeat=4 - len(output)):
            whole, more = (*output, *rest), chance
            for before, token in itertools.pairwise(whole[len(output) - 1 :]):
                more *= p_rows[before][token] / 4
            text[whole] = text.get(whole, 0) + more
    for whole in itertools.product(range(4), repeat=4):
        want = 1.0
        for before, token in itertools.pairwise((0, *whole)):
            want *= p_rows[before][token] / 4
        assert text.get(whole, 0) == pytest.approx(want, abs=1e-9)


@pytest.mark.parametrize("accepted", range(4))
def test_greedy_stops_at_the_first_difference(accepted):
    best = torch.tensor([3, 1, 8, 5])
    logits, drafts = torch.eye(9)[best], best[:3].clone()
    if accepted < 3:
        drafts[accepted] = 0  # those behind it are right again and must fall all the same
    assert verify_greedy(logits, drafts) == (accepted, best[accepted])


@pytest.mark.parametrize("drafts", list(itertools.product(range(3), repeat=2)))
def test_greedy_is_the_limit_of_sampling(drafts):
    """A certain target and certain drafts: the same verdict whatever the uniforms are."""
    drafts, logits = torch.tensor(drafts), torch.eye(3)[[1, 2, 0]]
    q = torch.eye(3)[drafts]
    for u in (0.0, 0.5, 1 - 2**-24):
        assert verify_sampled(logits, q, drafts, torch.full((3,), u)) == verify_greedy(logits, drafts)


def test_ties_go_to_the_lowest_id():
    logits = torch.zeros(3, 100_000, dtype=torch.bfloat16)
    logits[0, [70_000, 99_999]] = 4
    logits[1, [5, 6, 7, 4_000]] = 4
    assert best_token(logits).tolist() == [70_000, 5, 0]
