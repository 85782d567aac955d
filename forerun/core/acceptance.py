"""How often a sequence's guesses come true, learned from what the target accepted."""

from __future__ import annotations

PRIOR = 0.6
PRIOR_WEIGHT = 4.0
DECAY = 0.95
CORRECTION = 0.3
"""Chance that the runner-up is the correction, given that the first guess is not accepted (a prior)."""


class Acceptance:
    """Decayed counts around a prior, so that a bad stretch is forgotten and never becomes final."""

    __slots__ = ("_hits", "_trials")

    def __init__(self) -> None:
        self._hits = 0.0
        self._trials = 0.0

    def observe(self, accepted: int, checked: int) -> None:
        """Of a chain of `checked` nodes `accepted` were: as many hits, and a miss if it broke off."""
        if checked <= 0:
            return
        self._hits = self._hits * DECAY + accepted
        self._trials = self._trials * DECAY + accepted + (accepted < checked)

    @property
    def first(self) -> float:
        """Chance that the likeliest child is picked, given that its parent was reached."""
        return (self._hits + PRIOR * PRIOR_WEIGHT) / (self._trials + PRIOR_WEIGHT)

    @property
    def second(self) -> float:
        """The same for the runner-up."""
        return (1.0 - self.first) * CORRECTION
