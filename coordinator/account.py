"""What the tokens of one answer cost, Emit by Emit: passes, drafts, preemptions, workers. Feeds usage only."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from functools import reduce

from forerun.core.hits import NONE, added
from forerun.core.messages import Emit


@dataclass(frozen=True, slots=True)
class Counts:
    """What usage reports besides lengths."""

    drafted: int
    accepted: int
    passes: int
    branched: int
    preempted: int
    targets: int  # workers that gave tokens
    hits: tuple[int, ...]  # by core/hits.py


class Account:
    """Emits by where their fresh tokens begin, which only grows."""

    def __init__(self) -> None:
        self._bases: list[int] = []
        self._emits: list[tuple[Emit, str]] = []

    def add(self, base_len: int, emit: Emit, worker: str) -> None:
        """`base_len`: committed_len before it."""
        self._bases.append(base_len)
        self._emits.append((emit, worker))

    def counts(self, end: int) -> Counts:
        """Work behind the tokens before position `end`: what a stop string cut off is not counted.

        Of passes that came as one message and were cut in the middle, at most one per token is.
        """
        kept = [(base, *entry) for base, entry in zip(self._bases, self._emits, strict=True) if base < end]
        return Counts(
            drafted=sum(emit.drafted for _, emit, _ in kept),
            accepted=sum(min(emit.accepted, end - base) for base, emit, _ in kept),
            passes=sum(min(emit.passes, end - base) for base, emit, _ in kept),
            branched=sum(min(emit.branched, end - base) for base, emit, _ in kept),
            preempted=sum(emit.preempted for _, emit, _ in kept),
            targets=len({worker for _, _, worker in kept}),
            hits=reduce(added, (emit.hits for _, emit, _ in kept), NONE),
        )

    def windows(self, start: int, end: int) -> list[int]:
        """Nodes checked in each pass whose tokens begin at a position in [start, end); cut as in `counts`."""
        found: list[int] = []
        for index in range(bisect_left(self._bases, start), bisect_left(self._bases, end)):
            found += self._emits[index][0].windows[: end - self._bases[index]]
        return found
