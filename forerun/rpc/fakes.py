"""In-memory stand-ins for the Attach stream: frames are really encoded, time is a count of ticks or a given clock.

Hints may be dropped, delayed, repeated and reordered, as the protocol allows; everything else keeps
its order and arrives, as a stream promises. A cut tube delivers nothing more, as a killed worker does.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

Frame = TypeVar("Frame")


@dataclass(frozen=True, slots=True)
class Faults:
    """What happens to frames, by chance and in the tube's unit of time."""

    drop: float = 0.0
    repeat: float = 0.0
    delay: tuple[int, int] = (0, 0)  # least and most time on the way


class Tube(Generic[Frame]):
    """One direction of a stream. Without a `clock` time goes on by one with each tick."""

    def __init__(
        self,
        faults: Faults,
        is_hint: Callable[[Frame], bool],
        rng: random.Random,
        clock: Callable[[], int] | None = None,
    ) -> None:
        self._clock = clock
        self._faults = faults
        self._is_hint = is_hint
        self._rng = rng
        self._now = 0
        self._serial = 0
        self._last_due = 0  # of ordered frames
        self._waiting: list[tuple[int, int, Frame]] = []  # (due tick, order, frame)
        self._open = True

    def put(self, frame: Frame) -> None:
        if not self._open:
            return
        self._now = self._clock() if self._clock else self._now
        due = self._now + self._rng.randint(*self._faults.delay)
        if self._is_hint(frame):
            if self._rng.random() < self._faults.drop:
                return
            if self._rng.random() < self._faults.repeat:
                self._wait(due + self._rng.randint(*self._faults.delay), frame)
        else:
            due = self._last_due = max(due, self._last_due)
        self._wait(due, frame)

    def _wait(self, due: int, frame: Frame) -> None:
        self._serial += 1
        self._waiting.append((due, self._serial, frame))

    def tick(self) -> list[Frame]:
        """What is due arrives."""
        self._now = self._clock() if self._clock else self._now
        due = sorted(entry for entry in self._waiting if entry[0] <= self._now)
        self._waiting = [entry for entry in self._waiting if entry[0] > self._now]
        self._now += self._clock is None
        return [frame for _, _, frame in due] if self._open else []

    def cut(self) -> None:
        self._open = False
        self._waiting.clear()


class TubeOutbox:
    """An Outbox that hands every item on at once."""

    def __init__(self, put: Callable[[Any], None]) -> None:
        self._put = put
        self.dropped = 0

    def put(
        self,
        item: Any,
        key: Hashable | None = None,
        merge: Callable[[Any, Any], Any] | None = None,
        droppable: bool = False,
    ) -> None:
        self._put(item)
