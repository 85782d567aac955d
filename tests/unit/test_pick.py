"""The decision at one row, for both sides."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from forerun.core.law import as_law, filtered, judge, point_mass
from forerun.core.noise import Domain
from forerun.core.params import GREEDY_BELOW, Sampling, Verification
from forerun.core.pick import DRAFT_TOP_K, OTHERS, Guess, Picker, Proposal
from forerun.core.tree import NodeLaw

often = settings(max_examples=200, deadline=None, derandomize=True)
GREEDY = Sampling(temperature=0.0)
REJECTION = Sampling(verification=Verification.REJECTION)


def row(*logits: float) -> NDArray[np.float32]:
    return np.array(logits, dtype=np.float32)


ROW = row(1.0, 3.0, 2.0, 3.0, -1.0)


@pytest.mark.parametrize("verification", list(Verification))
@pytest.mark.parametrize("temperature", [0.0, GREEDY_BELOW / 2])
def test_greedy_is_argmax_whatever_else_is_asked(verification: Verification, temperature: float) -> None:
    sampling = Sampling(temperature=temperature, top_k=1, top_p=0.1, verification=verification)
    for seed in range(20):
        picker = Picker(replace(sampling, seed=seed), 5)
        assert picker.pick(ROW, 3, Proposal(4, None)) == 1  # 1 and 3 tie: the lower id
        guess = picker.guess(ROW, 3)
        assert (guess.first, guess.others, guess.law) == (1, (3, 2, 0), None)


def test_temperatures_from_the_limit_on_are_sampled() -> None:
    assert not Sampling(temperature=GREEDY_BELOW).greedy
    picks = {Picker(Sampling(temperature=GREEDY_BELOW, seed=seed), 5).pick(ROW, 3) for seed in range(50)}
    assert picks == {1, 3}  # the two that tie, and nothing else


@often
@given(st.integers(0, 2**64 - 1), st.integers(0, 10_000), st.integers(0, 4))
def test_a_coupled_pick_does_not_see_the_proposal(seed: int, position: int, proposed: int) -> None:
    picker = Picker(Sampling(seed=seed), 5)
    alone = picker.pick(ROW, position)
    assert picker.pick(ROW, position, Proposal(proposed, None)) == alone
    assert picker.pick(ROW, position, Proposal(proposed, NodeLaw((proposed,), (1.0,)))) == alone
    assert alone == filtered(ROW, picker.sampling).race(seed, position)[0]


@often
@given(st.integers(0, 2**64 - 1), st.integers(0, 10_000))
def test_a_coupled_draft_that_equals_the_target_guesses_its_token(seed: int, position: int) -> None:
    picker = Picker(Sampling(seed=seed, temperature=0.8, top_p=0.9), 5)
    guess = picker.guess(ROW, position)
    assert guess.first == picker.pick(ROW, position)
    assert guess.second is not None and guess.second != guess.first
    assert guess.law is None  # only tokens cross the wire


@often
@given(st.integers(0, 2**64 - 1), st.integers(0, 10_000))
def test_a_rejection_draft_sends_what_it_drew_from(seed: int, position: int) -> None:
    guess = Picker(replace(REJECTION, seed=seed), 5).guess(ROW, position)
    assert guess.second is None and guess.law is not None
    assert guess.first == as_law(guess.law).race(seed, position, Domain.DRAFT)[0]
    law = filtered(ROW, REJECTION)
    assert dict(zip(guess.law.tokens, guess.law.probabilities, strict=True)) == pytest.approx(
        dict(zip(law.ids.tolist(), law.probabilities.tolist(), strict=True)), rel=1e-6
    )


def test_a_rejection_draft_draws_from_the_tokens_it_sends_alone() -> None:
    """A flat row has far more than DRAFT_TOP_K candidates; one that was not sent could not be judged."""
    flat = np.zeros(1_000, dtype=np.float32)
    for seed in range(200):
        guess = Picker(replace(REJECTION, seed=seed), 1_000).guess(flat, 3)
        assert guess.law is not None
        assert guess.law.tokens == tuple(range(DRAFT_TOP_K))
        assert guess.first in guess.law.tokens


@often
@given(st.integers(0, 2**64 - 1), st.integers(0, 4), st.booleans())
def test_a_rejection_pick_is_the_judgement_of_the_proposal(seed: int, proposed: int, drawn: bool) -> None:
    sampling = replace(REJECTION, seed=seed, top_k=3)
    picker = Picker(sampling, 5)
    node_law = NodeLaw((0, 1, 2, 3, 4), (0.2,) * 5) if drawn else None
    law = filtered(ROW, sampling)
    expected = judge(law, as_law(node_law) if node_law else point_mass(proposed), proposed, seed, 9)
    assert picker.pick(ROW, 9, Proposal(proposed, node_law)) == expected
    assert picker.pick(ROW, 9) == law.race(seed, 9, Domain.RESIDUAL)[0]


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(), REJECTION, Sampling(top_p=0.9), Sampling(top_k=9)])
def test_padding_of_the_vocabulary_is_never_chosen(sampling: Sampling) -> None:
    padded = row(1.0, 2.0, 1.5, 50.0, 60.0)
    for seed in range(100):
        picker = Picker(replace(sampling, seed=seed), 3)
        assert picker.pick(padded, 5) < 3
        assert picker.guess(padded, 5).first < 3
        assert picker.pick(padded, 5, Proposal(4, None)) < 3
    if not sampling.greedy:
        assert set(Picker(sampling, 3).law(padded, 5).ids.tolist()) <= {0, 1, 2}


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(), REJECTION, Sampling(top_p=0.5), Sampling(top_k=1)])
def test_end_tokens_wait_for_their_position(sampling: Sampling) -> None:
    likely = row(0.0, 1.0, 9.0, 0.5)
    before = [Picker(replace(sampling, seed=seed), 4, ends=(2,), ends_from=8).pick(likely, 7) for seed in range(100)]
    assert 2 not in before
    after = [Picker(replace(sampling, seed=seed), 4, ends=(2,), ends_from=8).pick(likely, 8) for seed in range(100)]
    assert 2 in after
    guesses = [Picker(replace(sampling, seed=seed), 4, ends=(2,), ends_from=8).guess(likely, 7) for seed in range(100)]
    assert all(2 not in (guess.first, *guess.others) for guess in guesses)
    assert likely.tolist() == [0.0, 1.0, 9.0, 0.5]


def test_a_banned_end_token_is_not_accepted_either() -> None:
    likely = row(0.0, 1.0, 9.0, 0.5)
    for seed in range(100):
        picker = Picker(replace(REJECTION, seed=seed), 4, ends=(2,), ends_from=8)
        assert picker.pick(likely, 7, Proposal(2, None)) != 2
        assert picker.pick(likely, 7, Proposal(2, NodeLaw((2, 1), (0.9, 0.1)))) != 2


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(), REJECTION])
def test_an_end_token_outside_the_vocabulary_bans_nothing(sampling: Sampling) -> None:
    """A tokenizer's end token may lie in the padding of the embedding table, where it is never chosen."""
    picker = Picker(sampling, 3, ends=(1, 4), ends_from=8)
    padded = row(0.0, 9.0, 1.0, 0.0, 0.0)
    assert picker.pick(padded, 7) in (0, 2)
    assert picker.guess(padded, 7).first in (0, 2)


def test_one_token_left_has_no_runner_up() -> None:
    """A guess of the same token twice, or of a banned one, would be a branch for nothing."""
    only = row(-1.0, 2.0)
    for sampling in (GREEDY, Sampling()):
        guess = Picker(sampling, 2, ends=(0,), ends_from=8).guess(only, 7)
        assert guess == Guess(1, (), None, sure=1.0)
        assert Picker(sampling, 1).guess(only, 7) == Guess(0, (), None, sure=1.0)


@pytest.mark.parametrize("sampling", [GREEDY, replace(GREEDY, top_k=1), replace(REJECTION, temperature=0.0)])
def test_how_sure_a_greedy_draft_is_is_asked_at_temperature_1(sampling: Sampling) -> None:
    """Of what may be picked alone: neither padding nor an end that may not stand here takes a share."""
    logits = row(*np.log([0.2, 0.5, 0.3]), 9.0, 9.0)
    for picker in (Picker(sampling, 3), Picker(sampling, 4, ends=(3,), ends_from=8)):
        guess = picker.guess(logits, 7)
        assert (guess.first, guess.others, guess.law) == (1, (2, 0), None)
        assert guess.sure == pytest.approx(0.5) and guess.shares == pytest.approx((0.6, 1.0))


@often
@given(st.integers(0, 2**64 - 1), st.sampled_from([Sampling(), Sampling(temperature=0.8, top_p=0.9)]))
def test_how_sure_a_coupled_draft_is_is_the_chance_of_its_draw(seed: int, sampling: Sampling) -> None:
    """Of the token that won the race, likely or not, by the law it was drawn from."""
    guess = Picker(replace(sampling, seed=seed), 5).guess(ROW, 3)
    law = filtered(ROW, sampling)
    assert guess.second is not None
    assert [guess.first, *guess.others] == law.finish(seed, 3, 1 + OTHERS)
    assert guess.sure == law.of(guess.first)
    left = 1.0 - guess.sure
    for token, share in zip(guess.others, guess.shares, strict=True):
        assert share == pytest.approx(law.of(token) / left)
        left -= law.of(token)


def test_how_sure_a_rejection_draft_is_is_not_told() -> None:
    """It would say which token was drawn."""
    for seed in range(50):
        guess = Picker(replace(REJECTION, seed=seed), 5).guess(ROW, 3)
        assert (guess.sure, guess.others, guess.shares) == (None, (), ())


@pytest.mark.parametrize("sampling", [GREEDY, Sampling()])
def test_shares_are_chances_however_sure_a_draft_is(sampling: Sampling) -> None:
    for gap in np.arange(0.0, 120.0, 0.05):
        guess = Picker(sampling, 3).guess(row(0.0, -gap, -gap - 3.0), 3)
        assert guess.sure is not None and 0.0 < guess.sure <= 1.0
        assert len(guess.shares) == len(guess.others) and all(0.0 <= share <= 1.0 for share in guess.shares)


@pytest.mark.parametrize("verification", [Verification.COUPLED, Verification.REJECTION])
def test_decisions_keep_no_state(verification: Verification) -> None:
    """A pass that is repeated, batched otherwise or resumed elsewhere decides the same."""
    rows = [np.random.default_rng(i).normal(size=5).astype(np.float32) for i in range(30)]
    proposal = Proposal(2, None)

    def decide(order: list[int]) -> dict[int, tuple[int, Guess]]:
        picker = Picker(Sampling(seed=11, verification=verification), 5)
        return {i: (picker.pick(rows[i], i, proposal), picker.guess(rows[i], i)) for i in order}

    forth = decide(list(range(30)))
    assert decide(list(range(29, -1, -1))) == forth
    assert decide(list(range(0, 30, 2)) + list(range(30))) == forth
    assert len({token for token, _ in forth.values()}) > 1


@pytest.mark.parametrize("verification", [Verification.COUPLED, Verification.REJECTION])
def test_seed_and_position_both_matter(verification: Verification) -> None:
    flat = np.zeros(50, dtype=np.float32)

    def pick(seed: int, position: int) -> int:
        return Picker(Sampling(seed=seed, verification=verification), 50).pick(flat, position)

    by_seed = [pick(seed, 3) for seed in range(200)]
    by_position = [pick(3, position) for position in range(200)]
    assert len(set(by_seed)) > 40 and len(set(by_position)) > 40  # 49 expected
    same = sum(one == other for one, other in zip(by_seed, by_position, strict=True))
    assert same < 20  # 4 expected


def test_law_is_what_pick_draws_from() -> None:
    picker = Picker(Sampling(temperature=0.7, top_k=3), 5, ends=(1,), ends_from=8)
    law = picker.law(ROW, 7)
    assert set(law.ids.tolist()) == {0, 2, 3}
    seen = {Picker(replace(picker.sampling, seed=s), 5, (1,), 8).pick(ROW, 7) for s in range(2_000)}
    assert seen == {0, 2, 3}
    assert set(picker.law(ROW, 8).ids.tolist()) == {1, 2, 3}


@pytest.mark.parametrize(
    ("sampling", "greedy", "chain_only"),
    [
        (Sampling(), False, False),
        (REJECTION, False, True),
        (GREEDY, True, False),
        (replace(REJECTION, temperature=0.0), True, False),
        (Sampling(verification=Verification.TYPICAL), False, False),
    ],
)
def test_modes(sampling: Sampling, greedy: bool, chain_only: bool) -> None:
    assert (sampling.greedy, sampling.chain_only) == (greedy, chain_only)
