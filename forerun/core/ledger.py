"""What a request has been answered so far. The coordinator's truth; workers hold caches of it."""

from __future__ import annotations

from collections.abc import Sequence

from forerun.core.errors import LedgerConflict


class Ledger:
    """committed_len = prompt_len + completion tokens; it only grows."""

    __slots__ = ("prompt_len", "tokens")

    def __init__(self, prompt: Sequence[int]) -> None:
        self.tokens = list(prompt)
        self.prompt_len = len(prompt)

    @property
    def committed_len(self) -> int:
        return len(self.tokens)

    @property
    def completion(self) -> list[int]:
        return self.tokens[self.prompt_len :]

    def commit(self, base_len: int, tokens: Sequence[int]) -> list[int]:
        """Append an Emit and return what is new in it; a repeated one returns nothing.

        Raises:
            LedgerConflict: it starts beyond the end, before the prompt's end, or differs from what is committed.
        """
        if not self.prompt_len <= base_len <= self.committed_len:
            raise LedgerConflict(
                f"emit at {base_len} does not touch the ledger, which holds [{self.prompt_len}, {self.committed_len}]"
            )
        known = self.tokens[base_len : base_len + len(tokens)]
        if list(tokens[: len(known)]) != known:
            raise LedgerConflict(f"emit at {base_len} says {list(tokens[: len(known)])}, committed is {known}")
        fresh = list(tokens[len(known) :])
        self.tokens.extend(fresh)
        return fresh
