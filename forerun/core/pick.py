"""The decision at one row of logits, for both sides: what the target says, what a draft would guess.

greedy     argmax
coupled    argmin E / p on noise keyed by (seed, position, token): the target's token does not
           depend on what was drafted, and a draft that races its q on the same noise often agrees
rejection  accept a drafted token with min(1, p / q), else draw from the residual; alone in
           knowing what was drafted, and promising a distribution, not a text
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from forerun.core.law import Law, Logits, as_law, draft_law, filtered, greedy, judge, likeliest, point_mass
from forerun.core.noise import Domain
from forerun.core.params import Sampling
from forerun.core.tree import NodeLaw

OTHERS = 3
"""Corrections that a draft names for a guess, at most."""

DRAFT_TOP_K = 64
"""Tokens of a draft's law that travel with a node in rejection mode."""


@dataclass(frozen=True, slots=True)
class Proposal:
    """The one drafted token a rejection test is about, and the law it was drawn from (None: deterministic)."""

    token: int
    law: NodeLaw | None


@dataclass(frozen=True, slots=True)
class Guess:
    """A draft's opinion of one position."""

    first: int
    others: tuple[int, ...]  # the likeliest corrections, best first; none in rejection mode, which drafts one chain
    law: NodeLaw | None  # what `first` was drawn from, in rejection mode
    sure: float | None = None  # probability of `first` by the draft; None where it must not matter: it was drawn
    shares: tuple[float, ...] = ()  # probability of each of the others among all but those before it

    @property
    def second(self) -> int | None:
        return self.others[0] if self.others else None


@dataclass(frozen=True, slots=True)
class Picker:
    """Everything that decides a token besides the logits. `position` counts from the prompt's start."""

    sampling: Sampling
    vocab_size: int  # ids from here up are padding of the embedding table
    ends: tuple[int, ...] = ()
    ends_from: int = 0  # first position at which an end token may stand

    def pick(self, logits: Logits, position: int, proposal: Proposal | None = None) -> int:
        """The target's token at `position`. logits: [vocab] float32, raw."""
        logits = self._allowed(logits, position)
        if self.sampling.greedy:
            return greedy(logits)
        law = filtered(logits, self.sampling)
        seed = self.sampling.seed
        if not self.sampling.chain_only:
            return law.finish(seed, position, 1)[0]
        if proposal is None:
            return law.finish(seed, position, 1, Domain.RESIDUAL)[0]
        drawn_from = point_mass(proposal.token) if proposal.law is None else as_law(proposal.law)
        return judge(law, drawn_from, proposal.token, seed, position)

    def guess(self, logits: Logits, position: int) -> Guess:
        """What a draft proposes at `position`, with the same filters and the same noise."""
        logits = self._allowed(logits, position)
        if self.sampling.greedy:
            first, *others = likeliest(logits, 1 + OTHERS)
            weights = logits - logits[first]
            np.exp(weights, out=weights)  # temperature 1
            weights /= np.add.reduce(weights)
            sure, *chances = weights[[first, *others]].tolist()
            return Guess(first, tuple(others), None, sure, _shares(sure, chances))
        law = filtered(logits, self.sampling)
        if not self.sampling.chain_only:
            places = law.places(self.sampling.seed, position, 1 + OTHERS)
            first, *others = law.ids[places].tolist()
            sure, *chances = law.probabilities[places].tolist()
            return Guess(first, tuple(others), None, sure, _shares(sure, chances))
        sent = draft_law(law, DRAFT_TOP_K)
        first, _ = as_law(sent).race(self.sampling.seed, position, Domain.DRAFT)
        return Guess(first, (), sent)

    def law(self, logits: Logits, position: int) -> Law:
        """The distribution `pick` draws from, for tests and logprobs."""
        return filtered(self._allowed(logits, position), self.sampling)

    def _allowed(self, logits: Logits, position: int) -> Logits:
        logits = logits[: self.vocab_size]
        banned = [end for end in self.ends if end < self.vocab_size] if position < self.ends_from else []
        if not banned or len(banned) == len(logits):  # something has to be picked
            return logits
        logits = logits.copy()
        logits[banned] = -np.inf
        return logits


def _shares(sure: float, chances: list[float]) -> tuple[float, ...]:
    """Of each chance among what those before it leave."""
    shares, left = [], 1.0 - sure
    for chance in chances:
        shares.append(min(1.0, chance / left) if left > 0.0 else 0.0)
        left -= chance
    return tuple(shares)
