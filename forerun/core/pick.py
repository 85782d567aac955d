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

from forerun.core.law import Law, Logits, as_law, draft_law, filtered, greedy, judge, point_mass, top_two
from forerun.core.noise import Domain
from forerun.core.params import Sampling
from forerun.core.tree import NodeLaw

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
    second: int | None  # the likeliest correction; None in rejection mode, which drafts one chain
    law: NodeLaw | None  # what `first` was drawn from, in rejection mode
    sure: float | None = None  # probability of `first` by the draft; None where it must not matter: it was drawn
    share: float = 0.0  # probability of `second` among all but `first`


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
            return law.race(seed, position)[0]
        if proposal is None:
            return law.race(seed, position, Domain.RESIDUAL)[0]
        drawn_from = point_mass(proposal.token) if proposal.law is None else as_law(proposal.law)
        return judge(law, drawn_from, proposal.token, seed, position)

    def guess(self, logits: Logits, position: int) -> Guess:
        """What a draft proposes at `position`, with the same filters and the same noise."""
        logits = self._allowed(logits, position)
        if self.sampling.greedy:
            first, second = top_two(logits)
            return Guess(first, second, None, *_sureness(logits, first, second))
        law = filtered(logits, self.sampling)
        if not self.sampling.chain_only:
            first, second = law.race(self.sampling.seed, position)
            sure = law.of(first)
            return Guess(first, second, None, sure, _share(law.of(second), sure) if second is not None else 0.0)
        sent = draft_law(law, DRAFT_TOP_K)
        first, _ = as_law(sent).race(self.sampling.seed, position, Domain.DRAFT)
        return Guess(first, None, sent)

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


def _sureness(logits: Logits, first: int, second: int | None) -> tuple[float, float]:
    """Probability of the largest logit at temperature 1, and of the second among all but the first."""
    weights = np.exp(logits - logits[first])
    total = float(weights.sum())
    others = total - float(weights[first])
    share = min(1.0, float(weights[second]) / others) if second is not None and others > 0.0 else 0.0
    return float(weights[first]) / total, share


def _share(of: float, beside: float) -> float:
    return min(1.0, of / (1.0 - beside)) if beside < 1.0 else 0.0
