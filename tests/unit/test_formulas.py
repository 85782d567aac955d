"""Published numbers are checked before they are copied."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.core.formulas import (
    acceptance,
    coupled_acceptance_bound,
    expected_tokens,
    overlapped_speed,
    speedup_alternating,
    speedup_overlapped,
)

often = settings(max_examples=200, deadline=None, derandomize=True)
chances = st.floats(0.0, 0.999) | st.just(1.0)
lookaheads = st.integers(0, 16)


@pytest.mark.parametrize(
    ("a", "k", "tokens"),
    [
        (0.8, 4, 3.3616),
        (0.5, 3, 1.875),
        (0.0, 5, 1.0),
        (1.0, 5, 6.0),
        (0.7, 0, 1.0),
        (0.9, 1, 1.9),
    ],
)
def test_expected_tokens(a: float, k: int, tokens: float) -> None:
    assert expected_tokens(a, k) == pytest.approx(tokens, rel=1e-12)


@often
@given(chances, lookaheads)
def test_expected_tokens_is_the_sum_over_depths(a: float, k: int) -> None:
    assert expected_tokens(a, k) == pytest.approx(math.fsum(a**depth for depth in range(k + 1)), rel=1e-9)


def test_expected_tokens_by_counting() -> None:
    source = np.random.default_rng(1)
    for a, k in ((0.8, 4), (0.5, 3), (0.95, 8)):
        accepted = np.cumprod(source.random((200_000, k)) < a, axis=1).sum(axis=1)
        assert accepted.mean() + 1.0 == pytest.approx(expected_tokens(a, k), rel=0.01)


@pytest.mark.parametrize(("a", "k"), [(-0.1, 3), (1.1, 3), (0.5, -1), (float("nan"), 3)])
def test_expected_tokens_refuses_what_is_no_chance(a: float, k: int) -> None:
    with pytest.raises(ValueError, match=f"not {a} and {k}"):
        expected_tokens(a, k)


def test_alternating_speedup_corrects_a_published_table() -> None:
    """A table in tutorials has 1.38 here."""
    assert speedup_alternating(0.5, 3, 0.1) == pytest.approx(1.4423, abs=5e-5)
    assert speedup_alternating(0.8, 4, 0.1) == pytest.approx(3.3616 / 1.4, rel=1e-12)
    assert speedup_alternating(0.8, 0, 0.1) == 1.0
    assert speedup_alternating(0.0, 4, 0.1) == pytest.approx(1.0 / 1.4)


@pytest.mark.parametrize(
    ("a", "k", "c", "h", "speedup"),
    [
        (0.8, 4, 0.1, 0.0, 3.3616 / (1.0 + (1.0 - 0.8**5) * 0.4)),
        (0.8, 4, 0.1, 1.0, 3.3616),  # always prepared: a pass is never waited for
        (1.0, 4, 0.1, 0.0, 5.0),  # never wrong: run-ahead alone is enough
        (0.8, 4, 0.5, 1.0, 3.3616 / 2.0),  # the draft is the longer of the two
        (0.0, 4, 0.1, 0.0, 1.0 / 1.4),
    ],
)
def test_overlapped_speedup(a: float, k: int, c: float, h: float, speedup: float) -> None:
    assert speedup_overlapped(a, k, c, h) == pytest.approx(speedup, rel=1e-12)


@often
@given(chances, lookaheads, st.floats(0.0, 0.5), st.floats(0.0, 1.0))
def test_overlap_and_branches_never_cost(a: float, k: int, c: float, h: float) -> None:
    alternating = speedup_alternating(a, k, c)
    chain, prepared = speedup_overlapped(a, k, c), speedup_overlapped(a, k, c, h)
    if k * c <= 1.0:  # the draft keeps up
        assert chain >= alternating * (1 - 1e-12)
    assert chain * (1 - 1e-12) <= prepared <= expected_tokens(a, k) * (1 + 1e-12)


laws = st.lists(st.integers(0, 50), min_size=6, max_size=6).filter(any).map(lambda w: np.array(w) / sum(w))


@often
@given(laws, laws)
def test_acceptance_is_one_minus_total_variation(p: np.ndarray, q: np.ndarray) -> None:
    variation = 0.5 * float(np.abs(p - q).sum())
    assert acceptance(p, q) == pytest.approx(1.0 - variation, abs=1e-12)
    assert acceptance(p, q) == acceptance(q, p)
    assert acceptance(p, p) == pytest.approx(1.0)
    bound = coupled_acceptance_bound(p, q)
    assert bound == pytest.approx((1.0 - variation) / (1.0 + variation), abs=1e-12)
    assert bound <= acceptance(p, q) + 1e-12


def test_acceptance_of_the_abc_example() -> None:
    p, q = np.array([0.3, 0.5, 0.2]), np.array([0.4, 0.4, 0.2])
    assert acceptance(p, q) == pytest.approx(0.9)
    assert coupled_acceptance_bound(p, q) == pytest.approx(0.9 / 1.1)
    assert acceptance(np.array([1.0, 0.0]), np.array([0.0, 1.0])) == 0.0


@often
@given(chances, chances, st.floats(0.01, 1.0))
def test_overlapped_speed_is_that_of_the_best_lookahead(a: float, h: float, c: float) -> None:
    speed, best = overlapped_speed(a, h, c, [1.0] * 9)
    assert speed == max(speedup_overlapped(a, k, c, h) for k in range(9))
    assert speed == speedup_overlapped(a, best, c, h)


def test_passes_that_grow_with_what_they_check_make_the_best_lookahead_shorter() -> None:
    flat, k_flat = overlapped_speed(0.8, 0.5, 2.0, [20.0] * 9)
    steep, k_steep = overlapped_speed(0.8, 0.5, 2.0, [20.0 + 5.0 * k for k in range(9)])
    assert (k_steep, steep) < (k_flat, flat)
    assert overlapped_speed(0.8, 0.5, 2.0, [20.0, 1000.0]) == (1 / 20.0, 0)
