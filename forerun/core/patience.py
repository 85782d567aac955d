"""How long an otherwise empty pass is held back for hints. Time is passed in, never read."""

from __future__ import annotations

FRACTION = 0.5
"""Of a pass: waiting longer costs more than a miss."""

DECAY = 0.8


class Patience:
    """One sequence's memory of how soon hints follow an Emit."""

    __slots__ = ("_asked_at", "_expired", "_lag_s")

    def __init__(self) -> None:
        self._lag_s: float | None = None  # Emit to Hint, decayed mean; None: no hint seen yet
        self._asked_at: float | None = None
        self._expired = False

    def emitted(self, now: float, asking: bool = True) -> None:
        """An Emit left; `asking`: a draft is to answer it."""
        if not asking:
            self._asked_at = None
        elif self._asked_at is None:
            self._asked_at = now

    def hinted(self, now: float) -> None:
        """A hint arrived."""
        if self._asked_at is not None:
            lag = now - self._asked_at
            self._lag_s = lag if self._lag_s is None else DECAY * self._lag_s + (1.0 - DECAY) * lag
            self._asked_at = None
        self._expired = False

    def deadline(self, since: float, pass_s: float, chance: float = 1.0) -> float | None:
        """Until when a pass that could begin at `since` may wait; None: not at all.

        Only if hints usually come in time, and so soon that waiting costs half of what the first node of one, right
        with this `chance`, saves; after one expiry not again until a hint arrives.
        """
        if self._expired or self._lag_s is None or self._lag_s > min(FRACTION, 0.5 * chance) * pass_s:
            return None
        return since + FRACTION * pass_s

    def expire(self) -> None:
        self._expired = True
