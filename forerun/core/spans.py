"""Which passes get a span of their own, so that a long answer stays readable as a trace.

The first DETAILED ones do, later ones share a window of WINDOW. How spans are made and sent is
telemetry's business; here is only what they cover and count.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

DETAILED = 32
WINDOW = 32

Attributes = dict[str, int | float | str | bool]
Record = Callable[[str, str, int, int, Attributes], None]
"""(traceparent, name, start_ns, end_ns, attributes): makes one finished span below the request's."""


def record_nothing(traceparent: str, name: str, start_ns: int, end_ns: int, attributes: Attributes) -> None:
    """Tracing is off."""


@dataclass(slots=True)
class SpanWindow:
    """Spans of one repeated step of one sequence."""

    record: Record
    traceparent: str
    name: str  # of a detailed span
    window_name: str
    detail: bool = False  # every step its own span
    _seen: int = 0
    _held: int = 0
    _start_ns: int = 0
    _end_ns: int = 0
    _sums: Counter[str] = field(default_factory=Counter)

    def add(self, start_ns: int, end_ns: int, counts: dict[str, int]) -> None:
        """One step happened."""
        self._seen += 1
        if self.detail or self._seen <= DETAILED:
            self.record(self.traceparent, self.name, start_ns, end_ns, dict(counts))
            return
        if self._held == 0:
            self._start_ns = start_ns
        self._held += 1
        self._end_ns = end_ns
        self._sums.update({key: value for key, value in counts.items() if not key.endswith("_len")})
        if self._held == WINDOW:
            self.close()

    def close(self) -> None:
        """Send what is held back."""
        if self._held:
            counts: Attributes = {**self._sums, "forerun.steps": self._held}
            self.record(self.traceparent, self.window_name, self._start_ns, self._end_ns, counts)
            self._held = 0
            self._sums.clear()
