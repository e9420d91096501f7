"""Speculation gives the target's own greedy tokens, whatever the draft proposes, and forgets what was rejected.

Models run with one thread: how two of them split a tensor may change an exponential by an ulp.
"""

import copy
import dataclasses
import math
import types

import pytest
import torch

from deepinfer_sm80.errors import SequenceStateError, UnsupportedOptionError
from deepinfer_sm80.model.draft import Proposal
from deepinfer_sm80.model.generate import generate
from deepinfer_sm80.model.speculation import generate_speculative

N = 12


class Tokens:
    """A state that keeps the tokens only, and every length it was cut to."""

    def __init__(self):
        self.tokens, self.cuts = [], []

    @property
    def length(self):
        return len(self.tokens)

    def truncate(self, n):
        assert n <= len(self.tokens)
        del self.tokens[n:]
        self.cuts.append(n)


class Script:
    """A target without arithmetic: the best token is a function of the last two tokens."""

    def __init__(self, positions=1000):
        self.config = types.SimpleNamespace(max_position_embeddings=positions)
        self.states = []

    def new_state(self):
        self.states.append(Tokens())
        return self.states[-1]

    def step(self, tokens, state, mode=None):
        pairs = zip([(state.tokens or [0])[-1], *tokens], tokens, strict=False)
        state.tokens += list(tokens)
        assert len(state.tokens) <= self.config.max_position_embeddings
        hidden = torch.tensor([(5 * a + 3 * b + 1) % 32 for a, b in pairs])
        return types.SimpleNamespace(hidden=hidden, features=torch.tensor(tokens)[:, None, None].expand(-1, 3, 1))

    def logits(self, hidden):
        return torch.eye(32)[hidden].bfloat16()


class Oracle:
    """Knows the text. Round r drafts ``right(r, K)`` of its tokens and then wrong ones."""

    def __init__(self, text, right):
        self.text, self.right, self.contexts, self.rounds = text, right, [], 0

    def new_context(self):
        self.contexts.append([])
        return self.contexts[-1]

    def extend(self, context, features):
        context.append(features)

    def propose(self, context, anchor, count):
        position = sum(len(features) for features in context)
        assert self.text[position] == anchor
        tokens = torch.tensor(self.text[position + 1 :][:count])
        tokens = torch.cat((tokens, tokens.new_zeros(count - len(tokens))))
        wrong = torch.arange(count) >= self.right(self.rounds, count)
        self.rounds += 1
        return Proposal(torch.where(wrong, tokens + 1, tokens), torch.empty(0), torch.linspace(0.9, 0.1, count))


DRAFTS = {
    "perfect": lambda _, K: K,
    "wrong": lambda _, K: 0,
    "partly": lambda r, K: r % (K + 1),
}


@pytest.mark.parametrize("K", range(1, 8))
@pytest.mark.parametrize("kind", DRAFTS)
def test_whatever_is_drafted_the_tokens_are_the_targets(K, kind):
    prompt, n, target = [3, 1, 4], 40, Script()
    want, logprobs = generate(target, prompt, n)
    oracle = Oracle(prompt + generate(target, prompt, n + 10)[0], DRAFTS[kind])
    got = generate_speculative(target, oracle, prompt, n, K)
    assert got.tokens == want
    assert torch.equal(got.logprobs, logprobs)
    rights = [DRAFTS[kind](r, K) for r in range(len(got.rounds))]
    assert [r.accepted for r in got.rounds] == rights
    assert got.drafted == K * len(got.rounds)
    assert got.accepted == sum(rights)
    if kind == "perfect":
        assert len(got.rounds) == math.ceil((n - 1) / (K + 1))
    assert all(r.confidences == pytest.approx(torch.linspace(0.9, 0.1, K).tolist()) for r in got.rounds)


@pytest.mark.parametrize("kind", DRAFTS)
def test_rejected_positions_are_forgotten_by_target_and_draft(kind):
    prompt, n, target = [3, 1, 4], 40, Script()
    text = prompt + generate(target, prompt, n + 10)[0]
    oracle = Oracle(text, DRAFTS[kind])
    got = generate_speculative(target, oracle, prompt, n, 5)
    state, positions = target.states[-1], len(prompt)
    for accepted, cut in zip((r.accepted for r in got.rounds), state.cuts, strict=True):
        positions += accepted + 1
        assert cut == positions
    assert state.tokens == text[:positions]
    written = torch.cat(oracle.contexts[-1]).flatten(1)[:, 0].tolist()
    assert written == text[:positions], "features of a rejected token were written, or of an accepted one lost"


def test_near_the_last_position_less_is_drafted():
    prompt, target = [3, 1, 4], Script(positions=16)
    oracle = Oracle(prompt + generate(Script(), prompt, 30)[0], DRAFTS["wrong"])
    got = generate_speculative(target, oracle, prompt, 13, 5)
    assert got.tokens == generate(Script(), prompt, 13)[0]
    assert [len(r.drafts) for r in got.rounds] == [5] * 8 + [4, 3, 2, 1]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"prompt": []}, r"prompt tokens=0.*1 or more"),
        ({"n": 0}, r"n=0.*1 or more"),
        ({"K": 0}, r"K=0.*1 or more"),
        ({"chunk": 0}, r"chunk=0.*1 or more"),
        ({"n": 998}, r"prompt tokens \+ n=1001.*max_position_embeddings = 1000 or fewer"),
    ],
)
def test_calls_that_cannot_be_answered(change, sentence):
    call = {"prompt": [3, 1, 4], "n": 5, "K": 5, "chunk": None} | change
    with pytest.raises(UnsupportedOptionError, match=sentence):
        generate_speculative(Script(), Oracle([], DRAFTS["wrong"]), **call)


@pytest.fixture(scope="module", autouse=True)
def one_thread_for_all():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def target(speculative):
    return speculative.target


@pytest.fixture(scope="module")
def greedy(speculative, target):
    """``greedy(first, last)``: that part of the text as a prompt, and what the target says behind it."""
    known = {}

    def answer(first, last):
        if (first, last) not in known:
            known[first, last] = generate(target, speculative.text[first:last], N)
        return speculative.text[first:last], *known[first, last]

    return answer


def agrees(speculative, target, known, K, kind, chunk=None):
    prompt, tokens, logprobs = known
    drafter = speculative.draft if kind == "draft" else Oracle(prompt + tokens, DRAFTS[kind])
    got = generate_speculative(target, drafter, prompt, N, K, chunk)
    assert got.tokens == tokens
    assert torch.equal(got.logprobs, logprobs)


CASES = [
    ("draft", 5),
    ("wrong", 5),
    ("wrong", 15),
    ("perfect", 1),
    ("perfect", 7),
    *(("partly", K) for K in range(1, 8)),
]


@pytest.mark.parametrize(("kind", "K"), CASES)
def test_a_short_text_continues_as_without_a_draft(speculative, target, greedy, kind, K):
    agrees(speculative, target, greedy(7, 12), K, kind)


def test_more_drafts_than_the_compressors_ring_remembers_are_refused(speculative, target, greedy):
    """The ring of a pooling compressor holds 16 tokens: behind 16 rejected drafts an open pair is lost."""
    with pytest.raises(SequenceStateError, match="n of truncate"):
        agrees(speculative, target, greedy(7, 12), 16, "wrong")


@pytest.mark.parametrize(("prompt", "kind"), [((0, 1), "partly"), ((230, 352), "draft"), ((200, 340), "partly")])
def test_texts_continue_as_without_a_draft(speculative, target, greedy, prompt, kind):
    """One token; a text that leaves the window while tokens are generated; one beyond it."""
    agrees(speculative, target, greedy(*prompt), 5, kind)


@pytest.mark.parametrize("chunk", [50, 128])
def test_a_prompt_in_chunks_continues_as_in_one(speculative, target, greedy, chunk):
    agrees(speculative, target, greedy(200, 340), 5, "partly", chunk)


@pytest.mark.parametrize("prompt", [(7, 12), (230, 352)])
def test_the_context_is_that_of_the_accepted_text(speculative, target, greedy, prompt):
    """Rows of the draft after rejections, partial and full acceptance: as if the text had always been known."""
    given, tokens, _ = greedy(*prompt)
    draft, oracle, kept = speculative.draft, Oracle(given + tokens, DRAFTS["partly"]), []

    class Both:
        def new_context(self):
            kept.append((draft.new_context(), oracle.new_context()))
            return kept[0]

        def extend(self, context, features):
            draft.extend(context[0], features)
            oracle.extend(context[1], features)

        def propose(self, context, anchor, count):
            return oracle.propose(context[1], anchor, count)

    got = generate_speculative(target, Both(), given, N, 3)
    assert {r.accepted for r in got.rounds} == {0, 1, 2, 3}
    context, text = kept[0][0], (given + tokens)[: len(given) + len(got.rounds) + got.accepted]
    assert context.length == len(text)
    fresh = draft.new_context()
    draft.extend(fresh, target.step(text, target.new_state()).features)
    assert all(torch.equal(mine, other) for mine, other in zip(context.rows, fresh.rows, strict=True))


def test_a_trimmed_prompt_continues_as_without_a_draft(speculative, target):
    """Rows that bounded replay trims have no features; they lie outside the draft's window."""
    trimmed = copy.copy(target)
    trimmed.switches = dataclasses.replace(target.switches, bounded_replay=True)
    prompt = speculative.text[200:340]
    features = trimmed.step(prompt, trimmed.new_state()).features
    assert features.any(-1).all(-1).tolist() == [False] * 12 + [True] * 128
    agrees(speculative, trimmed, (prompt, *generate(trimmed, prompt, N)), 5, "partly")


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "K"), [("draft", 5), ("partly", 3), ("partly", 7)])
def test_tiny_continues_as_without_a_draft(tiny_speculative, tiny_greedy, kind, K):
    agrees(tiny_speculative, tiny_speculative.target, tiny_greedy, K, kind)


@pytest.fixture(scope="module")
def tiny_greedy(tiny_speculative):
    prompt = tiny_speculative.text[:300]
    return prompt, *generate(tiny_speculative.target, prompt, N)
