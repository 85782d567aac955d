"""Names and parameters that every role understands, free of wire and tensor types.

The numbers of the enums are those of proto/forerun/v1/common.proto (tested).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

GREEDY_BELOW = 1e-5
"""Temperatures under this are greedy: dividing by them would only overflow."""


MOST_DRAFT_TOKENS = 64
"""Nodes that a request may have checked in one pass."""


class Source(IntEnum):
    """Where a hint comes from."""

    MODEL = 1
    EARLY_EXIT = 2
    NGRAM = 3
    DISTILLED = 4

    @property
    def label(self) -> str:
        return self.name.lower()

    @property
    def name_on_wire(self) -> str:
        return f"SOURCE_{self.name}"

    @classmethod
    def parse(cls, label: str) -> Source:
        """Raises KeyError with the known labels if `label` is none of them."""
        by_label = {source.label: source for source in cls}
        if label not in by_label:
            raise KeyError(f"unknown hint source {label!r}; known: {', '.join(by_label)}")
        return by_label[label]


class Verification(IntEnum):
    """How the target decides at a node."""

    COUPLED = 1
    REJECTION = 2
    TYPICAL = 3


class Finish(IntEnum):
    """Why a target ended a sequence."""

    END_TOKEN = 1
    LENGTH = 2


@dataclass(frozen=True, slots=True)
class Sampling:
    """One request's sampling, defaults filled in. Order: temperature, top_k, top_p, min_p."""

    temperature: float = 1.0
    top_k: int = 0  # 0: no limit
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0  # 64 bits
    verification: Verification = Verification.COUPLED

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def chain_only(self) -> bool:
        """Rejection sampling needs one draw per position, so one child per node."""
        return self.verification is Verification.REJECTION and not self.greedy


@dataclass(frozen=True, slots=True, order=True)
class SeqId:
    """A sequence on a worker: the request and the number of its placement on that worker role."""

    request_id: str
    attempt: int = 0
