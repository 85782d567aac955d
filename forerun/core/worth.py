"""Whether a draft pays for a sequence. On a shared machine one that does not slows the target all the same."""

from __future__ import annotations

PAYS = 0.1
"""Tokens that drafted nodes must save per pass; a live draft on the same machine costs about as much."""

DECAY = 0.9
START, RETRY = 0.5, 0.3
"""What is assumed at first, and after a rest: some ten passes to prove itself."""

SHORTEST_REST, LONGEST_REST = 32, 256
"""Tokens without drafting; doubled each time it does not pay, so nothing is final and nothing is wasted for long."""


class HintWorth:
    """Decayed mean of accepted drafted nodes per pass; hints that never come in time save nothing either."""

    __slots__ = ("_next_rest", "_rest_left", "_saved")

    def __init__(self) -> None:
        self._saved = START
        self._rest_left = 0
        self._next_rest = SHORTEST_REST

    @property
    def pays(self) -> bool:
        return self._rest_left == 0

    def passed(self, accepted: int, committed: int) -> None:
        """A pass accepted `accepted` nodes of a draft and committed `committed` tokens."""
        if self._rest_left:
            self._rest_left = max(0, self._rest_left - committed)
            self._saved = RETRY
            return
        self._saved = DECAY * self._saved + (1.0 - DECAY) * accepted
        if accepted and self._saved > START:
            self._next_rest = SHORTEST_REST
        if self._saved < PAYS:
            self._rest_left = self._next_rest
            self._next_rest = min(2 * self._next_rest, LONGEST_REST)
