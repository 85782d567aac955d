"""A draft that does not pay is asked for little, tried again every few passes, and back at once when it pays."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.core.worth import ENOUGH, PROBE, REST, HintWorth

MOST = 48


@dataclass
class Draft:
    """Answers what it is asked for `lag` passes later, if it is still asked; four nodes of it are checked at most."""

    lag: int = 1
    rate: float = 0.0  # chance of each node to be accepted, given the one above
    rng: random.Random = field(default_factory=lambda: random.Random(0))
    asked: list[int] = field(default_factory=list)

    def serve(self, worth: HintWorth, others: int = 0) -> int:
        """One pass; returns the tokens it committed. `others`: accepted nodes that no draft sent."""
        self.asked.append(worth.want(MOST))
        came = self.asked[-1 - self.lag :]
        checked = min(4, came[0]) if len(came) > self.lag and min(came) > 0 else 0
        accepted = 0
        while accepted < checked and self.rng.random() < self.rate:
            accepted += 1
        worth.passed(accepted, 1 + accepted + others, checked)
        return 1 + accepted + others


def passes_until(worth: HintWorth, draft: Draft, pays: bool, most: int = 500) -> int:
    for count in range(most):
        if worth.pays is pays:
            return count
        draft.serve(worth)
    raise AssertionError(f"pays is still {worth.pays} after {most} passes")


def given_up(lag: int = 1) -> tuple[HintWorth, Draft]:
    worth, draft = HintWorth(), Draft(lag)
    passes_until(worth, draft, pays=False)
    return worth, draft


def test_everything_is_asked_for_at_first() -> None:
    assert HintWorth().pays and HintWorth().want(MOST) == MOST and HintWorth().want(0) == 0


def test_useless_hints_are_given_up_within_some_passes() -> None:
    assert 5 <= passes_until(HintWorth(), Draft(), pays=False) <= 10
    worth = HintWorth()
    for _ in range(100):
        worth.passed(4, 5, 4)
    assert passes_until(worth, Draft(), pays=False) <= 16  # a good time is not remembered for ever


@pytest.mark.parametrize("every", [1, 2, 4])
def test_useful_hints_are_never_given_up(every: int) -> None:
    worth = HintWorth()
    for turn in range(500):
        accepted = int(turn % every == 0)
        worth.passed(accepted, 1 + accepted, 1)
        assert worth.pays


def test_hints_pay_by_what_they_add() -> None:
    """One token saved in four passes is worth it beside one committed, not beside nine that a lookup found."""
    worth = HintWorth()
    for turn in range(40):
        accepted = int(turn % 4 == 0)
        worth.passed(accepted, 9 + accepted, 1)
    assert not worth.pays


@pytest.mark.parametrize("lag", [0, 1, 2])
def test_a_useless_draft_is_hardly_asked(lag: int) -> None:
    worth, draft = given_up(lag)
    draft.asked.clear()
    for _ in range(300):
        draft.serve(worth)
    assert 0.1 <= sum(map(bool, draft.asked)) / 300 <= 0.35, "each time for some steps at most"
    assert set(draft.asked) == {0, PROBE}
    rests = [len(rest) for rest in "".join("x" if asked else "." for asked in draft.asked).split("x") if rest]
    assert set(rests[:-1]) == {REST}


def test_a_draft_that_is_gone_is_hardly_asked() -> None:
    worth, _ = given_up()
    asked = []
    for _ in range(300):
        asked.append(worth.want(MOST))
        worth.passed(0, 1, 0)
    assert 0 < sum(map(bool, asked)) / 300 <= 0.5


@pytest.mark.parametrize("lag", [0, 1, 2])
def test_a_draft_that_turns_good_is_back_within_twenty_passes(lag: int) -> None:
    """Always wrong for 200 tokens (and some, so that every phase of the rest occurs), then right with 0.8."""
    passes = []
    for seed in range(100):
        worth, draft, committed = HintWorth(), Draft(lag, rng=random.Random(seed)), 0
        while committed < 200 + seed % 20:
            committed += draft.serve(worth)
        draft.rate = 0.8
        passes.append(passes_until(worth, draft, pays=True))
    passes.sort()
    assert passes[50] <= 10 and passes[85] <= 20


def test_probes_that_come_true_raise_what_is_asked_for() -> None:
    worth, draft = given_up(0)
    while worth.want(MOST) == 0:
        draft.serve(worth)
    asked = [worth.want(MOST)]
    while not worth.pays:
        worth.passed(1, 2, 1)
        asked.append(worth.want(MOST))
    assert asked == [PROBE, 2 * PROBE, MOST]
    assert 4 * PROBE >= ENOUGH and worth.want(3) == 3


def test_a_raised_probe_forgives_a_miss() -> None:
    worth, draft = given_up(0)
    while worth.want(MOST) == 0:
        draft.serve(worth)
    worth.passed(1, 2, 1)
    raised = worth.want(MOST)
    worth.passed(0, 1, 1)
    assert worth.want(MOST) == raised > PROBE
    for _ in range(2):
        worth.passed(0, 1, 1)
    assert worth.want(MOST) == 0


def test_a_right_hint_that_comes_late_ends_the_rest() -> None:
    worth, _ = given_up()
    assert worth.want(MOST) == 0
    worth.passed(1, 2, 1)
    assert worth.want(MOST) > PROBE


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4), st.integers(1, 9)), max_size=80), st.integers(0, 60))
def test_nothing_is_final(passes: list[tuple[int, int, int]], most: int) -> None:
    """Whatever happened: within bounds, and asked again within a rest."""
    worth = HintWorth()
    for accepted, wrong, others in passes:
        worth.passed(accepted, accepted + others, accepted + wrong)
        assert 0 <= worth.want(most) <= most
    for _ in range(REST):
        if worth.want(MOST):
            break
        worth.passed(0, 1, 0)
    assert worth.want(MOST) > 0
