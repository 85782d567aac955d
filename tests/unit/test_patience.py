"""Whether a pass waits for hints, and until when. Time is passed in: nothing here waits."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.core.patience import DECAY, FAR, LEAST_SLACK_S, SLACK, UNANSWERED, Outlook, Patience, worth_until

LAG_S, EVERY_S = 0.010, 0.004
CHANCE = 0.6
AT = 2.0  # when the last pass ended, and its Emit left


def after(*lags: float, every_s: float = EVERY_S) -> Patience:
    """It has seen an answer so long after each Emit, and each time another hint after that."""
    patience, now = Patience(), 1.0
    for turn, lag in enumerate(lags):
        patience.emitted(turn, now)
        patience.hinted(turn, now + lag)
        patience.hinted(turn, now + lag + every_s)
        now += 0.1
    patience.emitted(len(lags), AT)
    return patience


def missed(patience: Patience, now: float = AT, most: int = 4) -> Outlook | None:
    """The target left the tree: hints begin with an answer."""
    return patience.outlook(now, known=False, reach=1.0, chance=CHANCE, most=most)


def half_grown(patience: Patience, now: float = AT, reach: float = 0.8, most: int = 2) -> Outlook | None:
    """A line is known of which all is accepted with chance `reach`, and goes on growing."""
    return patience.outlook(now, known=True, reach=reach, chance=CHANCE, most=most)


def until(outlook: Outlook | None, rate: float, now: float = AT) -> float | None:
    return worth_until(now, [] if outlook is None else [outlook], rate)


# --- what is to be expected ----------------------------------------------------------------------------


def test_nobody_waits_for_what_was_never_seen() -> None:
    patience = Patience()
    assert missed(patience) is None and half_grown(patience) is None
    patience.emitted(10, AT)
    assert missed(patience) is None
    patience.hinted(9, AT)  # it does not know of that Emit, so it says nothing of how soon one is answered
    patience.hinted(9, AT)
    assert missed(patience) is None and half_grown(patience) is None


def test_after_a_miss_the_next_hint_is_an_answer() -> None:
    outlook = missed(after(LAG_S))
    assert outlook is not None
    assert outlook.due == pytest.approx(AT + LAG_S)
    assert outlook.every_s == pytest.approx(EVERY_S)
    assert outlook.gains == pytest.approx([CHANCE**depth for depth in (1, 2, 3, 4)])


def test_a_line_that_grows_goes_on_growing() -> None:
    patience = after(LAG_S)
    outlook = half_grown(patience)
    assert outlook is not None
    assert outlook.due == pytest.approx(AT + EVERY_S), "it hears of the Emit first"
    assert outlook.gains == pytest.approx([0.8 * CHANCE, 0.8 * CHANCE**2])
    patience.hinted(0, AT + 0.002)  # not yet the answer
    again = half_grown(patience)
    assert again is not None and again.due == pytest.approx(AT + 0.002 + again.every_s)


def test_once_the_emit_was_answered_the_next_hint_follows_that_one() -> None:
    patience = after(LAG_S)
    patience.hinted(1, AT + LAG_S)
    outlook = missed(patience, AT + LAG_S)
    assert outlook is not None and outlook.due == pytest.approx(AT + LAG_S + EVERY_S)


def test_until_two_hints_were_seen_they_follow_each_other_as_soon_as_they_answer() -> None:
    patience = Patience()
    patience.emitted(10, 1.0)
    patience.hinted(10, 1.0 + LAG_S)
    for outlook in (half_grown(patience, 1.0 + LAG_S), half_grown(after(LAG_S, every_s=0.05))):
        assert outlook is not None and outlook.every_s == pytest.approx(LAG_S)


@pytest.mark.parametrize(("most", "count"), [(-1, None), (0, None), (1, 1), (FAR, FAR), (100, FAR)])
def test_nobody_waits_for_more_than_can_be_checked(most: int, count: int | None) -> None:
    outlook = missed(after(LAG_S), most=most)
    assert (None if outlook is None else len(outlook.gains)) == count


@pytest.mark.parametrize("every_s", [EVERY_S, LEAST_SLACK_S / 10])
def test_overdue_hints_end_it(every_s: float) -> None:
    patience = after(LAG_S, every_s=every_s)
    over = AT + LAG_S + SLACK * max(every_s, LEAST_SLACK_S)
    assert until(missed(patience, over - 1e-6), 1.0, over - 1e-6) == pytest.approx(over)
    assert missed(patience, over + 1e-6) is None


def test_one_expiry_ends_waiting_until_a_hint_arrives() -> None:
    patience = after(LAG_S)
    outlook = missed(patience)
    assert outlook is not None
    patience.expire(outlook.given_up - 1e-6)
    assert missed(patience) is not None, "it may still come"
    patience.expire(outlook.given_up)
    assert missed(patience) is None and half_grown(patience) is None
    patience.emitted(11, AT)
    assert missed(patience) is None
    patience.hinted(0, AT)  # any hint: its draft is there
    assert missed(patience) is not None


def test_who_is_waited_for_at_the_end_of_all_waiting_is_overdue() -> None:
    patience = after(LAG_S)
    assert missed(patience) is not None
    patience.expire(math.inf)
    assert missed(patience) is None
    patience.hinted(0, AT)
    patience.expire(math.inf)  # its hint came, and nobody has waited for another one
    assert missed(patience) is not None


def test_lag_counts_from_the_last_emit_that_the_draft_knew_of() -> None:
    def due(base_len: int) -> float:
        patience = Patience()
        patience.emitted(10, 1.0)
        patience.emitted(12, 1.5)
        patience.emitted(14, AT)
        patience.hinted(base_len, AT + 0.25)
        outlook = missed(patience)
        assert outlook is not None
        return outlook.due

    assert due(11) == pytest.approx(AT + 1.25), "the last one is still to be answered"
    assert due(12) == pytest.approx(AT + 0.75)


def test_emits_that_nobody_answers_are_forgotten() -> None:
    patience = Patience()
    for length in range(UNANSWERED + 1):
        patience.emitted(length, 1.0)
    patience.hinted(0, AT)
    assert missed(patience) is None
    patience.hinted(1, AT)
    assert missed(patience) is not None


def test_lags_are_a_decayed_mean() -> None:
    outlook = missed(after(0.010, 0.060))
    assert outlook is not None and outlook.due == pytest.approx(AT + DECAY * 0.010 + (1.0 - DECAY) * 0.060)
    patience = after(LAG_S)
    patience.hinted(0, 1.0 + LAG_S + 3 * EVERY_S)  # 2 EVERY_S after the one before
    grown = half_grown(patience)
    assert grown is not None and grown.every_s == pytest.approx((DECAY + (1.0 - DECAY) * 2) * EVERY_S)


# --- whether that is worth it --------------------------------------------------------------------------


def test_a_pass_waits_after_a_miss_if_hints_come_soon() -> None:
    """0.6 tokens come after 10 ms, 0.96 after 14, 1.18 after 18: two of them are worth most, 68.6 tokens a second."""
    outlook = missed(after(LAG_S))
    assert until(outlook, rate=55.0) == pytest.approx(AT + LAG_S + SLACK * EVERY_S)
    assert until(outlook, rate=65.0) is not None, "the first alone would not be worth it"
    assert until(outlook, rate=72.0) is None, "passes commit more meanwhile"
    assert until(missed(after(10 * LAG_S)), rate=65.0) is None
    assert until(missed(after(LAG_S), most=1), rate=65.0) is None


@pytest.mark.parametrize(("reach", "rate", "worth"), [
    (0.8, 110.0, True),  # 0.48 tokens after 4 ms
    (0.8, 130.0, False),
    (0.4, 55.0, True),  # the further the line has grown, the less its next node adds
    (0.4, 65.0, False),
])  # fmt: skip
def test_with_a_half_grown_line_it_waits_while_the_next_node_is_worth_it(
    reach: float, rate: float, worth: bool
) -> None:
    assert (until(half_grown(after(LAG_S), reach=reach), rate) is not None) == worth


def test_what_was_waited_is_spent() -> None:
    """A hint that is nearly there is worth what is left to wait, one that is due nothing more."""
    patience = after(LAG_S)
    assert until(missed(patience), rate=100.0) is None
    assert until(missed(patience, AT + 0.006), 100.0, AT + 0.006) is not None
    assert until(missed(patience, AT + 0.011), 1e9, AT + 0.011) == pytest.approx(AT + LAG_S + EVERY_S)
    assert until(Outlook(AT - 0.001, EVERY_S, (0.0,)), 1.0) is None, "nor is one worth anything for being late"


def test_what_several_gain_is_summed() -> None:
    """All of them wait, and none longer than the first is waited for."""
    soon, later = Outlook(AT + 0.010, 0.002, (0.6,)), Outlook(AT + 0.011, 0.004, (0.6,))
    assert until(soon, rate=70.0) is None and until(later, rate=70.0) is None
    assert worth_until(AT, [later, soon], rate=70.0) == soon.given_up
    assert worth_until(AT, [soon, later, Outlook(AT + 0.011, 0.0, (0.6,))], rate=150.0) == soon.given_up
    assert worth_until(AT, [soon, Outlook(AT + 1.0, 0.004, (0.6,))], rate=70.0) is None, "not whatever it takes"
    assert worth_until(AT, [], rate=1.0) is None


EVENTS = st.sampled_from(["emitted", "hinted", "expire", "ask"])
MOMENTS = st.tuples(EVENTS, st.integers(0, 2), st.floats(0.0, 0.1), st.booleans(), st.floats(0.0, 1.0))


@settings(max_examples=400, deadline=None, derandomize=True)
@given(st.lists(MOMENTS, max_size=40), st.floats(0.1, 1000.0), st.integers(0, 10))
def test_a_deadline_is_finite_ahead_and_stands(
    moments: list[tuple[str, int, float, bool, float]], rate: float, most: int
) -> None:
    """Whatever was seen; and without news nobody waits longer for having asked again."""
    several, lengths = [Patience() for _ in range(3)], [1, 1, 1]
    heard, now, longest = [False] * 3, 1.0, 0.0

    def asked(now: float, known: bool, share: float) -> float | None:
        outlooks = [patience.outlook(now, known, share, share, most) for patience in several]
        assert all(outlook is None or may for outlook, may in zip(outlooks, heard, strict=True))
        return worth_until(now, [outlook for outlook in outlooks if outlook is not None], rate)

    for event, which, step, known, share in moments:
        now += step
        longest += step  # no interval that was seen can be longer
        match event:
            case "emitted":
                lengths[which] += 1
                several[which].emitted(lengths[which], now)
            case "hinted":
                several[which].hinted(lengths[which] - int(known), now)
                heard[which] = True
            case "expire":
                several[which].expire(now)
            case _:
                deadline = asked(now, known, share)
                if deadline is not None:
                    assert math.isfinite(deadline)
                    assert now < deadline <= now + longest + SLACK * max(longest, LEAST_SLACK_S) + 1e-9
                    again = now + 0.9 * (deadline - now)
                    assert asked(again, known, share) == deadline
                    now, longest = again, longest + again - now
