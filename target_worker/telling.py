"""What is told of a sequence's passes: a span each, with what was known of the draft's guesses when it began."""

from __future__ import annotations

from collections.abc import Sequence

from forerun.core.hits import Hit, Hits
from forerun.core.spans import SpanWindow


class Telling:
    """Of one sequence. A pass's span is told once it is known whether hints were late for it."""

    def __init__(self, spans: SpanWindow) -> None:
        self._spans = spans
        self._hits = Hits()
        self._hit: Hit | None = None  # what was known when the pass that runs began
        self._span: tuple[int, int, dict[str, int]] | None = None  # of the last pass, while its verdict is open

    @property
    def open_len(self) -> int | None:
        """committed_len at the begin of the pass that waits for its verdict."""
        return self._hits.open_len

    def pass_begins(self, committed_len: int, wanted: bool) -> None:
        """A pass that picks tokens begins; wanted: hints were to serve it."""
        before, self._hit = self._hits.begins(committed_len, wanted)
        self._tell(before)

    def committed(self, known: bool, along: bool, now: float) -> None:
        """As `Hits.committed`."""
        self._hits.committed(known, along, now)

    def hinted(self, serves_open: bool, knows: bool, arrived: float, led: bool) -> None:
        """As `Hits.hinted`."""
        self._tell(self._hits.hinted(serves_open, knows, arrived, led))

    def pass_ended(self, started_ns: int, ended_ns: int, counts: dict[str, int], *, over: bool) -> Sequence[int]:
        """Returns hits since the pass before. over: there will be no other pass."""
        if self._hit is not None:
            counts[_attribute(self._hit)] = 1
        self._span = (started_ns, ended_ns, counts)
        if over:
            self._tell(self._hits.ends())
        elif self._hits.open_len is None:
            self._tell(None)
        return self._hits.take()

    def close(self) -> None:
        """The sequence is over here."""
        self._tell(self._hits.ends())
        self._spans.close()

    def _tell(self, verdict: Hit | None) -> None:
        if self._span is not None:
            started_ns, ended_ns, counts = self._span
            self._span = None
            self._spans.add(started_ns, ended_ns, counts if verdict is None else {**counts, _attribute(verdict): 1})


def _attribute(hit: Hit) -> str:
    return f"forerun.{hit.name.lower()}"
