"""A simulated model: stated pass time, acceptance and vocabulary, everything else real.

    sim:pass=20ms,row=0.2ms,step=2ms,accept=0.8,branch=0.3,vocab=1000,context=4096

A pass takes `pass` and `row` for each of its rows, a hundredth of `pass` unless said: wide trees are not free.

The target's next token is a hash of the tokens before it, read back *from the KV columns*, so a
wrong rollback changes the text as it would with a real model. A draft of the same name guesses that
token first with chance `accept`, decided by the same hash; if not, second with chance `branch`.
"""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from forerun.core.errors import ModelRefused
from forerun.core.pages import TILE, Pages
from forerun.runtime.batch import lower
from forerun.runtime.passes import Run

PREFIX = "sim:"
_SEQUENCES = 64
"""For how many sequences of full length there is KV unless said."""

EARLY_S = 2e-4
"""So long before a pass is over its process is awake."""

_PEAK = 30.0
"""Logit of the right token: no temperature up to 2 makes another one likely."""


@dataclass(frozen=True, slots=True)
class SimSpec:
    """What is simulated. Times in seconds."""

    pass_s: float = 0.020  # a target pass
    row_s: float | None = None  # each of its rows; None: a hundredth of pass_s
    step_s: float = 0.002  # a draft step
    accept: float = 0.8  # chance that the draft's first guess is the target's token
    branch: float = 0.3  # chance that its runner-up is, if the first guess is not
    vocab: int = 1000
    context: int = 4096
    seed: int = 0

    def pass_of(self, rows: int) -> float:
        """Seconds of a target pass: a wide tree is not free."""
        return self.pass_s + rows * (self.pass_s / 100 if self.row_s is None else self.row_s)

    @classmethod
    def parse(cls, model: str) -> SimSpec:
        """Raises ModelRefused naming the key or value that is wrong and what would be right."""
        names = {"pass": "pass_s", "row": "row_s", "step": "step_s"}
        known = {field.name for field in fields(cls)}
        values: dict[str, float | int] = {}
        for part in filter(None, model.removeprefix(PREFIX).split(",")):
            key, _, text = part.partition("=")
            name = names.get(key, key)
            if name not in known or key in ("pass_s", "row_s", "step_s"):
                known_keys = "pass, row, step, accept, branch, vocab, context, seed"
                raise ModelRefused(f"simulated model has no {key!r}; it has {known_keys}")
            match = re.fullmatch(r"(\d+(?:\.\d+)?)(us|ms|s)?", text)
            if not match or (match[2] is not None) != name.endswith("_s"):
                right = "a time such as 20ms" if name.endswith("_s") else "a number"
                raise ModelRefused(f"{key}={text!r} is not {right}")
            scale = {"us": 1e-6, "ms": 1e-3, "s": 1.0, None: 1.0}[match[2]]
            values[name] = (
                float(match[1]) * scale if name.endswith("_s") or name in ("accept", "branch") else int(float(match[1]))
            )
        spec = cls(**values)  # type: ignore[arg-type]
        fine = 0.0 <= spec.accept <= 1.0 and 0.0 <= spec.branch <= 1.0 and 0 <= spec.seed < 2**63
        if not fine or not 3 < spec.vocab < 2**24 or not 1 < spec.context < 2**24:
            raise ModelRefused(
                "a simulated model needs accept and branch in [0, 1], vocab above 3 and context above 1 (both below "
                "2**24), and a seed below 2**63"
            )
        return spec


def _sleep(seconds: float) -> None:
    """As long as is said: a system wakes a process a little late, and a step of a draft is short."""
    end = time.perf_counter() + seconds
    time.sleep(max(0.0, seconds - EARLY_S))
    while time.perf_counter() < end:
        pass


class SimModel:
    """`Model` without weights: its KV holds token ids. A draft's passes take `step`, and its guesses may be wrong."""

    def __init__(
        self,
        spec: SimSpec,
        draft: bool,
        sleep: Callable[[float], None] = _sleep,
        pages: int | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.spec = spec
        self.vocab_size = spec.vocab
        self.context_limit = spec.context
        self.pages = Pages(pages or _SEQUENCES * -(-spec.context // TILE))
        self._columns = np.zeros((self.pages.count + 1, TILE), dtype=np.uint32)
        self._draft = draft
        self._sleep = sleep
        self._clock = clock

    def forward(self, runs: Sequence[Run]) -> list[NDArray[np.float32]]:
        began = self._clock()
        batch = lower(runs, self.pages.take_copies())
        source, to = batch.copies.T
        self._columns[to] = self._columns[source]
        row, page, column = batch.writes.T
        self._columns[page, column] = batch.tokens[row]
        answers = []
        for run in runs:
            text = self._columns[run.path.pages[: run.tiles]].reshape(-1)
            end = run.start + len(run.tokens) + 1
            answers.append(self._rows([text[:length] for length in range(end - run.logit_rows, end)]))
        rows = len(batch.tokens)
        wanted = self.spec.step_s if self._draft else self.spec.pass_of(rows)
        left = wanted - (self._clock() - began)
        if left > 0:
            self._sleep(left)
        return answers

    def restart(self) -> None:
        self.pages.forget()

    def _rows(self, prefixes: list[NDArray[np.uint32]]) -> NDArray[np.float32]:
        logits = np.zeros((len(prefixes), self.vocab_size), dtype=np.float32)
        for row, prefix in enumerate(prefixes):
            right, wrong, luck = self._hashed(prefix)
            first, second = right, wrong
            if self._draft and luck >= self.spec.accept:
                found = (luck - self.spec.accept) < self.spec.branch * (1.0 - self.spec.accept)
                first, second = wrong, right if found else self._another(right, wrong)
            logits[row, first] = _PEAK
            logits[row, second] = _PEAK / 2
        return logits

    def _hashed(self, prefix: NDArray[np.uint32]) -> tuple[int, int, float]:
        """The next token after this very prefix, a wrong one, and a number in [0, 1)."""
        digest = hashlib.blake2b(prefix.tobytes(), digest_size=24, salt=self.spec.seed.to_bytes(8, "little")).digest()
        right, wrong, luck = (int.from_bytes(digest[i : i + 8], "little") for i in (0, 8, 16))
        right %= self.vocab_size
        wrong = (right + 1 + wrong % (self.vocab_size - 1)) % self.vocab_size
        return right, wrong, luck / 2**64

    def _another(self, right: int, wrong: int) -> int:
        """A token that is neither."""
        return next(token for token in range(3) if token not in (right, wrong))
