"""How questions begin: so that a draft has met the tasks that people set, and not only what its target asks itself.

An opening is a line of a few words, which the target goes on with; it holds no answer and no fact. Where it says
{document}, earlier answers of the target itself stand. Knows text, no model.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from forerun.core.errors import InvalidRequest
from forerun.runtime.distill.writing import Beginning, Conversations, Kind
from forerun.text import TextModel

DOCUMENT = "{document}"
OWN = Path(__file__).with_name("openings.txt")
BEGUN = 7 / 8
"""Share of the rows that are begun; the others' questions are all the target's."""

ROOM = 0.6
"""Of a row's tokens at most so many are given: what is trained on is the rest."""

SHORTEST = 40
"""Tokens of an answer that may stand as a document."""


@dataclass(frozen=True, slots=True)
class Openings:
    """Each is the tokens before its document and after it; without one all are before it and nothing is None."""

    lines: tuple[tuple[tuple[int, ...], tuple[int, ...] | None], ...]
    digest: str  # of the text they were read from

    @classmethod
    def read(cls, path: Path, text: TextModel) -> Openings:
        """One a line, "\\n" for a line end within it. Raises InvalidRequest: unreadable, or none in it."""
        try:
            written = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidRequest(f"the openings in {path} cannot be read: {error}") from error
        lines = [line.replace("\\n", "\n") for line in written.splitlines() if line.strip()]
        if not lines:
            raise InvalidRequest(f"{path} holds no opening; it needs a line for each")
        parts = []
        for line in lines:
            before, found, after = line.partition(DOCUMENT)
            if DOCUMENT in after:
                raise InvalidRequest(f"an opening has room for one {DOCUMENT}, and {line!r} in {path} names more")
            tokens = tuple(text.vocabulary.encode(before, add_special_tokens=False))
            rest = tuple(text.vocabulary.encode(after, add_special_tokens=False)) if found else None
            parts.append((tokens, rest))
        return cls(tuple(parts), hashlib.sha256(written.encode()).hexdigest()[:12])

    def begin(
        self, rows: int, room: int, documents: Sequence[NDArray[np.int64]], seed: tuple[int, int]
    ) -> list[Beginning]:
        """One for each of `rows` rows with `room` tokens each. Openings with a document need `documents`."""
        random = np.random.default_rng((*seed, 1))
        room = int(room * ROOM)
        fits = [
            line for line in self.lines if len(line[0]) + len(line[1] or ()) <= room - SHORTEST * (line[1] is not None)
        ]
        usable = [line for line in fits if line[1] is None or documents]
        begun = []
        for _ in range(rows):
            if not usable or random.random() >= BEGUN:
                begun.append(Beginning())
                continue
            before, after = usable[random.integers(len(usable))]
            given = before
            if after is not None:
                wanted = int(random.integers(room // 3, room + 1)) - len(before) - len(after)
                order = random.permutation(len(documents))
                given += _joined([documents[at] for at in order], max(SHORTEST, wanted)) + after
            begun.append(Beginning(given, complete=after == ()))
        return begun


def documents_of(data: Conversations) -> list[NDArray[np.int64]]:
    """What the target said in one go, also where it was cut off, without its last token: that one may be an end."""
    found = []
    for tokens, kinds in zip(data.tokens, data.kinds, strict=True):
        edges = np.flatnonzero(np.diff(kinds)) + 1
        for first, end in itertools.pairwise([0, *edges.tolist(), len(kinds)]):
            if kinds[first] == Kind.ANSWER and end - first > SHORTEST:
                found.append(tokens[first : end - 1].astype(np.int64))
    return found


def _joined(documents: Sequence[NDArray[np.int64]], wanted: int) -> tuple[int, ...]:
    """The first `wanted` tokens of them all."""
    tokens: list[int] = []
    for document in documents:
        tokens += document.tolist()
        if len(tokens) >= wanted:
            break
    return tuple(tokens[:wanted])
