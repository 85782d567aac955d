"""What was known of a pass's proposal when it began."""

from __future__ import annotations

import pytest

from forerun.core.formulas import possible_waiting_share
from forerun.core.hits import NONE, Hit, Hits, added, waiting_share


def counts(**more: int) -> tuple[int, ...]:
    return tuple(more.get(hit.name.lower(), 0) for hit in Hit)


def test_a_tree_that_goes_on_was_continued_or_a_branch() -> None:
    hits = Hits()
    hits.committed(known=True, along=True, now=1.0)
    assert hits.begins(10, wanted=True) == (None, Hit.CONTINUED)
    hits.committed(known=True, along=False, now=2.0)
    assert hits.begins(12, wanted=True) == (None, Hit.BRANCH)
    assert hits.take() == counts(continued=1, branch=1)
    assert hits.take() == NONE


def test_a_hint_between_two_passes_was_awaited() -> None:
    hits = Hits()
    hits.committed(known=False, along=True, now=1.0)
    assert hits.hinted(serves_open=False, knows=True, arrived=1.5, led=True) is None
    assert hits.begins(10, wanted=True) == (None, Hit.AWAITED)
    assert hits.ends() is None
    assert hits.take() == counts(awaited=1)


def test_a_hint_while_the_pass_runs_was_late_and_none_is_a_miss() -> None:
    hits = Hits()
    hits.committed(known=False, along=True, now=1.0)
    assert hits.begins(10, wanted=True) == (None, None)
    assert hits.open_len == 10
    hits.committed(known=False, along=False, now=2.0)
    assert hits.hinted(serves_open=True, knows=False, arrived=1.5, led=False) is Hit.LATE
    assert hits.hinted(serves_open=True, knows=False, arrived=1.5, led=False) is None, "a pass is late once"
    assert hits.begins(12, wanted=True) == (None, None)
    hits.committed(known=False, along=False, now=2.0)
    assert hits.begins(13, wanted=True) == (Hit.MISS, None)
    assert hits.ends() is Hit.MISS
    assert hits.take() == counts(late=1, miss=2)


def test_a_late_hint_may_serve_the_next_pass_too() -> None:
    hits = Hits()
    hits.begins(10, wanted=True)
    hits.committed(known=False, along=False, now=2.0)
    assert hits.hinted(serves_open=True, knows=True, arrived=2.5, led=True) is Hit.LATE
    assert hits.begins(11, wanted=True) == (None, Hit.AWAITED)


@pytest.mark.parametrize(
    ("arrived", "along", "led", "hit"),
    [
        (1.9, True, True, Hit.CONTINUED),
        (2.0, True, True, Hit.CONTINUED),
        (1.9, True, False, Hit.BRANCH),  # a branch of that hint held what was committed since
        (1.9, False, True, Hit.BRANCH),  # the pass left the likeliest line that was known
        (2.1, True, True, Hit.AWAITED),
        (2.1, False, False, Hit.AWAITED),
    ],
)
def test_a_hint_that_came_while_the_pass_ran_was_waiting_at_its_end(
    arrived: float, along: bool, led: bool, hit: Hit
) -> None:
    """However long after that it is handled."""
    hits = Hits()
    hits.committed(known=False, along=along, now=2.0)
    assert hits.hinted(serves_open=False, knows=True, arrived=arrived, led=led) is None
    assert hits.begins(10, wanted=True) == (None, hit)


def test_what_is_known_first_counts() -> None:
    hits = Hits()
    hits.committed(known=True, along=True, now=2.0)
    hits.hinted(serves_open=False, knows=True, arrived=2.5, led=False)
    assert hits.begins(10, wanted=True) == (None, Hit.CONTINUED)
    hits.committed(known=False, along=True, now=3.0)
    hits.hinted(serves_open=False, knows=True, arrived=3.5, led=True)
    hits.hinted(serves_open=False, knows=True, arrived=2.9, led=True)
    assert hits.begins(12, wanted=True) == (None, Hit.AWAITED)
    hits.committed(known=False, along=True, now=4.0)
    hits.hinted(serves_open=False, knows=False, arrived=3.5, led=True)  # nothing in it goes on from here
    assert hits.begins(14, wanted=True) == (None, None)


def test_a_pass_that_was_to_have_no_hints_counts_nowhere() -> None:
    hits = Hits()
    hits.committed(known=True, along=True, now=1.0)
    assert hits.begins(10, wanted=False) == (None, None)
    assert hits.open_len is None
    assert hits.take() == NONE


def test_sums_and_share() -> None:
    assert added((), counts(late=2)) == counts(late=2)
    assert added(counts(continued=1), counts(continued=2, miss=1)) == counts(continued=3, miss=1)
    assert waiting_share(counts(continued=3, branch=1, late=2, miss=2)) == 0.5
    assert waiting_share(NONE) == 0.0


def test_the_share_that_is_possible() -> None:
    """Two accepted with 0.8: 0.64 go on, of which the run-ahead holds 0.8, a branch half of the rest."""
    assert possible_waiting_share(0.8, 2, 0.5) == pytest.approx(0.64 * 0.9 + 0.36 * 0.5)
    assert possible_waiting_share(1.0, 4, 0.0) == 1.0
    assert possible_waiting_share(0.0, 1, 0.3) == pytest.approx(0.3)
    with pytest.raises(ValueError, match=r"not 1\.2, 0\.5 and 1"):
        possible_waiting_share(1.2, 1, 0.5)
