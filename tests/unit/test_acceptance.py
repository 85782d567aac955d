"""What guesses are worth, from what became of them: found out soon, never for good."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.core.acceptance import CORRECTION, DRAWN, EVEN, MEAN_DECAY, WEIGHT, Acceptance, Calibration, Mean

SURENESS = st.none() | st.floats(0.0, 1.0)
SHARES = st.lists(st.floats(0.0, 1.0), max_size=3)


def see(acceptance: Acceptance, count: int, right: bool, sure: float | None = 0.9) -> None:
    """First guesses of this sureness, all right or all wrong; there was no runner-up."""
    for _ in range(count):
        acceptance.observe(sure, (), 1, (1 if right else 2,))


def second(acceptance: Acceptance, sure: float | None, share: float) -> float:
    """Chance of the runner-up."""
    return next(acceptance.others(sure, (share,)))


@given(SURENESS, SHARES, st.floats(0.0, 1.0))
def test_a_bound_leaves_out_only_what_is_below_it(sure: float | None, shares: list[float], least: float) -> None:
    acceptance = Acceptance()
    for share in (0.0, 0.3, 0.6, 0.9, 1.0):  # corrections that nearly always come true
        for _ in range(40):
            acceptance.observe(sure, (share,), 2, (1, 2))
    every, some = list(acceptance.others(sure, shares)), list(acceptance.others(sure, shares, least))
    assert some == every[: len(some)]
    assert all(chance < least for chance in every[len(some) :])


# --- a draft's own guesses -----------------------------------------------------------------------------


@pytest.mark.parametrize("sure", [0.0, 0.5, 1.0])
def test_until_something_is_seen_a_guess_is_worth_what_drafts_usually_are(sure: float) -> None:
    acceptance = Acceptance()
    assert acceptance.first(sure) == pytest.approx(EVEN[0] + EVEN[1] * sure)
    wrong = 1.0 - acceptance.first(sure)
    assert second(acceptance, sure, 0.3) == pytest.approx(wrong * (CORRECTION[0] + CORRECTION[1] * 0.3))
    assert acceptance.first(None) == DRAWN


@pytest.mark.parametrize("right", [True, False])
def test_what_was_known_before_counts_for_some_guesses(right: bool) -> None:
    acceptance, known = Acceptance(), Acceptance().first(0.9)
    see(acceptance, 1, right)
    assert acceptance.first(0.9) == pytest.approx((right + known * WEIGHT) / (1.0 + WEIGHT))


@pytest.mark.parametrize(("seen", "other", "together"), [
    (0.9, 0.85, True), (0.9, 0.94, True), (0.9, 0.84, False), (0.9, 0.95, False), (0.9, 0.2, False),
    (1.0, 0.95, True), (0.0, 0.09, True), (0.0, 0.1, False), (None, None, True), (None, 0.0, False), (0.0, None, False),
])  # fmt: skip
def test_guesses_of_like_sureness_are_judged_together(seen: float | None, other: float | None, together: bool) -> None:
    acceptance = Acceptance()
    see(acceptance, 20, False, seen)
    assert (acceptance.first(other) < Acceptance().first(other)) == together


def test_the_runner_up_has_a_share_of_what_the_first_leaves() -> None:
    acceptance = Acceptance()
    for _ in range(300):
        acceptance.observe(0.6, (0.9,), 2, (1, 2))  # always the runner-up
    assert acceptance.first(0.6) < 0.05
    assert second(acceptance, 0.6, 0.9) > 0.9
    see(acceptance, 500, True, 0.6)
    assert second(acceptance, 0.6, 0.9) < 0.1, "a first guess that is right leaves it nothing"


def second_when_wrong(acceptance: Acceptance, share: float = 0.5) -> float:
    """Chance of the runner-up given that the first guess is wrong."""
    return second(acceptance, 0.6, share) / (1.0 - acceptance.first(0.6))


@pytest.mark.parametrize(("share", "token", "second", "change"), [
    (0.5, 1, 2, 0),  # the first was right: nothing is said about the runner-up
    (0.5, 2, 2, 1),
    (0.5, 3, 2, -1),
    (None, 3, 2, 0),  # there was none
    (0.9, 3, 2, 0),  # one of another share was wrong
])  # fmt: skip
def test_the_runner_up_is_judged_where_the_first_was_wrong(
    share: float | None, token: int, second: int, change: int
) -> None:
    acceptance = Acceptance()
    before = second_when_wrong(acceptance)
    acceptance.observe(0.6, () if share is None else (share,), token, (1,) if share is None else (1, second))
    assert np.sign(round(second_when_wrong(acceptance) - before, 9)) == change


def test_a_new_sequence_begins_with_what_others_saw() -> None:
    pool = Acceptance()
    one = Acceptance(pool)
    see(one, 30, False)
    for _ in range(30):
        one.observe(0.2, (0.5,), 2, (1, 2))
    heir = Acceptance(pool)
    assert heir.first(0.9) == pytest.approx(pool.first(0.9)) and pool.first(0.9) < 0.2
    assert second_when_wrong(heir) == pytest.approx(second_when_wrong(pool)) and second_when_wrong(pool) > 0.8
    assert one.first(0.9) < pool.first(0.9), "it has seen them itself, too"


def test_one_sequence_turns_sooner_than_all_of_them() -> None:
    pool = Acceptance()
    see(Acceptance(pool), 400, True)
    turned = Acceptance(pool)
    see(turned, 20, False)
    assert turned.first(0.9) < 0.3
    assert Acceptance(pool).first(0.9) > 0.8


@pytest.mark.parametrize("sure", [0.9, None])
def test_a_bad_stretch_is_forgotten(sure: float | None) -> None:
    acceptance = Acceptance(Acceptance())
    see(acceptance, 2000, False, sure)
    assert acceptance.first(sure) < 0.01
    see(acceptance, 40, True, sure)
    assert acceptance.first(sure) > 0.6
    see(acceptance, 60, True, sure)
    assert acceptance.first(sure) > 0.85


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    st.lists(st.tuples(SURENESS, SHARES, st.integers(1, 5)), max_size=60),
    SURENESS,
    SHARES,
)
def test_all_guesses_share_one_chance(
    seen: list[tuple[float | None, list[float], int]], sure: float | None, shares: list[float]
) -> None:
    acceptance = Acceptance(Acceptance())
    for was_sure, had, token in seen:
        acceptance.observe(was_sure, had, token, range(1, 2 + len(had)))
    chances = [acceptance.first(sure), *acceptance.others(sure, shares)]
    assert len(chances) == 1 + len(shares)
    assert all(0.0 < chance < 1.0 for chance in chances)
    assert sum(chances) < 1.0


def test_each_rank_is_judged_where_all_before_it_were_wrong() -> None:
    """The third guess is always the one, whatever the draft thinks of it."""
    acceptance = Acceptance()
    for _ in range(300):
        acceptance.observe(0.6, (0.5, 0.5, 0.5), 3, (1, 2, 3, 4))
    chances = list(acceptance.others(0.6, (0.5, 0.5, 0.5)))
    assert chances[1] > 0.8 > 0.2 > chances[0] + chances[2]
    for _ in range(300):
        acceptance.observe(0.6, (0.5, 0.5, 0.5), 9, (1, 2, 3, 4))
    assert sum(acceptance.others(0.6, (0.5, 0.5, 0.5))) < 0.2, "and then none of them is"


def test_a_mean_begins_with_a_guess_and_follows_what_is_seen() -> None:
    mean = Mean(0.6)
    assert mean.mean == 0.6
    mean.see(True)
    assert mean.mean == pytest.approx(MEAN_DECAY * 0.6 + (1.0 - MEAN_DECAY))
    for turn in range(400):
        mean.see(turn % 4 == 0)
    assert mean.mean == pytest.approx(0.25, abs=0.05)
    for _ in range(60):
        mean.see(True)
    assert mean.mean > 0.9


# --- a source's scores, on the target ------------------------------------------------------------------


def judge(calibration: Calibration, count: int, rate: float, rng: random.Random, score: float = 0.6) -> None:
    for _ in range(count):
        calibration.judged([(score, 1, rng.random() < rate)])


def test_useless_scores_are_found_out_within_ten_nodes() -> None:
    calibration = Calibration()
    judge(calibration, 10, 0.0, random.Random(0))
    assert calibration.chance(0.6, 1) < 0.05


def test_scores_that_turn_useless_are_found_out_within_some_more() -> None:
    calibration, rng = Calibration(), random.Random(1)
    judge(calibration, 200, 0.6, rng)
    judge(calibration, 14, 0.0, rng)
    assert calibration.chance(0.6, 1) < 0.05


@pytest.mark.parametrize(("score", "rate"), [(0.6, 0.6), (0.8, 0.8), (0.9, 0.9), (0.9, 0.5), (0.5, 0.5)])
def test_hints_that_turn_good_are_believed_within_ten_nodes(score: float, rate: float) -> None:
    chances = []
    for seed in range(100):
        calibration, rng = Calibration(), random.Random(seed)
        judge(calibration, 200, 0.0, rng, score)
        judge(calibration, 10, rate, rng, score)
        chances.append(calibration.chance(score, 1))
    assert sum(chances) / len(chances) >= 0.85 * rate


@pytest.mark.parametrize(("score", "rate"), [(0.6, 0.6), (0.8, 0.4), (0.5, 0.6), (0.3, 0.1), (0.95, 0.95)])
def test_chances_become_those_that_are_seen(score: float, rate: float) -> None:
    calibration, rng = Calibration(), random.Random(2)
    judge(calibration, 50, rate, rng, score)
    means = []
    for _ in range(1000):
        judge(calibration, 1, rate, rng, score)
        means.append(calibration.chance(score, 1))
    assert sum(means) / len(means) == pytest.approx(rate, rel=0.15)


def test_a_source_given_up_looks_worth_a_cheap_row_after_some_ten_passes() -> None:
    calibration = Calibration()
    judge(calibration, 100, 0.0, random.Random(3))
    tried, last = [], 0
    for turn in range(200):
        if calibration.chance(0.6, 1) > 0.06:
            calibration.judged([(0.6, 1, False)])
            tried.append(turn - last)
            last = turn
        else:
            calibration.unseen()
    assert 10 <= tried[0] <= 15
    assert 15 <= len(tried) <= 40


def test_passes_unseen_add_up() -> None:
    one, many = Calibration(), Calibration()
    for calibration in (one, many):
        judge(calibration, 20, 0.0, random.Random(4))
    for _ in range(7):
        one.unseen()
    many.unseen(7)
    assert many.chance(0.6, 1) == pytest.approx(one.chance(0.6, 1))
    many.unseen(2000)
    assert many.chance(0.6, 1) == pytest.approx(Calibration().chance(0.6, 1))


def test_deeper_nodes_are_learned_apart() -> None:
    """A lookup whose first token is seldom right, and then all of it."""
    calibration = Calibration()
    for turn in range(40):
        right = turn % 4 == 0
        calibration.judged([(0.6, 1, right), *([(0.6, 2, True), (0.6, 3, True)] if right else [])])
    assert calibration.chance(0.6, 1) < 0.4
    assert calibration.chance(0.6, 2) > 0.7


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    st.lists(st.tuples(st.floats(0.0, 1.0), st.integers(1, 9), st.booleans()), max_size=60),
    st.integers(0, 1000),
    st.floats(0.0, 1.0),
    st.integers(1, 9),
)
def test_chances_are_chances(seen: list[tuple[float, int, bool]], passes: int, score: float, depth: int) -> None:
    """Whatever happened: within [0, 1], no less for a higher score, and never beyond recovery."""
    calibration = Calibration()
    calibration.judged(seen)
    calibration.unseen(passes)
    assert 0.0 <= calibration.chance(0.5 * score, depth) <= calibration.chance(score, depth) < 1.0
    calibration.judged([(0.6, depth, True)] * 10)
    assert calibration.chance(0.6, depth) > 0.5


def test_the_next_sequence_knows_half() -> None:
    fresh, useless = Calibration(), Calibration()
    useless.judged([(0.6, 1, False)] * 20)
    heir = useless.heir()
    assert useless.chance(0.6, 1) < heir.chance(0.6, 1) < fresh.chance(0.6, 1)
    heir.judged([(0.6, 1, True)] * 12)
    assert heir.chance(0.6, 1) > 0.5, "and is not bound by it"
