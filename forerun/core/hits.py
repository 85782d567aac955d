"""What the target knew of its draft's guesses when a pass needed them, pass by pass.

A pass that was to have hints found its proposal waiting in the tree, got it while it was held back, got it too late,
or never. It says whether drafts are wrong or slow: a wrong draft must not grow its pool, a slow one should.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum


class Hit(IntEnum):
    """In the order in which they are counted on the wire."""

    CONTINUED = 0  # the tree went on along its likeliest line
    BRANCH = 1  # the target left that line, and a branch held what it picked
    AWAITED = 2  # nothing was known at the end of the pass before, a hint came before this one began
    LATE = 3  # a hint that would have served it came while it ran
    MISS = 4  # none came


NONE = (0,) * len(Hit)


class Hits:
    """Of one sequence. A pass that knew nothing stays open until the next one: only then it was late or a miss."""

    __slots__ = ("_along", "_counts", "_ended", "_known", "_open")

    def __init__(self) -> None:
        self._counts = [0] * len(Hit)
        self._known: Hit | None = None  # of the pass to come
        self._open: int | None = None  # committed_len at the begin of a pass that knew nothing
        self._ended = 0.0  # when the last pass did
        self._along = True  # it stayed on the likeliest line, as far as the tree went

    @property
    def open_len(self) -> int | None:
        """committed_len at the begin of the pass that waits for its verdict."""
        return self._open

    def committed(self, known: bool, along: bool, now: float) -> None:
        """A pass was committed. known: the tree goes on; along: no likelier child than each of its tokens is known."""
        self._known = None if not known else Hit.CONTINUED if along else Hit.BRANCH
        self._ended, self._along = now, along

    def hinted(self, serves_open: bool, knows: bool, arrived: float, led: bool) -> Hit | None:
        """A hint landed. serves_open: had it come in time, the open pass had known; knows: the tree goes on now.

        arrived: when it came, maybe while a pass ran: then it was waiting at the end of that.
        led: what was committed since its prefix is its likeliest line.
        Returns the verdict on the open pass, if this is it.
        """
        verdict = None
        if self._open is not None and serves_open:
            verdict = self._close(Hit.LATE)
        if knows and self._known is None:
            waiting = Hit.CONTINUED if self._along and led else Hit.BRANCH
            self._known = waiting if arrived <= self._ended else Hit.AWAITED
        return verdict

    def begins(self, committed_len: int, wanted: bool) -> tuple[Hit | None, Hit | None]:
        """A pass begins; wanted: hints were to serve it. Verdicts on the pass before and on this one, if known."""
        before = None if self._open is None else self._close(Hit.MISS)
        if not wanted:
            return before, None
        if self._known is None:
            self._open = committed_len
            return before, None
        self._counts[self._known] += 1
        return before, self._known

    def ends(self) -> Hit | None:
        """There will be no other pass: the verdict on the last one, if it was open."""
        return None if self._open is None else self._close(Hit.MISS)

    def _close(self, verdict: Hit) -> Hit:
        self._open = None
        self._counts[verdict] += 1
        return verdict

    def take(self) -> tuple[int, ...]:
        """Counts by cause since it was asked last."""
        taken = tuple(self._counts)
        self._counts = [0] * len(Hit)
        return taken


def added(first: Sequence[int], later: Sequence[int]) -> tuple[int, ...]:
    """Counts of both; either may be empty."""
    return tuple(a + b for a, b in zip(first or NONE, later or NONE, strict=True))


def waiting_share(counts: Sequence[int]) -> float:
    """Of the passes that were to have hints, those whose proposal was waiting."""
    total = sum(counts)
    return (counts[Hit.CONTINUED] + counts[Hit.BRANCH]) / total if total else 0.0
