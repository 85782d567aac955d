"""How often a sequence's guesses come true, learned from what the target accepted."""

from __future__ import annotations

from collections.abc import Sequence

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


RATIOS = (0.02, 0.1, 0.3, 0.5, 0.7, 0.85, 1.0, 1.15, 1.35)
"""What a chance may be in units of the score that promised it."""

PRIOR_WEIGHTS = (3.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0)
"""How likely each is until something is seen: a source is often of no use at all."""

TURN = 0.02
"""Chance, per judged node, that a source has turned better or worse: what is older than its inverse is forgotten."""

RELAX = 0.01
"""The same per pass in which nothing was judged: one given up looks worth a cheap row again after some ten."""

INHERITED = 0.5
"""How much a sequence knows from the one before it."""

SUREST = 0.98
"""No chance is beyond this, nor below a hundredth of the rest: one surprise must not refute everything."""


class Calibration:
    """What a source's scores are worth for one sequence: the forward filter of a hidden Markov model.

    Hidden is the ratio of chance to score; a source may turn at any node. So useless hints are found out
    within some ten nodes, good ones within a few, and nothing is final. First nodes and those below an accepted
    one are learned apart: a lookup that has got one token right usually gets the next.
    """

    __slots__ = ("_below", "_first")

    def __init__(self) -> None:
        self._first = _Trust()
        self._below = _Trust()

    def heir(self) -> Calibration:
        """For the next sequence: what was learned here, half forgotten."""
        heir = Calibration()
        for mine, theirs in ((self._first, heir._first), (self._below, heir._below)):
            theirs.take(mine)
            theirs.forget(INHERITED)
        return heir

    def chance(self, score: float, depth: int) -> float:
        """Chance that the target picks a node of this score, given its parent. depth: 1 below the root."""
        return min(SUREST, max(0.0, score) * self._at(depth).ratio)

    def judged(self, judged: Sequence[tuple[float, int, bool]]) -> None:
        """(score, depth, picked) of checked nodes whose parent was the root or accepted, in any order."""
        for score, depth, picked in judged:
            self._at(depth).see(score, picked)

    def unseen(self, passes: int = 1) -> None:
        """Nothing was judged in so many passes: drift back to not knowing."""
        keep = (1.0 - RELAX) ** passes
        self._first.forget(keep)
        self._below.forget(keep)

    def _at(self, depth: int) -> _Trust:
        return self._first if depth <= 1 else self._below


class _Trust:
    """Weights of RATIOS; they sum to 1."""

    __slots__ = ("_weights", "ratio")

    def __init__(self) -> None:
        self._set(PRIOR_WEIGHTS)

    def _set(self, weights: Sequence[float]) -> None:
        total = sum(weights)
        self._weights = [weight / total for weight in weights]
        self.ratio = sum(weight * ratio for weight, ratio in zip(self._weights, RATIOS, strict=True))

    def take(self, other: _Trust) -> None:
        self._set(other._weights)

    def see(self, score: float, picked: bool) -> None:
        chances = [min(max(score * ratio, 0.01 * (1.0 - SUREST)), SUREST) for ratio in RATIOS]
        likelihood = chances if picked else [1.0 - chance for chance in chances]
        self._set([weight * seen for weight, seen in zip(self._weights, likelihood, strict=True)])
        self.forget(1.0 - TURN)

    def forget(self, keep: float) -> None:
        """Keep this much of what is known."""
        fresh = (1.0 - keep) / sum(PRIOR_WEIGHTS)
        self._set([keep * weight + fresh * prior for weight, prior in zip(self._weights, PRIOR_WEIGHTS, strict=True)])
