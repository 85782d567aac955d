"""Text of a growing answer, each character once and only when it is whole.

    "".join(feeds) + flush() == decode(all ids), however the ids are cut into feeds

The cost of a token does not depend on the length of the answer: only a window of the last tokens is
joined again, the rest of it being left context (a decoder may treat the first token of a text
differently). The library's DecodeStream is not used: it never gives out a final U+FFFD, keeps all
tokens of a row of broken bytes, and raises when bytes turn out to be broken after some were shown.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from forerun.text.model import TextModel

CONTEXT = 4
"""Tokens of left context. A character has at most 4 bytes, so a broken one never began before."""
LOST = "\ufffd"


class Detokenizer:
    """Of one answer. Two kinds of tokenizer cut characters into tokens:

    - byte level: decoded bytes are final up to the last U+FFFD, which may yet become a character;
    - byte fallback: a run of byte tokens is text if it is valid as a whole, else one U+FFFD a byte.
      Characters of the run that are complete are given out at once ("\\n" is a byte token to many
      models), and stay when a later byte of the run is broken; from there the run is U+FFFD.
    """

    __slots__ = ("_broken", "_given", "_hidden", "_run", "_run_bytes", "_vocabulary", "_window")

    def __init__(self, model: TextModel, *, skip_special_tokens: bool = True) -> None:
        self._vocabulary = model.vocabulary
        self._hidden = model.vocabulary.special if skip_special_tokens else frozenset()
        self._window: list[int] = []
        self._given = ""  # what was given out of the window's text
        self._run: list[int] = []  # byte tokens of the character that is not complete
        self._run_bytes = b""
        self._broken = False  # the run of byte tokens that goes on is not valid

    def feed(self, ids: Sequence[int]) -> str:
        """Text that is final with these tokens. Ids that the vocabulary lacks have none."""
        return "".join([self._step(token) for token in ids])

    def flush(self) -> str:
        """What was held back, as it stands."""
        if self._run:
            return self._lose_run()
        text = self._vocabulary.join(self._window)
        rest = text[len(self._given) :]
        self._given = text
        return rest

    def _step(self, token: int) -> str:
        if token in self._hidden or token not in self._vocabulary:
            return ""
        byte = self._vocabulary.byte_tokens.get(token)
        if byte is not None:
            return self._step_byte(token, byte)
        lost = self._lose_run()
        self._broken = False
        self._window.append(token)
        fresh = self._release()
        if len(self._window) > 2 * CONTEXT:
            self._slide(self._window[-CONTEXT:])
        return lost + fresh

    def _step_byte(self, token: int, byte: int) -> str:
        self._run.append(token)
        self._run_bytes += bytes([byte])
        if not self._broken:
            try:
                self._run_bytes.decode()
            except UnicodeDecodeError as error:
                if error.reason == "unexpected end of data":
                    return ""
                self._broken = True
        if self._broken:
            return self._lose_run()
        self._window += self._run
        fresh = self._release()
        self._slide(self._run)  # a whole character: the next one joins a valid run
        self._run, self._run_bytes = [], b""
        return fresh

    def _release(self) -> str:
        text = self._final_text()
        fresh = text[len(self._given) :]
        self._given = text
        return fresh

    def _slide(self, window: list[int]) -> None:
        self._window = window
        self._given = self._final_text()

    def _final_text(self) -> str:
        text = self._vocabulary.join(self._window)
        held = text.endswith(LOST) and not self._vocabulary.byte_tokens
        return text[:-1] if held else text

    def _lose_run(self) -> str:
        """The bytes at hand will not become a character."""
        if not self._run:
            return ""
        lost = LOST * len(self._run)
        self._slide(self._run[-1:])
        self._run, self._run_bytes = [], b""
        return lost
