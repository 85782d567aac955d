"""The text of one answer: tokens in, shown text out, up to the stop string.

token_ids end with the token that completed the match; text ends before the match
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from forerun.text.detokenizer import Detokenizer
from forerun.text.model import TextModel
from forerun.text.stops import StopScanner


@dataclass(frozen=True, slots=True)
class Piece:
    """What some tokens added."""

    text: str
    tokens_used: int  # of the ids fed: all of them, unless a stop string was complete before
    stop: str | None = None  # the stop string that ended the answer


class AnswerText:
    """Special tokens are hidden. Feeds nothing to the reader that a stop string may still take back."""

    __slots__ = ("_detokenizer", "_scanner")

    def __init__(self, model: TextModel, stops: Sequence[str] = ()) -> None:
        """Raises InvalidRequest for an empty stop string."""
        self._detokenizer = Detokenizer(model)
        self._scanner = StopScanner(stops)

    @property
    def stop(self) -> str | None:
        """The stop string that ended the answer, if one did."""
        return self._scanner.stop

    def feed(self, ids: Sequence[int]) -> Piece:
        """After a stop string no token is used any more."""
        if self.stop is not None:
            return Piece("", 0, self.stop)
        shown: list[str] = []
        for used, token in enumerate(ids, start=1):
            text, stop = self._scanner.feed(self._detokenizer.feed((token,)))
            shown.append(text)
            if stop is not None:
                return Piece("".join(shown), used, stop)
        return Piece("".join(shown), len(ids))

    def flush(self) -> str:
        """The end of an answer that something else ended. Half a character may complete `stop` even here."""
        if self.stop is not None:
            return ""
        text, _ = self._scanner.feed(self._detokenizer.flush())
        return text + self._scanner.flush()
