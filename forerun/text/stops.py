"""Stop strings in a text that arrives in parts.

The match that is complete first ends the text; of those complete at one character, the longest.
So the result depends neither on the order of the list nor on how the text was cut. An automaton
(Aho, Corasick 1975): a few steps per character, however many and long the strings are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from forerun.core.errors import InvalidRequest

START = 0


class StopScanner:
    """State of the scan = the longest suffix of the text that begins a stop string; just that is held back."""

    __slots__ = (
        "_children",
        "_consumed",
        "_depths",
        "_fallbacks",
        "_held",
        "_matches",
        "_state",
        "consumed_at_match",
        "stop",
    )

    def __init__(self, stops: Sequence[str]) -> None:
        """Raises InvalidRequest for an empty stop string, which would match everywhere."""
        self._children: list[dict[str, int]] = [{}]
        self._depths = [0]
        self._matches = [0]  # length of the longest stop string that ends in this state, or 0
        for stop in stops:
            if not stop:
                raise InvalidRequest("a stop string is empty; it needs at least 1 character")
            self._matches[self._insert(stop)] = len(stop)
        self._fallbacks = self._link()
        self._state = START
        self._held = ""
        self._consumed = 0
        self.stop: str | None = None
        """The stop string that matched. Nothing is released after it."""
        self.consumed_at_match: int | None = None
        """Characters fed up to and including the match."""

    def feed(self, text: str) -> tuple[str, str | None]:
        """(text that is certain to stay, the stop string if one is complete)."""
        if self.stop is not None:
            return "", self.stop
        for at, char in enumerate(text, start=1):
            self._state = self._after(char)
            size = self._matches[self._state]
            if size:
                seen = self._held + text[:at]
                self.stop = seen[-size:]
                self.consumed_at_match = self._consumed + at
                self._held = ""
                return seen[:-size], self.stop
        self._consumed += len(text)
        seen = self._held + text
        kept = len(seen) - self._depths[self._state]
        self._held = seen[kept:]
        return seen[:kept], None

    def flush(self) -> str:
        """What was held back: the text ended before it became a stop string."""
        held, self._held, self._state = self._held, "", START
        return held

    def _after(self, char: str) -> int:
        state = self._state
        while char not in self._children[state]:
            if state == START:
                return START
            state = self._fallbacks[state]
        return self._children[state][char]

    def _insert(self, stop: str) -> int:
        state = START
        for depth, char in enumerate(stop, start=1):
            if char not in self._children[state]:
                self._children[state][char] = len(self._children)
                self._children.append({})
                self._depths.append(depth)
                self._matches.append(0)
            state = self._children[state][char]
        return state

    def _link(self) -> list[int]:
        """For each state that of its longest proper suffix, breadth first."""
        fallbacks = [START] * len(self._children)
        queue = deque(self._children[START].values())
        while queue:
            state = queue.popleft()
            self._matches[state] = self._matches[state] or self._matches[fallbacks[state]]
            for char, child in self._children[state].items():
                suffix = fallbacks[state]
                while suffix != START and char not in self._children[suffix]:
                    suffix = fallbacks[suffix]
                fallbacks[child] = self._children[suffix].get(char, START)
                queue.append(child)
        return fallbacks
