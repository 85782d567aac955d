"""Speculation changes the speed, never the law.

A tiny model (logits are a function of the last two tokens) is decoded by the real pieces: sequences,
trees, hints that land, plans, walks, and the picker of both sides. The joint counts of the first three
tokens are compared with the exact law, which is computed here in plain float64 Python that shares no
code with the package. Broken variants at the end show that the comparison can fail.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from forerun.core import pick as pick_module
from forerun.core.cost import PassCost
from forerun.core.formulas import acceptance, coupled_acceptance_bound
from forerun.core.law import Law, as_law, draft_law, filtered, judge, residual
from forerun.core.noise import Domain, uniform, uniforms
from forerun.core.params import Sampling, Verification
from forerun.core.pick import Guess, Picker, Proposal
from forerun.core.plan import Waiting, plan_pass
from forerun.core.sequence import Hint, TokenSequence
from forerun.core.tree import ROOT, Bounds, NodeLaw, TokenTree
from forerun.core.walk import walk
from tests.statistics_oracle import (
    LEVEL,
    chi_square_survival,
    g_test,
    near_share,
    total_variation,
    variation_bound,
)

COUPLED, REJECTION = Verification.COUPLED, Verification.REJECTION
VOCAB = 5
PROMPT = (1, 3, 0, 2)
LENGTH = 3  # tokens compared
DRAWS = 20_000
FEWER = 5_000  # for effects that are large where they exist

Logits = NDArray[np.float32]
Rows = Mapping[tuple[int, int], Logits]  # [VOCAB] by the last two tokens
Exact = dict[tuple[int, ...], float]

# --- the exact law, sharing nothing with the package --------------------------------------------------


def exact_row(logits: Sequence[float], sampling: Sampling, banned: Sequence[int] = ()) -> dict[int, float]:
    """Temperature, top_k, top_p, min_p in that order; logit descending, then id ascending."""
    order = sorted((t for t in range(len(logits)) if t not in banned), key=lambda t: (-float(logits[t]), t))
    peak = float(logits[order[0]])
    weights = {t: math.exp((float(logits[t]) - peak) / sampling.temperature) for t in order}
    if sampling.top_k:
        order = order[: sampling.top_k]
    if sampling.top_p < 1.0:
        mass = math.fsum(weights[t] for t in order)
        kept: list[int] = []
        while order and math.fsum(weights[t] for t in kept) < sampling.top_p * mass:
            kept.append(order.pop(0))
        order = kept
    order = [t for t in order if weights[t] >= sampling.min_p * weights[order[0]]]
    mass = math.fsum(weights[t] for t in order)
    return {t: weights[t] / mass for t in order}


def exact_joint(rows: Rows, sampling: Sampling, ends: Sequence[int] = (), ends_from: int = 0) -> Exact:
    """Law of the first LENGTH tokens after PROMPT; an end token ends the answer."""
    done: Exact = {}
    open_: Exact = {(): 1.0}
    for position in range(len(PROMPT), len(PROMPT) + LENGTH):
        grown: Exact = {}
        for tokens, chance in open_.items():
            last = (PROMPT + tokens)[-2:]
            banned = ends if position < ends_from else ()
            for token, probability in exact_row(rows[last], sampling, banned).items():
                into = done if token in ends else grown
                into[(*tokens, token)] = chance * probability
        open_ = grown
    return done | open_


# --- a tiny target and its drafts ---------------------------------------------------------------------


def _rows(make: Callable[[tuple[int, int]], NDArray[np.float64]]) -> Rows:
    """Rounded to quarters, as bfloat16 would: ties stand at the top and across the cuts."""
    return {last: (np.round(make(last) * 4.0) / 4.0).astype(np.float32) for last in product(range(VOCAB), repeat=2)}


_source = np.random.default_rng(20_260_101)
TARGET: Rows = _rows(lambda _: _source.normal(0.0, 1.2, VOCAB))
DRAFTS: dict[str, Rows] = {
    "equal": TARGET,
    "near": _rows(lambda last: TARGET[last] + _source.normal(0.0, 0.5, VOCAB)),
    "unrelated": _rows(lambda _: _source.normal(0.0, 1.2, VOCAB)),
}
LOOKED_UP: dict[tuple[int, int], int] = {last: int(_source.integers(VOCAB)) for last in TARGET}
"""A draft without a distribution, as an n-gram lookup is."""

NONE: dict[str, Any] = {}
FILTERS: dict[str, dict[str, Any]] = {
    "none": NONE,
    "top_k=3": {"top_k": 3},
    "top_p=0.8": {"top_p": 0.8},
    "min_p=0.2": {"min_p": 0.2},
}
TEMPERATURES = (0.3, 1.0, 1.7)
LOOKAHEADS = (1, 2, 4)


@dataclass(frozen=True)
class Case:
    sampling: Sampling
    draft: str  # a key of DRAFTS, or "lookup"
    lookahead: int
    filters: str = "none"
    siblings: bool = False  # check the whole tree, not one chain of it
    late: bool = False  # every hint lands a pass after it was made
    ends: tuple[int, ...] = ()
    ends_from: int = 0

    @property
    def name(self) -> str:
        flags = [flag for flag in ("siblings", "late", "ends") if getattr(self, flag)]
        mode = self.sampling.verification.name.lower()
        return "-".join([mode, f"T{self.sampling.temperature}", self.filters, self.draft, f"k{self.lookahead}", *flags])


class Loop:
    """Draft, hint, plan, walk, commit, re-root: what the workers do, without tensors and time."""

    def __init__(self, case: Case, target: Rows = TARGET, drafts: Mapping[str, Rows] = DRAFTS) -> None:
        self.case = case
        self.target = target
        self.draft = drafts.get(case.draft)  # None: looked up
        self.chain_only = case.sampling.chain_only
        self.bounds = Bounds(vocab_size=VOCAB, ends=frozenset(case.ends), one_child=self.chain_only)
        self.passes = self.tokens = 0
        self.judged = self.agreed = 0  # rows with a checked first guess; those where it was the target's token
        self.accepted = 0
        self.first_judged = self.first_agreed = 0  # at the first token of an answer alone
        self.survived = 0  # passes that began with a tree left by the one before
        self.looked_up = 0

    # What a broken variant replaces:

    def target_pick(
        self, picker: Picker, tree: TokenTree, row: int, last: tuple[int, int], position: int, child: int | None
    ) -> int:
        proposal = None if child is None else Proposal(tree.tokens[child], tree.laws[child])
        return picker.pick(self.target[last], position, proposal)

    def draft_guess(self, picker: Picker, last: tuple[int, int], position: int) -> Guess:
        if self.draft is None:
            return Guess(LOOKED_UP[last], (), None)
        return picker.guess(self.draft[last], position)

    def score(self, guess: Guess) -> float:
        """Never from the guess itself in rejection mode."""
        return 0.8

    def checked(self, tree: TokenTree) -> Sequence[int]:
        if self.case.siblings:
            return range(1, len(tree))
        k = self.case.lookahead
        (share,) = plan_pass([Waiting(0, 1, 0, tree, k, self.case.sampling.chain_only)], k + 1, 64, PassCost())
        return share.nodes

    # The loop:

    def answer(self, seed: int) -> tuple[int, ...]:
        case = self.case
        picker = Picker(replace(case.sampling, seed=seed), VOCAB, case.ends, case.ends_from)
        target, draft = TokenSequence(PROMPT, self.bounds), TokenSequence(PROMPT, self.bounds)
        under_way: list[Hint] = []
        goal = len(PROMPT) + LENGTH
        while target.committed_len < goal:
            room = goal - target.committed_len
            self.survived += target.tree.node_count > 0
            self.grow(draft, picker, min(case.lookahead + 2, room))  # deeper than is checked: run-ahead
            under_way.append(Hint(draft.committed_len, draft.tail, draft.tree))
            if len(under_way) > case.late:
                target.land(under_way.pop(0), room)
            result = self.one_pass(target, picker, room)
            target.advance(result.tokens)
            draft.advance(result.tokens)
            if result.ended:
                break
        return tuple(target.tokens[len(PROMPT) :])

    def grow(self, draft: TokenSequence, picker: Picker, depth: int) -> None:
        """A chain of first guesses, with the runner-up beside each where the mode allows it."""
        tree, node = draft.tree, ROOT
        last = (draft.tokens[-2], draft.tokens[-1])
        for position in range(draft.committed_len, draft.committed_len + depth):
            child = next(iter(tree.children(node)), None)
            if child is None:
                guess = self.draft_guess(picker, last, position)
                child = tree.add(node, guess.first, self.score(guess), None, guess.law)
                if guess.second is not None and not self.chain_only:
                    tree.add(node, guess.second, 0.3)
            token = tree.tokens[child]
            if token in self.case.ends:
                return
            last = (last[1], token)
            node = child

    def one_pass(self, target: TokenSequence, picker: Picker, room: int) -> Any:
        tree = target.tree
        base_len = target.committed_len

        def pick(row: int, depth: int, child: int | None) -> int:
            before = target.tokens[-2] if row == ROOT else tree.tokens[tree.parents[row]]
            token = self.target_pick(picker, tree, row, (before, tree.tokens[row]), base_len + depth, child)
            if child is not None:
                agreed = token == tree.tokens[child]
                self.judged += 1
                self.agreed += agreed
                if base_len + depth == len(PROMPT):
                    self.first_judged += 1
                    self.first_agreed += agreed
            return token

        result = walk(tree, self.checked(tree), pick, self.case.ends, room)
        self.passes += 1
        self.tokens += len(result.tokens)
        self.accepted += result.accepted
        return result

    def counts(self, draws: int = DRAWS, first_seed: int = 0) -> Counter[tuple[int, ...]]:
        return Counter(self.answer(seed) for seed in range(first_seed, first_seed + draws))

    def exact(self) -> Exact:
        return exact_joint(self.target, self.case.sampling, self.case.ends, self.case.ends_from)


# --- which cases ---------------------------------------------------------------------------------------


def _covering_cases() -> Iterator[Case]:
    """Every temperature with every filter for both verifications; drafts and lookaheads as orthogonal
    Latin squares over them, so that every pair of settings occurs (asserted below)."""
    drafts = tuple(DRAFTS)
    for shift, verification in enumerate((COUPLED, REJECTION)):
        for (i, temperature), (j, filters) in product(enumerate(TEMPERATURES), enumerate(FILTERS)):
            yield Case(
                Sampling(temperature=temperature, verification=verification, **FILTERS[filters]),
                drafts[(i + j + shift) % 3],
                LOOKAHEADS[(i + 2 * j) % 3],
                filters,
                siblings=verification is COUPLED and (i + j // 2) % 2 == 0,
            )


def _case(
    verification: Verification, temperature: float, filters: str, draft: str, lookahead: int, **more: Any
) -> Case:
    sampling = Sampling(temperature=temperature, verification=verification, **FILTERS[filters])
    return Case(sampling, draft, lookahead, filters, **more)


COVERING = list(_covering_cases())
FURTHER = [
    _case(REJECTION, 0.3, "top_p=0.8", "lookup", 4),
    _case(REJECTION, 1.0, "none", "lookup", 2),
    _case(REJECTION, 1.7, "top_k=3", "lookup", 1),
    _case(COUPLED, 1.0, "none", "near", 4, late=True),
    _case(REJECTION, 1.0, "none", "near", 4, late=True),
    _case(COUPLED, 1.0, "top_p=0.8", "near", 2, ends=(1, 4), ends_from=len(PROMPT) + 1),
    _case(REJECTION, 1.0, "top_p=0.8", "near", 2, ends=(1, 4), ends_from=len(PROMPT) + 1),
]


@pytest.fixture
def memo(monkeypatch: pytest.MonkeyPatch) -> None:
    """Computes the law of each of the few rows once. They are the package's own laws; the draws from
    them and the tests against them are done every time."""
    laws: dict[tuple[bytes, float, int, float, float], Law] = {}
    sent: dict[int, NodeLaw] = {}  # by id of a law in `laws`

    def filtered_once(logits: Logits, sampling: Sampling) -> Law:
        key = (logits.tobytes(), sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p)
        if key not in laws:
            laws[key] = filtered(logits, sampling)
        return laws[key]

    def draft_law_once(law: Law, k: int) -> NodeLaw:
        if id(law) not in sent:
            sent[id(law)] = draft_law(law, k)
        return sent[id(law)]

    monkeypatch.setattr(pick_module, "filtered", filtered_once)
    monkeypatch.setattr(pick_module, "draft_law", draft_law_once)
    monkeypatch.setattr(pick_module, "as_law", cache(as_law))


def assert_exact(counts: Mapping[tuple[int, ...], int], law: Exact) -> None:
    impossible = {cell: count for cell, count in counts.items() if cell not in law}
    assert not impossible, f"tokens of probability zero were drawn: {impossible}"
    p_value = g_test(counts, law)
    assert p_value > LEVEL, f"G-test: p = {p_value:.3g}"
    draws = sum(counts.values())
    variation, bound = total_variation(counts, law), variation_bound(law, draws)
    assert variation < bound, f"total variation {variation:.4f} over {len(law)} cells, at most {bound:.4f}"
    for place in range(LENGTH):  # few cells, so that 0.02 is a bound which the noise of DRAWS respects
        observed: Counter[int] = Counter()
        expected: dict[int, float] = {}
        for cell, count in counts.items():
            observed[cell[place] if place < len(cell) else -1] += count
        for cell, chance in law.items():
            token = cell[place] if place < len(cell) else -1
            expected[token] = expected.get(token, 0.0) + chance
        bound = 0.02 if draws >= DRAWS else variation_bound(expected, draws)
        assert total_variation(observed, expected) < bound, f"token {place}"


def first_token_laws(case: Case) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """p and q at the first token, as vectors over the vocabulary."""
    banned = case.ends if len(PROMPT) < case.ends_from else ()
    last = PROMPT[-2:]
    p = exact_row(TARGET[last], case.sampling, banned)
    q = {LOOKED_UP[last]: 1.0} if case.draft == "lookup" else exact_row(DRAFTS[case.draft][last], case.sampling, banned)
    vector = [np.array([law.get(token, 0.0) for token in range(VOCAB)]) for law in (p, q)]
    return vector[0], vector[1]


def assert_speculated(loop: Loop) -> None:
    """The law must not be right because nothing was speculated; and acceptance is what theory says."""
    case = loop.case
    assert loop.judged > 0 and loop.passes > 0
    p, q = first_token_laws(case)
    if case.draft == "equal":
        assert loop.tokens / loop.passes > 1.2
        assert loop.agreed == loop.judged  # acceptance 1.0
        assert loop.accepted == loop.agreed
    elif case.draft == "near":
        assert loop.tokens / loop.passes > 1.1
        assert 0 < loop.agreed < loop.judged
    else:
        assert loop.agreed < loop.judged
    if not loop.first_judged:  # late hints never stand at the first token
        assert case.late
    elif case.sampling.verification is REJECTION:
        assert near_share(loop.first_agreed, loop.first_judged, acceptance(p, q))
    else:
        noise = 4.5 * math.sqrt(0.25 / loop.first_judged)
        assert coupled_acceptance_bound(p, q) - noise <= loop.first_agreed / loop.first_judged
        assert loop.first_agreed / loop.first_judged <= acceptance(p, q) + noise


def test_cases_cover_every_pair_of_settings() -> None:
    for verification in (COUPLED, REJECTION):
        cases = [case for case in COVERING if case.sampling.verification is verification]
        temperatures = {(case.sampling.temperature, case.filters) for case in cases}
        assert temperatures == set(product(TEMPERATURES, FILTERS))
        columns = [[case.sampling.temperature, case.filters, case.draft, case.lookahead] for case in cases]
        domains = [TEMPERATURES, tuple(FILTERS), tuple(DRAFTS), LOOKAHEADS]
        for one, other in product(range(4), repeat=2):
            if one < other:
                seen = {(row[one], row[other]) for row in columns}
                assert seen == set(product(domains[one], domains[other]))
    assert {case.siblings for case in COVERING if case.sampling.verification is COUPLED} == {False, True}


def test_toy_model_has_ties_and_the_filters_cut() -> None:
    """A case that filters nothing, or meets no tie, would show less than its name says."""
    assert sum(len(set(row.tolist())) < VOCAB for row in TARGET.values()) >= 5
    for temperature, filters in product(TEMPERATURES, FILTERS):
        sampling = Sampling(temperature=temperature, **FILTERS[filters])
        cut = sum(len(exact_row(row, sampling)) < VOCAB for row in TARGET.values())
        assert cut == 0 if filters == "none" else cut >= 10
    for draft in ("near", "unrelated"):
        p, q = first_token_laws(_case(COUPLED, 1.0, "none", draft, 1))
        assert acceptance(p, q) < (0.97 if draft == "near" else 0.85)


@pytest.mark.parametrize("case", COVERING + FURTHER, ids=lambda case: case.name)
def test_first_three_tokens_follow_the_exact_law(case: Case, memo: None) -> None:
    loop = Loop(case)
    counts = loop.counts()
    assert sum(counts.values()) == DRAWS
    assert_exact(counts, loop.exact())
    assert_speculated(loop)


@pytest.mark.parametrize("verification", [COUPLED, REJECTION])
def test_plain_decoding_follows_the_exact_law(verification: Verification, memo: None) -> None:
    """Without any hint: the bonus draw alone."""

    class Alone(Loop):
        def grow(self, draft: TokenSequence, picker: Picker, depth: int) -> None:
            pass

    loop = Alone(_case(verification, 1.0, "none", "unrelated", 1))
    assert_exact(loop.counts(FEWER), loop.exact())
    assert loop.judged == 0 and loop.tokens == loop.passes


@pytest.mark.parametrize("verification", [COUPLED, REJECTION])
def test_remembered_laws_change_no_token(verification: Verification, request: pytest.FixtureRequest) -> None:
    case = _case(verification, 1.0, "top_p=0.8", "near", 2)
    honest = [Loop(case).answer(seed) for seed in range(300)]
    request.getfixturevalue("memo")
    assert pick_module.filtered is not filtered
    assert [Loop(case).answer(seed) for seed in range(300)] == honest


def test_oracle_agrees_with_the_law_of_the_package() -> None:
    for temperature, filters in product(TEMPERATURES, FILTERS):
        sampling = Sampling(temperature=temperature, **FILTERS[filters])
        for row in TARGET.values():
            law = Picker(sampling, VOCAB).law(row, 0)
            exact = exact_row(row, sampling)
            assert set(law.ids.tolist()) == set(exact)
            assert all(law.of(token) == pytest.approx(chance, rel=1e-12) for token, chance in exact.items())


def test_a_drawn_token_without_its_law_is_still_exact(memo: None) -> None:
    """It counts as a point mass: less of it is accepted, and nothing is biased."""

    class Forgetful(Loop):
        def draft_guess(self, picker: Picker, last: tuple[int, int], position: int) -> Guess:
            return Guess(super().draft_guess(picker, last, position).first, (), None)

    case = _case(REJECTION, 1.0, "none", "equal", 2)
    loop = Forgetful(case)
    assert_exact(loop.counts(FEWER), loop.exact())
    p, _ = first_token_laws(case)
    assert near_share(loop.first_agreed, loop.first_judged, float((p * p).sum()))


def test_trees_survive_between_passes(memo: None) -> None:
    """The loop above would not test re-rooting if every pass began with an empty tree."""
    for verification in (COUPLED, REJECTION):
        loop = Loop(_case(verification, 1.0, "none", "near", 1))
        loop.counts(500)
        assert loop.survived > 50


# --- the promise of coupled and greedy picks: the same text, whatever is hinted -------------------------


@st.composite
def trees(draw: st.DrawFn, root: int) -> TokenTree:
    """Any tree of at most 12 guesses, of any quality."""
    tree = TokenTree(root)
    for _ in range(draw(st.integers(0, 12))):
        parent = draw(st.integers(0, len(tree) - 1))
        tree.add(parent, draw(st.integers(0, VOCAB - 1)), draw(st.floats(0.0, 1.0)))
    return tree


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    data=st.data(),
    seed=st.integers(0, 2**64 - 1),
    temperature=st.sampled_from([0.0, 0.3, 1.0, 1.7]),
    filters=st.sampled_from(sorted(FILTERS)),
    length=st.integers(1, 12),
)
def test_no_hint_changes_a_token(data: st.DataObject, seed: int, temperature: float, filters: str, length: int) -> None:
    """Trees of random tokens, from any earlier prefix, any ancestor-closed part of them checked."""
    picker = Picker(Sampling(temperature=temperature, seed=seed, **FILTERS[filters]), VOCAB)
    plain = list(PROMPT)
    for position in range(len(PROMPT), len(PROMPT) + length):
        plain.append(picker.pick(TARGET[plain[-2], plain[-1]], position))

    sequence = TokenSequence(PROMPT)
    while (room := len(plain) - sequence.committed_len) > 0:
        base_len = data.draw(st.integers(len(PROMPT), sequence.committed_len))
        guessed = data.draw(trees(sequence.tokens[base_len - 1]))
        sequence.land(Hint(base_len, tuple(sequence.tokens[base_len - 2 : base_len]), guessed), room)
        tree, base_len = sequence.tree, sequence.committed_len
        checked = {row for tip in data.draw(st.sets(st.integers(0, len(tree) - 1))) for row in tree.path(tip)}

        def pick(row: int, depth: int, child: int | None, tree: TokenTree = tree, base_len: int = base_len) -> int:
            before = sequence.tokens[-2] if row == ROOT else tree.tokens[tree.parents[row]]
            return picker.pick(TARGET[before, tree.tokens[row]], base_len + depth)

        result = walk(tree, checked, pick, (), room)
        assert len(result.tokens) == result.accepted + (0 if result.accepted == room else 1)
        sequence.advance(result.tokens)
    assert sequence.tokens == plain


@pytest.mark.parametrize("temperature", [0.0, 0.3, 1.0, 1.7])
@pytest.mark.parametrize("draft", [*DRAFTS, "lookup"])
@pytest.mark.parametrize("lookahead", [1, 2, 4, 8])
def test_coupled_answers_are_those_of_plain_decoding(temperature: float, draft: str, lookahead: int) -> None:
    loop = Loop(_case(COUPLED, temperature, "none", draft, lookahead, siblings=lookahead == 2))
    for seed in range(40):
        picker = Picker(replace(loop.case.sampling, seed=seed), VOCAB)
        plain = list(PROMPT)
        for position in range(len(PROMPT), len(PROMPT) + LENGTH):
            plain.append(picker.pick(TARGET[plain[-2], plain[-1]], position))
        assert loop.answer(seed) == tuple(plain[len(PROMPT) :])
    if draft == "equal":
        assert loop.tokens / loop.passes > 1.2 and loop.agreed == loop.judged


# --- the A/B/C example ----------------------------------------------------------------------------------

A, B, C = range(3)
P_ABC = Law(np.arange(3), np.array([0.3, 0.5, 0.2]))
Q_ABC = Law(np.arange(3), np.array([0.4, 0.4, 0.2]))
ABC = {A: 0.3, B: 0.5, C: 0.2}


def _drawn_and_judged(seeds: range) -> Iterator[tuple[int, int]]:
    for seed in seeds:
        drawn, _ = Q_ABC.race(seed, 7, Domain.DRAFT)
        yield drawn, judge(P_ABC, Q_ABC, drawn, seed, 7)


def test_abc_residual_is_all_on_b() -> None:
    left = residual(P_ABC, Q_ABC)
    assert left.ids.tolist() == [B]
    assert left.probabilities.tolist() == [1.0]


def test_abc_residual_survives_the_wire() -> None:
    """q travels as float32 and is renormalised: what is left beside B is rounding."""
    left = residual(P_ABC, as_law(draft_law(Q_ABC, 64)))
    assert left.of(B) > 1.0 - 1e-6 and left.of(A) == 0.0


def test_abc_each_token_is_judged_as_the_paper_says() -> None:
    for seed in range(4_000):
        accepted = uniform(seed, 7, Domain.ACCEPT) < 0.75  # 0.3 / 0.4
        assert judge(P_ABC, Q_ABC, A, seed, 7) == (A if accepted else B)
        assert judge(P_ABC, Q_ABC, B, seed, 7) == B
        assert judge(P_ABC, Q_ABC, C, seed, 7) == C


def test_abc_by_counting() -> None:
    pairs = Counter(_drawn_and_judged(range(DRAWS)))
    drawn = {token: sum(count for (first, _), count in pairs.items() if first == token) for token in ABC}
    assert g_test(drawn, {A: 0.4, B: 0.4, C: 0.2}) > LEVEL
    assert near_share(pairs[A, A], drawn[A], 0.75)
    assert pairs[A, B] == drawn[A] - pairs[A, A]
    assert set(pairs) == {(A, A), (A, B), (B, B), (C, C)}
    assert near_share(DRAWS - pairs[A, B], DRAWS, acceptance(P_ABC.probabilities, Q_ABC.probabilities))
    judged = {token: sum(count for (_, last), count in pairs.items() if last == token) for token in ABC}
    assert g_test(judged, ABC) > LEVEL


def test_abc_through_the_picker() -> None:
    """The same example from logits: draft and target each know their own row alone."""
    p_row, q_row = (np.log(law.probabilities).astype(np.float32) for law in (P_ABC, Q_ABC))
    counts: Counter[int] = Counter()
    drawn_a = kept_a = 0
    for seed in range(DRAWS):
        picker = Picker(Sampling(seed=seed, verification=REJECTION), 3)
        guess = picker.guess(q_row, 7)
        token = picker.pick(p_row, 7, Proposal(guess.first, guess.law))
        counts[token] += 1
        if guess.first == A:
            drawn_a += 1
            kept_a += token == A
            assert token in (A, B)
    assert near_share(kept_a, drawn_a, 0.75)
    assert g_test(counts, ABC) > LEVEL


def test_abc_with_low_q_left_unchecked_is_the_known_wrong_law() -> None:
    """Broken on purpose: C is drawn with q = 0.2 and not checked, so the target draws its own token."""
    counts: Counter[int] = Counter()
    for seed in range(DRAWS):
        drawn, _ = Q_ABC.race(seed, 7, Domain.DRAFT)
        unchecked = Q_ABC.of(drawn) < 0.3
        counts[P_ABC.race(seed, 7, Domain.RESIDUAL)[0] if unchecked else judge(P_ABC, Q_ABC, drawn, seed, 7)] += 1
    assert g_test(counts, ABC) < 1e-12
    assert g_test(counts, {A: 0.36, B: 0.60, C: 0.04}) > LEVEL


def test_scores_that_follow_q_bias_nothing(memo: None) -> None:
    """A draft may send its q as the score of a drawn node. In rejection mode the plan must not leave the
    node unchecked for that: whether a node is checked depends on its ancestors alone."""
    p = np.log(np.array([0.5, 0.125, 0.125, 0.125, 0.125])).astype(np.float32)
    q = np.log(np.array([0.86, 0.035, 0.035, 0.035, 0.035])).astype(np.float32)

    class ScoredByQ(Loop):
        def score(self, guess: Guess) -> float:
            assert guess.law is not None
            return as_law(guess.law).of(guess.first)

    case = _case(REJECTION, 1.0, "none", "skewed", 1)
    loop = ScoredByQ(case, dict.fromkeys(TARGET, p), {"skewed": dict.fromkeys(TARGET, q)})
    counts = loop.counts(FEWER)
    assert loop.judged > 0
    assert g_test(counts, loop.exact()) > LEVEL


@pytest.mark.parametrize("verification", [COUPLED, REJECTION])
def test_a_draft_with_a_larger_vocabulary_biases_nothing(verification: Verification, memo: None) -> None:
    """Padded embedding tables differ in size. In rejection mode a drawn token that the target does not know
    may not just vanish: the target would draw from p where it owes a draw from the residual."""
    source = np.random.default_rng(5)
    larger: Rows = {
        last: source.normal(0.0, 1.2, VOCAB + 2).astype(np.float32) for last in product(range(VOCAB + 2), repeat=2)
    }

    unknown = 0

    class Padded(Loop):
        def draft_guess(self, picker: Picker, last: tuple[int, int], position: int) -> Guess:
            nonlocal unknown
            guess = replace(picker, vocab_size=VOCAB + 2).guess(larger[last], position)
            unknown += guess.first >= VOCAB
            return guess

    loop = Padded(_case(verification, 1.0, "none", "unrelated", 2))
    assert_exact(loop.counts(FEWER), loop.exact())
    assert unknown > 100


# --- broken variants: each must be seen -----------------------------------------------------------------


class OneNoiseForAllPositions(Loop):
    """The position is missing from the key."""

    def target_pick(
        self, picker: Picker, tree: TokenTree, row: int, last: tuple[int, int], position: int, child: int | None
    ) -> int:
        return super().target_pick(picker, tree, row, last, len(PROMPT), child)

    def draft_guess(self, picker: Picker, last: tuple[int, int], position: int) -> Guess:
        return super().draft_guess(picker, last, len(PROMPT))


class SharedNoiseInTheTest(Loop):
    """The noise that chose the draft's token also judges it."""

    def target_pick(
        self, picker: Picker, tree: TokenTree, row: int, last: tuple[int, int], position: int, child: int | None
    ) -> int:
        if child is None:
            return super().target_pick(picker, tree, row, last, position, child)
        token, node_law, seed = tree.tokens[child], tree.laws[child], picker.sampling.seed
        assert node_law is not None
        p, q = picker.law(self.target[last], position), as_law(node_law)
        shared = float(uniforms(seed, position, np.array([token]), Domain.DRAFT)[0])
        if shared * q.of(token) < p.of(token):
            return token
        return residual(p, q).race(seed, position, Domain.RESIDUAL)[0]


class SharedNoiseInTheReplacement(Loop):
    """The noise that chose the draft's token also draws its replacement."""

    def target_pick(
        self, picker: Picker, tree: TokenTree, row: int, last: tuple[int, int], position: int, child: int | None
    ) -> int:
        token = super().target_pick(picker, tree, row, last, position, child)
        if child is None or token == tree.tokens[child]:
            return token
        node_law = tree.laws[child]
        assert node_law is not None
        left = residual(picker.law(self.target[last], position), as_law(node_law))
        return left.race(picker.sampling.seed, position, Domain.DRAFT)[0]


class OneRowLate(Loop):
    """The logits that judge a node are read at the node itself, not at its parent."""

    def target_pick(
        self, picker: Picker, tree: TokenTree, row: int, last: tuple[int, int], position: int, child: int | None
    ) -> int:
        if child is None:
            return super().target_pick(picker, tree, row, last, position, child)
        return super().target_pick(picker, tree, row, (last[1], tree.tokens[child]), position, child)


class CorrectionFromTheFollowingRow(Loop):
    """The test is right; the replacement after a rejection comes from the row below."""

    def target_pick(
        self, picker: Picker, tree: TokenTree, row: int, last: tuple[int, int], position: int, child: int | None
    ) -> int:
        token = super().target_pick(picker, tree, row, last, position, child)
        if child is None or token == tree.tokens[child]:
            return token
        below = (last[1], tree.tokens[child])
        return picker.law(self.target[below], position).race(picker.sampling.seed, position, Domain.RESIDUAL)[0]


class CorrectionFromP(Loop):
    """The replacement after a rejection comes from p instead of the residual."""

    def target_pick(
        self, picker: Picker, tree: TokenTree, row: int, last: tuple[int, int], position: int, child: int | None
    ) -> int:
        token = super().target_pick(picker, tree, row, last, position, child)
        if child is None or token == tree.tokens[child]:
            return token
        return super().target_pick(picker, tree, row, last, position, None)


class LowQUnchecked(Loop):
    """A node is left unchecked because its own q is low."""

    def checked(self, tree: TokenTree) -> Sequence[int]:
        rows: list[int] = []
        for row in super().checked(tree):
            node_law = tree.laws[row]
            assert node_law is not None
            if as_law(node_law).of(tree.tokens[row]) < 0.15:
                break
            rows.append(row)
        return rows


class BestOfTwoDraws(Loop):
    """Two draws at one position, and the one that the draft likes better is sent."""

    def draft_guess(self, picker: Picker, last: tuple[int, int], position: int) -> Guess:
        guess = super().draft_guess(picker, last, position)
        assert guess.law is not None
        again = replace(picker, sampling=replace(picker.sampling, seed=picker.sampling.seed + 10**9))
        other = super().draft_guess(again, last, position)
        q = as_law(guess.law)
        return max(guess, other, key=lambda one: q.of(one.first))


class LikeliestWithItsLaw(Loop):
    """The draft sends its likeliest token as if it had been drawn."""

    def draft_guess(self, picker: Picker, last: tuple[int, int], position: int) -> Guess:
        guess = super().draft_guess(picker, last, position)
        assert guess.law is not None
        return Guess(guess.law.tokens[0], (), guess.law)


class NoRollback(Loop):
    """What the draft said stands, accepted or not."""

    def target_pick(
        self, picker: Picker, tree: TokenTree, row: int, last: tuple[int, int], position: int, child: int | None
    ) -> int:
        token = super().target_pick(picker, tree, row, last, position, child)
        return token if child is None else tree.tokens[child]


@pytest.mark.parametrize(
    ("broken", "verification", "draft"),
    [
        (OneNoiseForAllPositions, COUPLED, "near"),
        (OneNoiseForAllPositions, REJECTION, "near"),
        (SharedNoiseInTheTest, REJECTION, "near"),
        (SharedNoiseInTheTest, REJECTION, "unrelated"),
        (SharedNoiseInTheReplacement, REJECTION, "unrelated"),
        (OneRowLate, COUPLED, "near"),
        (OneRowLate, REJECTION, "near"),
        (CorrectionFromTheFollowingRow, REJECTION, "unrelated"),
        (CorrectionFromP, REJECTION, "unrelated"),
        (LowQUnchecked, REJECTION, "unrelated"),
        (BestOfTwoDraws, REJECTION, "unrelated"),
        (LikeliestWithItsLaw, REJECTION, "near"),
        (NoRollback, COUPLED, "unrelated"),
    ],
)
def test_a_broken_loop_is_rejected(broken: type[Loop], verification: Verification, draft: str, memo: None) -> None:
    """With fewer draws than the comparison above, so that one would see it the better."""
    loop = broken(_case(verification, 1.0, "none", draft, 2))
    counts = loop.counts(FEWER)
    assert loop.judged > 0
    assert g_test(counts, loop.exact()) < 1e-6
    with pytest.raises(AssertionError):
        assert_exact(counts, loop.exact())


# --- the statistics themselves ----------------------------------------------------------------------------


@settings(max_examples=200, deadline=None, derandomize=True)
@given(x=st.floats(0.0, 600.0), half=st.integers(1, 100))
def test_survival_with_even_freedom_is_a_poisson_sum(x: float, half: int) -> None:
    term = total = 1.0
    for n in range(1, half):
        term *= (x / 2.0) / n
        total += term
    assert chi_square_survival(x, 2 * half) == pytest.approx(math.exp(-x / 2.0) * total, rel=1e-9, abs=1e-13)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(x=st.floats(0.0, 200.0))
def test_survival_with_odd_freedom_by_the_error_function(x: float) -> None:
    tail = math.erfc(math.sqrt(x / 2.0))
    assert chi_square_survival(x, 1) == pytest.approx(tail, rel=1e-9, abs=1e-13)
    third = tail + math.sqrt(2.0 * x / math.pi) * math.exp(-x / 2.0)
    assert chi_square_survival(x, 3) == pytest.approx(third, rel=1e-9, abs=1e-13)


@pytest.mark.parametrize(
    ("x", "freedom", "survival"),
    [(3.841458820694124, 1, 0.05), (16.918977604620448, 9, 0.05), (135.806723, 100, 0.01), (0.0, 5, 1.0)],
)
def test_survival_at_tabulated_quantiles(x: float, freedom: int, survival: float) -> None:
    assert chi_square_survival(x, freedom) == pytest.approx(survival, rel=1e-6)


def test_g_test_is_calibrated_and_sees_a_small_bias() -> None:
    law = {token: chance for token, chance in enumerate((0.4, 0.3, 0.2, 0.0999, 0.0001))}
    source = np.random.default_rng(7)
    p_values = [g_test(dict(enumerate(source.multinomial(2_000, list(law.values())))), law) for _ in range(600)]
    for level in (0.05, 0.25, 0.5, 0.75):
        assert near_share(sum(p < level for p in p_values), 600, level)
    biased = dict(enumerate(source.multinomial(DRAWS, [0.43, 0.27, 0.2, 0.0999, 0.0001])))
    assert g_test(biased, law) < 1e-6


def test_g_test_pools_small_cells() -> None:
    law = {0: 0.5, 1: 0.4996, **{cell: 0.0001 for cell in range(2, 6)}}
    assert g_test({0: 5_000, 1: 4_996, 2: 4}, law) == pytest.approx(g_test({0: 5_000, 1: 5_000}, {0: 0.5, 1: 0.5}))
    assert g_test({0: 10}, {0: 1.0}) == 1.0
