"""Whether the next pass is held back for hints: while those to come promise more tokens than passes commit meanwhile.

Time is passed in, never read.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

DECAY = 0.8

SLACK = 1.0
"""How many usual intervals a hint may be late before nobody waits for it any more."""

LEAST_SLACK_S = 0.002
"""The same for hints that follow each other closely: a process is not always woken at once."""

FAR = 8
"""Hints ahead that are looked at; what comes after them is not worth waiting for."""


UNANSWERED = 4
"""Emits that are remembered until a hint says that its draft knew of them."""


@dataclass(frozen=True, slots=True)
class Outlook:
    """What one sequence may expect of its draft, if the pass waits."""

    due: float  # when the next hint should come
    every_s: float  # between those after it
    gains: tuple[float, ...]  # tokens that each of them adds to the pass

    @property
    def given_up(self) -> float:
        """When nobody waits for the next one any more."""
        return self.due + SLACK * max(self.every_s, LEAST_SLACK_S)


class Patience:
    """One sequence's memory of how soon hints follow an Emit, and each other."""

    __slots__ = ("_asked", "_every_s", "_expired", "_given_up", "_hinted_at", "_lag_s")

    def __init__(self) -> None:
        self._lag_s: float | None = None  # Emit to Hint, decayed mean; None: no hint seen yet
        self._every_s: float | None = None  # hint to hint, decayed mean
        self._asked: list[tuple[int, float]] = []  # committed_len and time of Emits that were not answered yet
        self._hinted_at: float | None = None  # of the last hint
        self._expired = False
        self._given_up = math.inf  # when nobody waits for the next hint any more

    def emitted(self, committed_len: int, now: float) -> None:
        """An Emit left that a draft is to answer."""
        self._asked.append((committed_len, now))
        del self._asked[:-UNANSWERED]

    def hinted(self, base_len: int, now: float) -> None:
        """A hint arrived at `now`, from a draft that knew of `base_len` tokens; it may answer no Emit."""
        answered = [at for length, at in self._asked if length <= base_len]
        if answered:
            self._lag_s = _mean(self._lag_s, max(0.0, now - answered[-1]))
            del self._asked[: len(answered)]
        elif self._hinted_at is not None:
            self._every_s = _mean(self._every_s, max(0.0, now - self._hinted_at))
        self._hinted_at = now
        self._expired, self._given_up = False, math.inf

    def outlook(self, now: float, known: bool, reach: float, chance: float, most: int) -> Outlook | None:
        """What waiting from `now` on would bring; None: nothing is known, or nothing comes.

        known: the last token was guessed, and what follows is, so hints go on coming; else they begin with an answer.
        reach: chance that all of the best line that is known is accepted; chance: the same of each node after it;
        most: nodes that the pass could still check there.
        """
        if self._expired or self._lag_s is None or most < 1:
            return None
        every_s = self._lag_s if self._every_s is None else min(self._every_s, self._lag_s)
        asked_at = self._asked[-1][1] if self._asked else None
        if asked_at is not None and not known:
            due = asked_at + self._lag_s
        else:  # one that paused, with all that was wanted, goes on when it hears of the Emit
            due = max(at for at in (asked_at, self._hinted_at, 0.0) if at is not None) + every_s
        gains = tuple(reach * chance ** (number + 1) for number in range(min(most, FAR)))
        outlook = Outlook(due, every_s, gains)
        self._given_up = outlook.given_up
        return outlook if now < outlook.given_up else None

    def expire(self, now: float) -> None:
        """If the hint that was waited for is overdue: not again until one arrives. `now` may be infinite: it is."""
        self._expired |= self._given_up < math.inf and now >= self._given_up


def worth_until(now: float, outlooks: Sequence[Outlook], rate: float) -> float | None:
    """Until when to wait for the next hint of any of these; None: not at all.

    rate: tokens per second that passes commit. Waiting for some time costs what they would commit in it, for all
    sequences of the pass, so all their gains count.
    """
    arrivals = sorted(
        (max(0.0, outlook.due - now) + number * outlook.every_s, gain)
        for outlook in outlooks
        for number, gain in enumerate(outlook.gains)
    )
    gained = best = 0.0
    for after_s, gain in arrivals:
        gained += gain
        best = max(best, gained - rate * after_s)
    return min(outlook.given_up for outlook in outlooks) if best > 0.0 else None


def _mean(before: float | None, seen: float) -> float:
    return seen if before is None else DECAY * before + (1.0 - DECAY) * seen
