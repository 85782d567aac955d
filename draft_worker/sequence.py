"""One sequence on a draft: the prefix it was told, the tree it grows, and where each node's KV lies."""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Sequence

import numpy as np
from numpy.typing import NDArray

from forerun.core.acceptance import Acceptance
from forerun.core.errors import SequenceRefused
from forerun.core.messages import Sync
from forerun.core.pages import KV, Path
from forerun.core.params import SeqId, Source
from forerun.core.pick import Guess, Picker
from forerun.core.sequence import Hint, TokenSequence
from forerun.core.spans import Record, SpanWindow
from forerun.core.tree import ROOT, NodeLaw
from forerun.runtime.passes import Run

FAINT = 0.01
"""A node less likely than this to lie on the realised path is not grown."""


class DraftSequence:
    """A node is *grown* when its row was computed: its KV lies at the end of a path and its children are known.

    The root is grown when the debt is paid: kv.cached_len == committed_len.
    """

    def __init__(
        self,
        link: Hashable,
        sync: Sync,
        kv: KV,
        vocab_size: int,
        limit: int,
        source: Source,
        pool: Acceptance,
        record: Record,
    ) -> None:
        """pool: what sequences before this one say of such guesses."""
        if sync.params is None:
            raise SequenceRefused("the first Sync of a sequence carries its params")
        if not sync.tokens:
            raise SequenceRefused("the first Sync of a sequence carries its prefix, at least one token")
        self.link = link
        self.seq = sync.seq
        self.params = sync.params
        self.traceparent = sync.traceparent
        self.want = sync.want
        self.kv = kv
        self.text = TokenSequence(sync.tokens)
        kv.adopt(sync.tokens)
        self.acceptance = Acceptance(pool)
        self._most_len = min(limit, len(sync.tokens) + sync.params.remaining)
        ends = tuple(sorted(sync.params.ends))
        vocab_size = min(vocab_size, sync.params.vocab_size)
        self._picker = Picker(sync.params.sampling, vocab_size, ends, sync.params.ends_from)
        self._source = source
        self._paths: dict[int, Path] = {}  # of grown nodes below the root
        self._guesses: dict[int, Guess] = {}  # of grown nodes, the root among them
        self._frontier: dict[int, float] = {}  # reach of nodes that may be grown
        self._unsaid: set[int] = set()  # rows of the tree that were not hinted yet
        self._growing_ns: tuple[int, int] | None = None
        self._grown_now = 0
        self.spans = SpanWindow(record, sync.traceparent, "draft.grow", "draft.window")

    @property
    def have_len(self) -> int:
        return self.text.committed_len

    @property
    def debt(self) -> int:
        return self.text.committed_len - self.kv.cached_len

    # --- being told ----------------------------------------------------------------------------

    def sync(self, sync: Sync) -> None:
        """Take the prefix it states: keep the longest match, cut the rest, append. base_len <= have_len."""
        self._close_span()
        self.want = sync.want
        overlap = self.text.tokens[sync.base_len : sync.base_len + len(sync.tokens)]
        same = next((i for i, (a, b) in enumerate(zip(overlap, sync.tokens, strict=False)) if a != b), len(overlap))
        if sync.base_len + same < self.have_len:
            self._rewind(sync.base_len + same)
        self._advance(sync.tokens[same:])

    def _rewind(self, length: int) -> None:
        if length < 1:
            raise SequenceRefused("a Sync may not take back the first token of a sequence")
        self._drop_branches()
        self.text.rewind(length)
        self.kv.truncate(min(self.kv.cached_len, length - 1))  # the new root is grown again

    def _advance(self, tokens: Sequence[int]) -> None:
        """Re-root; the branch that won keeps its KV, the rest is freed."""
        if not tokens:
            return
        self._learn(tokens)
        base_len, advance = self.text.committed_len, self.text.advance(tokens)
        won = [self._paths[row] for row in advance.path if row in self._paths]
        kept = {new: self._paths.pop(old) for old, new in advance.rows.items() if old in self._paths and new != ROOT}
        if won:
            self.kv.commit(self.text.tokens, base_len + len(won), won[-1], reclaim=not kept)
        guesses = {new: self._guesses[old] for old, new in advance.rows.items() if old in self._guesses}
        unsaid = {new for old, new in advance.rows.items() if old in self._unsaid and new != ROOT}
        self._drop_branches()
        self._paths, self._guesses = kept, guesses
        self._unsaid = unsaid
        for row in range(1, len(self.text.tree)):
            if row not in kept:
                self._consider(row)
        for row in guesses:
            self._offer_others(row)
        if not won and not kept:
            self.kv.truncate(self.kv.cached_len)  # nobody uses the columns behind it any more

    def _learn(self, tokens: Sequence[int]) -> None:
        """What the target picked, beside what was guessed there."""
        tree = self.text.tree
        for row, token in zip((ROOT, *tree.descend(tokens)), tokens, strict=False):
            guess = self._guesses.get(row)
            if guess is None:
                break
            self.acceptance.observe(guess.sure, guess.shares, token, (guess.first, *guess.others))

    def _drop_branches(self) -> None:
        for path in self._paths.values():
            self.kv.drop(path)
        self._forget_growth()

    @property
    def branches(self) -> int:
        """Grown nodes, each with a page of its own."""
        return len(self._paths)

    def may_grow(self, row: int) -> bool:
        """It is still where it was chosen."""
        return row in self._frontier

    def shed(self) -> None:
        """Give the pages of its branches to others; it grows them again when there is room."""
        self._drop_branches()
        self.text.rewind(self.text.committed_len)
        self.kv.truncate(min(self.kv.cached_len, self.text.committed_len - 1))

    def _forget_growth(self) -> None:
        self._unsaid.clear()
        self._paths.clear()
        self._guesses.clear()
        self._frontier.clear()

    # --- growing -------------------------------------------------------------------------------

    def candidates(self, most: int) -> list[tuple[float, int]]:
        """The `most` best nodes to grow now, best first: (chance to lie on the realised path, row).

        One rule for run-ahead, branches at corrections and dynamic length. While the prefix is not
        in KV only the root is one: its run pays the debt.
        """
        if self.want <= 0 or self.text.committed_len >= self._most_len:
            return []
        if self.debt:
            return [(1.0, ROOT)]
        if self.text.tree.node_count >= self.want:
            return []
        return heapq.nlargest(most, ((reach, row) for row, reach in self._frontier.items()))

    def _consider(self, row: int) -> None:
        """It may be grown, unless nothing comes after it or it is hardly ever reached."""
        tree = self.text.tree
        reach = tree.reach(row)
        # The deepest node that can be checked leaves room for the token after it.
        room = self.text.committed_len + tree.depth(row) < self._most_len - 1
        if room and reach >= FAINT and tree.tokens[row] not in self.params.ends:
            self._frontier[row] = reach

    def run(self, row: int, chunk: int) -> Run:
        """The rows that grow `row`: for the root its debt (a chunk of it), else the node alone. Raises OutOfPages."""
        if row == ROOT:
            start = self.kv.cached_len
            tokens = tuple(self.text.tokens[start : start + chunk])
            logit_rows = int(start + len(tokens) == self.text.committed_len)
            return Run(self.kv.extend(len(tokens)), tokens, start, logit_rows)
        tree = self.text.tree
        parent, start = tree.parents[row], self.text.committed_len + tree.depth(row) - 1
        path = self.kv.branch(self.kv.trunk if parent == ROOT else self._paths[parent], start, 1)
        self._paths[row] = path
        del self._frontier[row]
        return Run(path, (tree.tokens[row],), start, logit_rows=1)

    def grow(self, row: int, run: Run, logits: NDArray[np.float32], started_ns: int, ended_ns: int) -> None:
        """Children of `row` by the logits of its run; none while debt is left."""
        self._growing_ns = (self._growing_ns[0] if self._growing_ns else started_ns, ended_ns)
        if row == ROOT:
            end = run.start + len(run.tokens)
            self.kv.commit(self.text.tokens, end, judged=end == self.text.committed_len)
            if self.debt:
                return
        tree = self.text.tree
        before = len(tree)
        position = self.text.committed_len + tree.depth(row)
        guess = self._picker.guess(logits[-1], position)
        self._guesses[row] = guess
        self._offer(row, guess.first, self.acceptance.first(guess.sure), guess.law)
        self._offer_others(row)
        self._grown_now += len(tree) - before

    def _offer_others(self, row: int) -> None:
        """The runners-up below `row` that are likely enough to be grown; until then nobody needs them."""
        guess, tree = self._guesses[row], self.text.tree
        reach = tree.reach(row)
        if reach < FAINT:
            return
        least = FAINT / reach
        scores = self.acceptance.others(guess.sure, guess.shares, least)
        for token, score in zip(guess.others, scores, strict=False):
            if score >= least and tree.child(row, token) is None:
                self._offer(row, token, score)

    def _offer(self, parent: int, token: int, score: float, law: NodeLaw | None = None) -> None:
        row = self.text.tree.add(parent, token, score, self._source, law)
        self._unsaid.add(row)
        self._consider(row)

    def hint(self) -> Hint | None:
        """All that the tree holds and was not said yet; None if that is nothing."""
        if not self._unsaid:
            return None
        tree = self.text.tree.excerpt(self._unsaid)
        self._unsaid.clear()
        return Hint(self.text.committed_len, self.text.tail, tree)

    def _close_span(self) -> None:
        """What was grown since the last Sync is one span."""
        if self._growing_ns is not None:
            counts = {"forerun.base_len": self.text.committed_len, "forerun.nodes": self._grown_now}
            self.spans.add(*self._growing_ns, counts)
            self._growing_ns, self._grown_now = None, 0

    def lose_kv(self) -> None:
        """All KV is gone: what was guessed is guessed again."""
        self._forget_growth()
        self.text.rewind(self.text.committed_len)
        self.kv = KV(self.kv.pages)

    def close(self, *, poisoned: bool = False) -> None:
        for path in self._paths.values():
            self.kv.drop(path, poisoned=poisoned)
        self._forget_growth()
        self.kv.release(() if poisoned else self.text.tokens, poisoned=poisoned)
        self._close_span()
        self.spans.close()

    @property
    def key(self) -> tuple[Hashable, SeqId]:
        return self.link, self.seq
