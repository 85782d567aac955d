"""Prompt and output lookup: what followed the last time these tokens stood here (Saxena 2023).

Constant work per token, and a sort of the prompt. Runs in the target worker's process: a hint of this kind that
had to cross the network would be a pass late.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

LONGEST = 5
SCORES = {2: 0.45, 3: 0.6, 4: 0.75, 5: 0.85}
"""Chance that the next token is that of the earlier place, by tokens matched. Depends on the prefix alone."""

RECENT = 64
"""Earlier places that are looked at first: in a loop they are many, and the last of them do."""

Match = tuple[int, int]
"""Tokens matched, and the index of the one that followed."""


class NgramIndex:
    """Remembers where each run of 2 to LONGEST tokens ended last.

    The tokens it begins with are sorted in one go, those that follow are entered one by one: a prompt of 128,000
    tokens, entered so, would hold the worker up for 0.4 s.
    """

    __slots__ = ("_ends", "_first", "_match", "_tokens")

    def __init__(self, tokens: Sequence[int] = ()) -> None:
        self._tokens = list(tokens)
        self._first = _Sorted(tokens)
        self._ends: dict[tuple[int, ...], int] = {}  # of runs that ended after the first tokens
        self._match: Match | None = None  # among these

    def extend(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self._tokens.append(token)
            end = len(self._tokens)
            self._match = None
            for size in range(2, min(LONGEST, end) + 1):
                gram = tuple(self._tokens[end - size :])
                before = self._ends.get(gram)
                if before is not None:
                    self._match = (size, before)  # the longest one stays
                self._ends[gram] = end

    def propose(self, limit: int) -> tuple[list[int], float]:
        """At most `limit` tokens that may follow, and the score of each; empty without a match.

        A match that runs into the end goes on inside the proposal, so a loop is followed round.
        """
        if limit < 1:
            return [], 0.0
        known = len(self._tokens)
        match = self._match
        if match is None or match[0] < LONGEST:
            first = self._first.find(self._tokens[-LONGEST:], known)
            match = max(filter(None, (match, first)), default=None)  # the longest; of two, the later
        if match is None:
            return [], 0.0
        size, at = match
        guess: list[int] = []
        while len(guess) < limit:
            guess.append(self._tokens[at] if at < known else guess[at - known])
            at += 1
        return guess, SCORES[size]


class _Sorted:
    """Ends of all pairs of neighbouring tokens of a text, in order of 16 bits of the pair and then of place."""

    __slots__ = ("_ends", "_hashes", "_tokens")

    def __init__(self, tokens: Sequence[int]) -> None:
        text = np.array(tokens, dtype=np.int64)
        hashes = _hash(text[:-1], text[1:]).astype(np.uint16)
        order = np.argsort(hashes, kind="stable")  # of 16 bits: a radix sort
        self._hashes = hashes[order]
        self._ends = order + 2
        self._tokens = np.concatenate((np.full(LONGEST, -1), text))  # what a run that starts too early meets

    def find(self, suffix: Sequence[int], before: int) -> Match | None:
        """The longest run that `suffix` ends with, 2 tokens or more, where it last ended before `before`."""
        if len(suffix) < 2:
            return None
        key = np.uint16(_hash(suffix[-2], suffix[-1]) & 0xFFFF)
        begin, end = (np.searchsorted(self._hashes, key, side) for side in ("left", "right"))
        ends = self._ends[begin:end]
        if len(ends) and ends[-1] == before:
            ends = ends[:-1]
        match = self._longest(ends[-RECENT:], suffix)
        if len(ends) > RECENT and (match is None or match[0] < len(suffix)):
            match = self._longest(ends, suffix)
        return match

    def _longest(self, ends: NDArray[np.intp], suffix: Sequence[int]) -> Match | None:
        match: Match | None = None
        for size in range(1, len(suffix) + 1):
            ends = ends[self._tokens[ends + (LONGEST - size)] == suffix[-size]]
            if not len(ends):
                break
            match = size, int(ends[-1])
        return match if match and match[0] >= min(SCORES) else None


def _hash(first: Any, second: Any) -> Any:
    """Of a pair of tokens; its lowest 16 bits are well mixed."""
    return first * 40503 + second
