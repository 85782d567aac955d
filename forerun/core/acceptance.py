"""How often a sequence's guesses come true, learned from what the target accepted."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence

SURE = (0.0, 0.1, 0.3, 0.5, 0.7, 0.85, 0.95)
"""A draft's guesses are judged together with those that it was about as sure of: lower ends of the classes."""

EVEN = (0.2, 0.6)
"""Chance of a first guess of which a draft is not sure at all, and what being sure adds, until something is seen."""

CORRECTION = (0.1, 0.4)
"""The same for a runner-up, given that all before it are wrong; sure of its share among all others."""

DRAWN = 0.6
"""The same for a token drawn for the rejection test, whose chance must not depend on which token it was."""

WEIGHT = 6.0
"""Guesses that what was known beforehand counts for."""

DECAY, POOL_DECAY = 0.97, 0.995
"""What is left of a class's counts after another guess in it: one sequence turns sooner than all of them."""


MEAN_DECAY = 0.95


class Acceptance:
    """How often a draft's guesses come true: of one sequence, by rank and by how sure the draft was.

    Counts decay, so that a bad stretch is forgotten and never becomes final. What a sequence has not seen itself is
    taken from `pool`, which hears of all sequences; what nobody has seen, from what drafts are usually worth.
    It is the chance given that the parent is right, whenever the guess was made: depth says nothing more.
    """

    __slots__ = ("_counts", "_decay", "_pool")

    def __init__(self, pool: Acceptance | None = None) -> None:
        self._pool = pool
        self._decay = DECAY if pool else POOL_DECAY
        self._counts: dict[tuple[int, int], tuple[float, float]] = {}  # by rank and class: came true, were judged

    def first(self, sure: float | None) -> float:
        """Chance that the likeliest child is picked. sure: its share by the draft; None: it was drawn."""
        return self._chance(0, sure)

    def others(self, sure: float | None, shares: Sequence[float], least: float = 0.0) -> Iterator[float]:
        """The same for the runners-up, each of which has its share of what those before it leave.

        It ends where none of the rest can have `least`.
        """
        left = 1.0 - self.first(sure)
        for rank, share in enumerate(shares, 1):
            if left < least:
                return
            chance = self._chance(rank, share)
            yield left * chance
            left *= 1.0 - chance

    def observe(self, sure: float | None, shares: Sequence[float], token: int, guesses: Sequence[int]) -> None:
        """The target picked `token` where these were guessed, likeliest first; shares: of all but the first."""
        for rank, (share, guess) in enumerate(zip((sure, *shares), guesses, strict=True)):
            self._see(rank, share, token == guess)
            if token == guess:
                break
        if self._pool is not None:
            self._pool.observe(sure, shares, token, guesses)

    def _see(self, rank: int, sure: float | None, right: bool) -> None:
        key = rank, _class(sure)
        hits, trials = self._counts.get(key, (0.0, 0.0))
        self._counts[key] = hits * self._decay + right, trials * self._decay + 1.0

    def _chance(self, rank: int, sure: float | None) -> float:
        base, slope = CORRECTION if rank else EVEN
        known = DRAWN if sure is None else base + slope * sure
        if self._pool is not None:
            known = self._pool._chance(rank, sure)
        hits, trials = self._counts.get((rank, _class(sure)), (0.0, 0.0))
        return (hits + known * WEIGHT) / (trials + WEIGHT)


def _class(sure: float | None) -> int:
    return -1 if sure is None else bisect_right(SURE, sure)


class Mean:
    """A decayed share of yes among yes and no, from a guess at first."""

    __slots__ = ("mean",)

    def __init__(self, mean: float) -> None:
        self.mean = mean

    def see(self, yes: bool) -> None:
        self.mean += (1.0 - MEAN_DECAY) * (yes - self.mean)


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
