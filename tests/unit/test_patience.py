"""Time is passed in: nothing here waits."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.core.patience import DECAY, FRACTION, Patience

PASS_S = 0.1
SOON, LATE = 0.4 * FRACTION * PASS_S, 3.0 * FRACTION * PASS_S


def after(*lags: float) -> Patience:
    """One that has seen a hint after each Emit, this much later."""
    patience, now = Patience(), 0.0
    for lag in lags:
        patience.emitted(now)
        patience.hinted(now + lag)
        now += 10.0
    return patience


def test_nobody_waits_for_a_hint_that_was_never_seen() -> None:
    patience = Patience()
    assert patience.deadline(1.0, PASS_S) is None
    patience.emitted(0.0)
    assert patience.deadline(1.0, PASS_S) is None


def test_a_hint_without_an_emit_measures_nothing() -> None:
    patience = Patience()
    patience.hinted(5.0)
    assert patience.deadline(6.0, PASS_S) is None


def test_a_pass_waits_a_fraction_of_itself() -> None:
    assert after(SOON).deadline(7.0, PASS_S) == pytest.approx(7.0 + FRACTION * PASS_S)
    assert after(SOON).deadline(7.0, 2 * PASS_S) == pytest.approx(7.0 + FRACTION * 2 * PASS_S)


def test_nobody_waits_for_hints_that_come_too_late() -> None:
    assert after(LATE).deadline(7.0, PASS_S) is None
    assert after(LATE).deadline(7.0, 10 * PASS_S) is not None  # a longer pass can wait for them


def test_one_expiry_ends_waiting_until_a_hint_arrives() -> None:
    patience = after(SOON)
    patience.expire()
    assert patience.deadline(7.0, PASS_S) is None
    patience.emitted(8.0)
    assert patience.deadline(8.0, PASS_S) is None
    patience.hinted(8.0 + SOON)
    assert patience.deadline(9.0, PASS_S) is not None


def test_an_unsolicited_hint_ends_an_expiry() -> None:
    patience = after(SOON)
    patience.expire()
    patience.hinted(50.0)
    assert patience.deadline(51.0, PASS_S) is not None


def test_lag_counts_from_the_first_unanswered_emit() -> None:
    patience = Patience()
    patience.emitted(0.0)
    patience.emitted(LATE)
    patience.hinted(LATE + SOON)
    assert patience.deadline(7.0, PASS_S) is None


def test_only_the_first_hint_after_an_emit_is_measured() -> None:
    patience = after(SOON)
    patience.hinted(1000.0)
    assert patience.deadline(1001.0, PASS_S) is not None


def test_lags_are_a_decayed_mean() -> None:
    """One late hint among punctual ones does not end waiting; a few do, and punctual ones restore it."""
    bound = FRACTION * PASS_S
    assert after(0.0, bound / (1.0 - DECAY) * 0.99).deadline(0.0, PASS_S) is not None
    assert after(0.0, bound / (1.0 - DECAY) * 1.01).deadline(0.0, PASS_S) is None
    assert after(*[SOON] * 10, *[LATE] * 3).deadline(0.0, PASS_S) is None
    assert after(*[LATE] * 10, *[SOON] * 10).deadline(0.0, PASS_S) is not None


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    st.lists(st.tuples(st.sampled_from(["emitted", "hinted", "expire", "deadline"]), st.floats(0.0, 1.0)), max_size=30),
    st.floats(0.001, 1.0),
)
def test_waiting_is_always_bounded(events: list[tuple[str, float]], pass_s: float) -> None:
    patience, now, hinted, expired = Patience(), 0.0, False, False
    for event, step in events:
        now += step
        if event == "deadline":
            until = patience.deadline(now, pass_s)
            assert until is None or now <= until <= now + FRACTION * pass_s + 1e-9
            assert until is None or (hinted and not expired)
        elif event == "expire":
            patience.expire()
            expired = True
        else:
            getattr(patience, event)(now)
            hinted = hinted or event == "hinted"
            expired = expired and event != "hinted"
