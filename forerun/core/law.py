"""From a row of logits to the distribution the request asked for, and draws from it.

One order everywhere, since ties are normal in bfloat16: logit descending, then id ascending.
Filters in the documented order: temperature, top_k, top_p, min_p, each on what the one before left,
renormalised; cuts fall exactly. All arithmetic after the logits is float64.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from forerun.core.noise import Domain, exponential, uniform, uniforms
from forerun.core.params import Sampling
from forerun.core.tree import NodeLaw

_ROUNDED = 1.0 + 1e-9
"""Above what rounding makes of a bound."""

_MOST = float(np.finfo(np.float64).max) / 2
"""Later than this nothing comes in."""

_VANISHES = 750.0
"""exp(-this) is 0 in float64."""

_NEAR = 1024
"""Rows this long are sorted first; a nucleus that needs more is sorted whole."""

Logits = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Law:
    """A distribution over few or many tokens; ids not listed have probability 0."""

    ids: NDArray[np.int64]  # [k] distinct
    probabilities: NDArray[np.float64]  # [k], > 0, sum 1

    def of(self, token: int) -> float:
        at = np.flatnonzero(self.ids == token)
        return float(self.probabilities[at[0]]) if len(at) else 0.0

    def race(self, seed: int, position: int, domain: Domain = Domain.COUPLED) -> tuple[int, int | None]:
        """Winner and runner-up of argmin E/p: an exact draw, and the best guess for another's draw.

        Two laws that race on the same noise agree with chance >= (1 - TV) / (1 + TV) (Daliri et al. 2024).
        """
        first, *others = self.finish(seed, position, 2, domain)
        return first, others[0] if others else None

    def finish(self, seed: int, position: int, count: int, domain: Domain = Domain.COUPLED) -> list[int]:
        """The first `count` of the race, fewer if there are not so many."""
        return [int(self.ids[place]) for place in self.places(seed, position, count, domain)]

    def places(self, seed: int, position: int, count: int, domain: Domain = Domain.COUPLED) -> list[int]:
        """Where those stand in `ids`.

        A time is -log(1 - u) / p, never less than u / p. So only those are timed whose u / p is no more than the times
        of the first by u / p: a logarithm for each of a vocabulary costs more than all the rest.
        """
        numbers = uniforms(seed, position, self.ids, domain)
        with np.errstate(over="ignore"):  # by a chance of next to nothing: never first, unless there is nothing else
            bounds = np.minimum(numbers / self.probabilities, _MOST)
        leaders = np.array(_least(bounds.copy(), count))
        near = np.flatnonzero(bounds <= self._times(numbers, leaders).max() * _ROUNDED)
        return [int(near[place]) for place in _least(self._times(numbers, near), count)]

    def _times(self, numbers: NDArray[np.float64], places: NDArray[np.int64]) -> NDArray[np.float64]:
        with np.errstate(over="ignore"):
            times: NDArray[np.float64] = np.minimum(exponential(numbers[places]) / self.probabilities[places], _MOST)
        return times


def greedy(logits: Logits) -> int:
    """Lowest id among the largest logits."""
    return int(np.argmax(logits))


def likeliest(logits: Logits, count: int) -> list[int]:
    """Greedy winner and those that follow, ids ascending among ties; at most `count`, and none that is banned."""
    return _least(-logits, count)


def _least(values: NDArray[np.floating], count: int) -> list[int]:
    """Places of the `count` least, the first among ties; fewer if others are infinite.

    `values` is overwritten. A look for each: sorting or parting all of them costs more.
    """
    found: list[int] = []
    while len(found) < count:
        place = int(values.argmin())
        if found and values[place] == np.inf:
            break
        found.append(place)
        values[place] = np.inf
    return found


def _ordered(logits: Logits, count: int) -> NDArray[np.int64]:
    """Ids of the `count` first in the one order."""
    size = len(logits)
    if count >= size:
        return np.argsort(-logits, kind="stable").astype(np.int64)
    edge = np.partition(logits, size - count)[size - count]
    candidates = np.flatnonzero(logits >= edge)
    order = np.argsort(-logits[candidates], kind="stable")[:count]
    return candidates[order].astype(np.int64)


def filtered(logits: Logits, sampling: Sampling) -> Law:
    """[vocab] float32 logits (-inf: banned) -> the law to draw from. Not for greedy sampling.

    top_p keeps the shortest prefix of the order whose mass reaches it; min_p keeps what has at least
    that fraction of the likeliest token's probability.
    """
    alive = logits >= logits.max() - np.float32(_VANISHES * sampling.temperature)
    if 2 * int(np.count_nonzero(alive)) < len(logits):  # most are banned, or outside a draft's head
        places = np.flatnonzero(alive)
        law = _filtered(logits[places], sampling)
        return Law(places[law.ids], law.probabilities)
    return _filtered(logits, sampling)


def _filtered(logits: Logits, sampling: Sampling) -> Law:
    size = len(logits)
    mass: float | None = None  # of everything top_p sees; None: of the listed ids
    cut = True
    if sampling.top_k and sampling.top_k < size:
        ids = _ordered(logits, sampling.top_k)
    elif sampling.top_p < 1.0:
        ids, mass = _nucleus_candidates(logits, sampling)
    else:
        cut, ids = False, np.arange(size, dtype=np.int64)
    weights = _weights(logits[ids] if cut else logits, sampling.temperature)
    if sampling.top_p < 1.0:
        reached = np.cumsum(weights)
        kept = int(np.searchsorted(reached, sampling.top_p * (reached[-1] if mass is None else mass))) + 1
        ids, weights = ids[:kept], weights[:kept]
    keep = weights >= sampling.min_p if sampling.min_p > 0.0 else weights > 0.0
    if not keep.all():
        ids, weights = ids[keep], weights[keep]
    weights /= weights.sum()
    return Law(ids, weights)


def _weights(logits: Logits, temperature: float) -> NDArray[np.float64]:
    """Probabilities relative to the likeliest. In place: new arrays of this size cost more than what is computed."""
    weights = logits.astype(np.float64)
    weights /= temperature
    weights -= weights.max()
    return np.exp(weights, out=weights)


def _nucleus_candidates(logits: Logits, sampling: Sampling) -> tuple[NDArray[np.int64], float]:
    """Ids in order, at least as many as the nucleus holds, and the mass of all (relative to the peak)."""
    weights = _weights(logits, sampling.temperature)
    mass = float(weights.sum())
    ids = _ordered(logits, _NEAR)
    if len(ids) < len(logits) and float(weights[ids].sum()) < sampling.top_p * mass:
        ids = _ordered(logits, len(logits))
    return ids, mass


def draft_law(law: Law, k: int) -> NodeLaw:
    """The renormalised top-k in the precision it travels in: the q that is used is the q that was drawn from."""
    best = np.argsort(-law.probabilities, kind="stable")[:k]
    rounded = (law.probabilities[best] / law.probabilities[best].sum()).astype(np.float32)
    kept = rounded > 0
    return NodeLaw(
        tuple(int(token) for token in law.ids[best][kept]),
        tuple(float(probability) for probability in rounded[kept]),
    )


def as_law(node_law: NodeLaw) -> Law:
    """The exact law behind rounded wire probabilities: they are weights, normalised in float64."""
    weights = np.asarray(node_law.probabilities, dtype=np.float64)
    return Law(np.asarray(node_law.tokens, dtype=np.int64), weights / weights.sum())


def point_mass(token: int) -> Law:
    """The law of a deterministic hint."""
    return Law(np.asarray([token], dtype=np.int64), np.ones(1))


def residual(target: Law, draft: Law) -> Law:
    """norm(max(p - q, 0)). Only asked for after a rejection, so some p exceeds its q."""
    q = np.zeros(max(int(target.ids.max()), int(draft.ids.max())) + 1)
    q[draft.ids] = draft.probabilities
    left = np.maximum(target.probabilities - q[target.ids], 0.0)
    keep = left > 0.0
    if not keep.any():  # p and q agree to the last bit: a rejection had no chance to happen
        return target
    return Law(target.ids[keep], left[keep] / left[keep].sum())


def judge(target: Law, draft: Law, token: int, seed: int, position: int) -> int:
    """Speculative sampling of one drafted token (Leviathan 2023, Chen 2023): itself, or a replacement."""
    if uniform(seed, position, Domain.ACCEPT) * draft.of(token) < target.of(token):
        return token
    return residual(target, draft).race(seed, position, Domain.RESIDUAL)[0]
