"""Prompt and output lookup: what followed the last time these tokens stood here (Saxena 2023).

Constant work per token. Runs in the target worker's process: a hint of this kind that had to cross
the network would be a pass late.
"""

from __future__ import annotations

from collections.abc import Sequence

LONGEST = 5
SCORES = {2: 0.45, 3: 0.6, 4: 0.75, 5: 0.85}
"""Chance that the next token is that of the earlier place, by tokens matched. Depends on the prefix alone."""


class NgramIndex:
    """Remembers where each run of 2 to LONGEST tokens ended last."""

    __slots__ = ("_ends", "_match", "_tokens")

    def __init__(self, tokens: Sequence[int] = ()) -> None:
        self._tokens: list[int] = []
        self._ends: dict[tuple[int, ...], int] = {}
        self._match: tuple[int, int] | None = None  # (tokens matched, index that followed)
        self.extend(tokens)

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
        if self._match is None or limit < 1:
            return [], 0.0
        size, at = self._match
        guess: list[int] = []
        known = len(self._tokens)
        while len(guess) < limit:
            guess.append(self._tokens[at] if at < known else guess[at - known])
            at += 1
        return guess, SCORES[size]
