"""A draft that does not pay rests, is tried again ever more rarely, and is back at once when it pays."""

from __future__ import annotations

from forerun.core.worth import LONGEST_REST, SHORTEST_REST, HintWorth


def passes_until(worth: HintWorth, pays: bool, accepted: int, most: int = 2000) -> int:
    """Passes of one token (and `accepted`) until `pays` is so."""
    for count in range(most):
        if worth.pays is pays:
            return count
        worth.passed(accepted, 1 + accepted)
    raise AssertionError(f"pays is still {worth.pays} after {most} passes")


def test_useless_hints_stop_within_some_passes() -> None:
    assert 10 <= passes_until(HintWorth(), pays=False, accepted=0) <= 20


def test_useful_hints_never_stop() -> None:
    worth = HintWorth()
    for turn in range(500):
        worth.passed(int(turn % 4 == 0), 2)
        assert worth.pays


def test_rests_double_and_end() -> None:
    worth = HintWorth()
    rests = []
    for _ in range(6):
        passes_until(worth, pays=False, accepted=0)
        rests.append(passes_until(worth, pays=True, accepted=0))
    assert rests == [32, 64, 128, 256, 256, 256]
    assert (rests[0], rests[-1]) == (SHORTEST_REST, LONGEST_REST)


def test_recovery_forgets_the_bad_stretch() -> None:
    worth = HintWorth()
    for _ in range(4):
        passes_until(worth, pays=False, accepted=0)
        passes_until(worth, pays=True, accepted=0)
    for _ in range(40):
        worth.passed(2, 3)
    assert worth.pays
    passes_until(worth, pays=False, accepted=0)
    assert passes_until(worth, pays=True, accepted=0) == SHORTEST_REST
