"""Committed tokens and the one tree below the last of them. Both workers keep a sequence as this.

The target commits what it picked, the draft what it was told; either way the tree is re-rooted at
the last committed token, and what grew elsewhere is gone. It does not know KV or time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from forerun.core.tree import ROOT, Bounds, TokenTree

TAIL = 8
"""Committed tokens a hint repeats, so that one from another history is recognised by content."""


class Landing(Enum):
    """What became of a hint."""

    MERGED = "merged"
    KNOWN = "known"  # nothing in it was new
    AHEAD = "ahead"  # its prefix is longer than ours
    OTHER_TAIL = "other_tail"  # its prefix is not ours
    OVERTAKEN = "overtaken"  # what was committed since left its tree


@dataclass(frozen=True, slots=True)
class Hint:
    """`tree` may follow the prefix of `base_len` tokens that ends in `tail` (the root included)."""

    base_len: int
    tail: tuple[int, ...]
    tree: TokenTree


@dataclass(frozen=True, slots=True)
class Advance:
    """How a commit moved through the tree."""

    path: tuple[int, ...]  # old rows of the committed tokens that the tree held, from below the old root
    rows: dict[int, int]  # new row by old row of what is left; empty if the walk left the tree


class TokenSequence:
    """tokens[committed_len - 1] is the root of `tree`."""

    __slots__ = ("bounds", "tokens", "tree")

    def __init__(self, tokens: Sequence[int], bounds: Bounds | None = None) -> None:
        if not tokens:
            raise ValueError("a sequence needs at least one token: the tree is rooted at the last one")
        self.tokens = list(tokens)
        self.bounds = bounds or Bounds()
        self.tree = TokenTree(self.tokens[-1])

    @property
    def committed_len(self) -> int:
        return len(self.tokens)

    @property
    def tail(self) -> tuple[int, ...]:
        return tuple(self.tokens[-TAIL:])

    def advance(self, tokens: Sequence[int]) -> Advance:
        """Commit `tokens` and re-root. The tree survives below the last of them, if it holds it."""
        path = tuple(self.tree.descend(tokens))
        self.tokens.extend(tokens)
        if not tokens:
            return Advance((), {row: row for row in range(len(self.tree))})
        if len(path) == len(tokens):
            self.tree, rows = self.tree.subtree(path[-1])
            return Advance(path, rows)
        self.tree = TokenTree(self.tokens[-1])
        return Advance(path, {})

    def rewind(self, length: int) -> None:
        """Forget committed tokens beyond `length` (at least 1) and everything guessed."""
        if length < 1:
            raise ValueError(f"cannot rewind to {length} tokens: the tree is rooted at the last one")
        del self.tokens[length:]
        self.tree = TokenTree(self.tokens[-1])

    def land(self, hint: Hint, depth: int = 1 << 30) -> Landing:
        """Merge a hint, however old: it is walked through what was committed since (no deeper than `depth`)."""
        node = self._met(hint, self.committed_len)
        if isinstance(node, Landing):
            return node
        grafted = self.tree.graft(hint.tree, node, self.bounds, depth)
        return Landing.MERGED if grafted else Landing.KNOWN

    def served(self, hint: Hint, length: int) -> bool:
        """Whether the hint said how the first `length` tokens go on."""
        node = self._met(hint, length)
        return not isinstance(node, Landing) and any(True for _ in hint.tree.children(node))

    def led(self, hint: Hint) -> bool:
        """Whether what was committed since the prefix of a hint that landed is its likeliest line."""
        return all(map(hint.tree.leads, hint.tree.descend(self.tokens[hint.base_len :])))

    def _met(self, hint: Hint, length: int) -> int | Landing:
        """Row of the hint's tree that the first `length` tokens lead to, or why there is none."""
        if hint.base_len > length:
            return Landing.AHEAD
        tail = self.tokens[max(0, hint.base_len - len(hint.tail)) : hint.base_len]
        if not hint.tail or tuple(tail) != hint.tail or hint.tail[-1] != hint.tree.tokens[ROOT]:
            return Landing.OTHER_TAIL
        since = self.tokens[hint.base_len : length]
        met = [ROOT, *hint.tree.descend(since)]
        return met[-1] if len(met) > len(since) else Landing.OVERTAKEN
