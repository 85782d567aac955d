"""What guesses are worth, from what became of them: found out soon, never for good."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.core.acceptance import CORRECTION, PRIOR, Acceptance, Calibration


def test_a_chain_that_breaks_off_is_one_miss() -> None:
    acceptance = Acceptance()
    assert acceptance.first == pytest.approx(PRIOR)
    acceptance.observe(2, 4)
    assert acceptance.first == pytest.approx((2 + 4 * PRIOR) / (3 + 4))
    assert acceptance.second == pytest.approx((1 - acceptance.first) * CORRECTION)
    acceptance.observe(0, 0)
    assert acceptance.first == pytest.approx((2 + 4 * PRIOR) / (3 + 4))


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
