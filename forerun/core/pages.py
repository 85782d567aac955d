"""Pages of KV as numbers: who holds them, what is known to lie in them, which may be taken.

A page is one tile of TILE columns in every layer; column = position. A path is one line of tokens
through pages. Rollback moves a length; a branch is a path that shares its pages with another up to its
own tail; a prefix that two requests share is pages held twice; KV that nobody holds any more stays known
until its page is needed. All of it is these counts: the tensors are runtime's business.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

TILE = 128
"""Columns are attended to in whole tiles, so a row's bits do not depend on what else is held."""

LEAST_COPY = 8
"""Columns of a known page that are worth copying it for."""

MOST_COMPARED = 32
"""Known pages that begin alike which are looked through for the one that agrees longest, the newest ones."""


class OutOfPages(Exception):
    """No page is free and none is idle. The engine takes them from somebody or waits; never fatal."""


@dataclass(slots=True)
class Path:
    """A line of tokens through pages: column c lies in pages[c // TILE]. Holds each of its pages once."""

    pages: list[int] = field(default_factory=list)


@dataclass(slots=True)
class _Known:
    """What lies in a page that can be found by its content."""

    above: int  # page before it; -1: it begins a text
    tokens: tuple[int, ...]  # TILE of them, or fewer at the end of a text
    below: dict[int, list[int]] = field(default_factory=dict)  # known pages after it, by their first token


class Pages:
    """The pool. `copies` and what is taken or held here is carried out by the next pass."""

    def __init__(self, count: int) -> None:
        if count < 1:
            raise ValueError(f"a pool needs at least 1 page, not {count}")
        self.count = count
        self.blank = count
        """A page beyond the pool that always holds zeros; scrubbing is a copy of it."""
        self._dirty: set[int] = set()  # to be overwritten before somebody reads them, once they are taken
        self._begin()

    def forget(self) -> None:
        """All KV is lost: nobody holds anything, nothing is known. Pages that were in use may hold anything."""
        clean = set(self._free) - self._dirty - self._copies.keys()
        self._dirty = set(range(self.count)) - clean
        self._begin()

    def _begin(self) -> None:
        self._free = list(range(self.count))  # a heap: the lowest first, so that what is in use lies together
        self._holders = [0] * self.count
        self._filled = [0] * self.count  # columns claimed, from the left
        self._known: dict[int, _Known] = {-1: _Known(-1, ())}
        self._idle: OrderedDict[int, None] = OrderedDict()  # known, held by nobody; longest idle first
        self._copies: dict[int, int] = {}  # page from, by page to
        self._condemned: set[int] = set()  # to be scrubbed when nobody holds them

    @property
    def available(self) -> int:
        """Pages that can be taken now."""
        return len(self._free) + len(self._idle)

    @property
    def held(self) -> int:
        """Pages that sequences hold."""
        return self.count - self.available

    @property
    def idle(self) -> int:
        """Pages that are only known: prefixes to be found again."""
        return len(self._idle)

    def take_copies(self) -> list[tuple[int, int]]:
        """(from, to): pages to be copied before the next pass writes anything. All sources are read first."""
        copies = [(source, to) for to, source in self._copies.items()]
        self._dirty -= self._copies.keys()
        self._copies.clear()
        return copies

    # --- holding -------------------------------------------------------------------------------

    def take(self) -> int:
        """A page of one's own. Raises OutOfPages."""
        if self._free:
            page = heapq.heappop(self._free)
        elif self._idle:
            page, _ = self._idle.popitem(last=False)  # those below a page became idle before it did
            self._unpublish(page)
        else:
            raise OutOfPages(f"all {self.count} pages are held")
        self._copies.pop(page, None)  # whoever wanted it is gone
        if page in self._dirty:
            self._copies[page] = self.blank
        self._holders[page] = 1
        self._filled[page] = 0
        return page

    def hold(self, pages: Iterable[int]) -> None:
        for page in pages:
            if self._holders[page] == 0:
                del self._idle[page]
            self._holders[page] += 1

    def release(self, pages: Sequence[int], poisoned: bool = False) -> None:
        """The last page first: what lies below a page must be idle before it.

        poisoned: those that are not known may hold what is no number, so who takes them next finds zeros: a column
        that a row does not see weighs 0, and 0 times such a value is no number either. What is known was judged.
        """
        for page in reversed(pages):
            if poisoned and page not in self._known:
                self._condemned.add(page)
            self._holders[page] -= 1
            if self._holders[page] == 0:
                self._let_go(page)

    def _let_go(self, page: int) -> None:
        if page in self._known:
            self._idle[page] = None
            return
        if page in self._condemned:
            self._condemned.discard(page)
            self._dirty.add(page)
        heapq.heappush(self._free, page)

    # --- growing -------------------------------------------------------------------------------

    def extend(self, path: Path, length: int, rows: int) -> None:
        """Room for `rows` more columns after the first `length` of `path`. Raises OutOfPages, changing nothing.

        In place if nobody wrote there, else the tail becomes a copy of its own.
        """
        end = length + rows
        tail, used = divmod(length, TILE)
        fork = bool(used) and self._filled[path.pages[tail]] > used
        needed = -(-end // TILE) - (tail if fork else len(path.pages))
        if needed > self.available:
            raise OutOfPages(f"{needed} pages are needed, {self.available} are available")
        if fork:
            own = self.take()
            self._copy(path.pages[tail], own)
            self.release(path.pages[tail:])
            path.pages[tail:] = [own]
        while len(path.pages) * TILE < end:
            path.pages.append(self.take())
        for index in range(tail, -(-end // TILE)):
            self._filled[path.pages[index]] = min(TILE, end - index * TILE)

    def fork(self, path: Path, length: int) -> Path:
        """Another path with the first `length` columns of `path`; `extend` makes its tail its own."""
        pages = path.pages[: -(-length // TILE)]
        self.hold(pages)
        return Path(pages)

    def cut(self, path: Path, length: int, *, reclaim: bool) -> None:
        """Forget columns beyond `length`. reclaim: no other path needs those in its tail page. Moves no bytes."""
        keep = -(-length // TILE)
        self.release(path.pages[keep:])
        del path.pages[keep:]
        tail, used = divmod(length, TILE)
        if reclaim and used and path.pages[tail] not in self._known:
            self._filled[path.pages[tail]] = used

    def _copy(self, source: int, to: int) -> None:
        self._copies[to] = self._copies.get(source, source)  # a copy still to be made: from where it comes

    # --- prefixes ------------------------------------------------------------------------------

    def find(self, tokens: Sequence[int]) -> tuple[Path, int]:
        """A path, held, whose first columns are those of a prefix of `tokens`, and how many they are.

        A page that agrees only in part is copied. At most len(tokens) - 1: the last token's row is computed.
        """
        most = len(tokens) - 1
        path, above, length = Path(), -1, 0
        while length + TILE <= most:
            wanted = tuple(tokens[length : length + TILE])
            page = self._below(above, wanted)
            if page is None:
                break
            path.pages.append(page)
            above, length = page, length + TILE
        self.hold(path.pages)
        page, same = self._nearest(above, tokens[length:most])
        if page is not None and same >= LEAST_COPY and self.available > (self._holders[page] == 0):
            self.hold([page])  # so that taking one does not take this
            own = self.take()
            self._copy(page, own)
            self.release([page])
            self._filled[own] = same
            path.pages.append(own)
            length += same
        return path, length

    def known_of(self, tokens: Sequence[int]) -> tuple[int, int]:
        """How many whole pages `find` would hold, and how many of them are idle now. Changes nothing."""
        above, count, idle = -1, 0, 0
        for start in range(0, len(tokens) - TILE, TILE):
            page = self._below(above, tuple(tokens[start : start + TILE]))
            if page is None:
                break
            above, count, idle = page, count + 1, idle + (self._holders[page] == 0)
        return count, idle

    def publish(self, above: int, page: int, tokens: tuple[int, ...]) -> int:
        """Make `page`, which holds `tokens` after the known page `above` (-1: none), findable.

        Returns the page to hold from now on: an older one with the same content (the same bits), or `page`.
        """
        twin = self._below(above, tokens)
        if twin is not None and twin != page:
            self.hold([twin])
            self.release([page])
            return twin
        if page not in self._known and above in self._known:
            self._known[page] = _Known(above, tokens)
            self._known[above].below.setdefault(tokens[0], []).append(page)
        return page

    def _below(self, above: int, tokens: tuple[int, ...]) -> int | None:
        candidates = self._known[above].below.get(tokens[0], ()) if above in self._known else ()
        return next((page for page in candidates if self._known[page].tokens == tokens), None)

    def _nearest(self, above: int, tokens: Sequence[int]) -> tuple[int | None, int]:
        """The known page after `above` that agrees longest with `tokens`."""
        best, longest = None, 0
        candidates = self._known[above].below.get(tokens[0], []) if tokens else []
        for page in candidates[-MOST_COMPARED:]:
            same = _agree(self._known[page].tokens, tokens)
            if same > longest:
                best, longest = page, same
        return best, longest

    def _unpublish(self, page: int) -> None:
        known = self._known.pop(page)
        siblings = self._known[known.above].below
        siblings[known.tokens[0]].remove(page)
        if not siblings[known.tokens[0]]:
            del siblings[known.tokens[0]]


def _agree(a: tuple[int, ...], b: Sequence[int]) -> int:
    """Length of the common beginning."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == tuple(b[low:middle]):
            low = middle
        else:
            high = middle - 1
    return low


class KV:
    """One sequence's KV: a trunk of committed tokens, and forks of it for guesses.

    The trunk's first `cached_len` columns are those of the sequence's first tokens. A cache: it can be
    rebuilt from the tokens at any time.
    """

    __slots__ = ("_published", "_sound_len", "cached_len", "pages", "trunk")

    def __init__(self, pages: Pages) -> None:
        self.pages = pages
        self.trunk = Path()
        self.cached_len = 0
        self._published = 0  # pages of the trunk that are known
        self._sound_len = 0  # columns of which a row was judged: only then they are known to be numbers

    def adopt(self, tokens: Sequence[int]) -> int:
        """Start from what is known of `tokens`; returns cached_len. Only while nothing is held."""
        if self.trunk.pages:
            raise ValueError(f"KV of {self.cached_len} tokens is held already")
        self.trunk, self.cached_len = self.pages.find(tokens)
        self._published, self._sound_len = self.cached_len // TILE, self.cached_len
        return self.cached_len

    def extend(self, rows: int) -> Path:
        """Room for `rows` more columns in the trunk. Raises OutOfPages."""
        self.pages.extend(self.trunk, self.cached_len, rows)
        return self.trunk

    def branch(self, path: Path, length: int, rows: int) -> Path:
        """A path that leaves `path` after `length` columns, with room for `rows`. Raises OutOfPages."""
        fork = self.pages.fork(path, length)
        try:
            self.pages.extend(fork, length, rows)
        except OutOfPages:
            self.pages.release(fork.pages)
            raise
        return fork

    def drop(self, path: Path, *, poisoned: bool = False) -> None:
        """A branch is not needed any more."""
        self.pages.release(path.pages, poisoned)
        path.pages = []

    def commit(
        self,
        tokens: Sequence[int],
        length: int,
        path: Path | None = None,
        *,
        reclaim: bool = True,
        judged: bool = True,
    ) -> None:
        """The first `length` of `tokens` are committed and lie in `path` (None: in the trunk).

        path: becomes the trunk, the old trunk is dropped. reclaim: False while branches below are kept.
        judged: logits after them were looked at, and are numbers. What was not judged is shown to nobody.
        """
        if path is not None and path is not self.trunk:
            known = self.trunk.pages[: self._published]
            self.pages.hold(known)
            self.pages.release(path.pages[: self._published])
            self.pages.release(self.trunk.pages)
            self.trunk = Path(known + path.pages[self._published :])
            path.pages = []
        self.pages.cut(self.trunk, length, reclaim=reclaim)
        self.cached_len = length
        self._sound_len = length if judged else min(self._sound_len, length)
        self._published = min(self._published, length // TILE)
        self._publish(tokens, self._sound_len // TILE)

    def truncate(self, length: int) -> None:
        """Forget committed columns beyond `length`; no branch is alive. Moves no bytes."""
        if length > self.cached_len:
            raise ValueError(f"cannot truncate to {length}: only {self.cached_len} tokens are cached")
        self.pages.cut(self.trunk, length, reclaim=True)
        self.cached_len, self._sound_len = length, min(self._sound_len, length)
        self._published = min(self._published, length // TILE)

    def cleanse(self) -> None:
        """Columns beyond cached_len may hold what is no number: from the unfinished page on all is given up."""
        whole = self.cached_len // TILE
        self.pages.release(self.trunk.pages[whole:], poisoned=True)
        del self.trunk.pages[whole:]
        self.cached_len = self._sound_len = whole * TILE

    def release(self, tokens: Sequence[int] = (), *, poisoned: bool = False) -> None:
        """Give everything back. With its `tokens`, the unfinished last page stays known too."""
        if self._sound_len < self.cached_len:
            whole = self._sound_len // TILE
            self.pages.release(self.trunk.pages[whole:], poisoned=True)
            del self.trunk.pages[whole:]
            self.cached_len = whole * TILE
        whole = self.cached_len // TILE
        if tokens and self.cached_len % TILE >= LEAST_COPY and self._published == whole:
            above = self.trunk.pages[whole - 1] if whole else -1
            rest = tuple(tokens[whole * TILE : self.cached_len])
            self.pages.cut(self.trunk, self.cached_len, reclaim=False)
            self.trunk.pages[whole] = self.pages.publish(above, self.trunk.pages[whole], rest)
        self.pages.release(self.trunk.pages, poisoned)
        self.trunk, self.cached_len, self._published, self._sound_len = Path(), 0, 0, 0

    def _publish(self, tokens: Sequence[int], whole: int) -> None:
        pages = self.trunk.pages
        for index in range(self._published, whole):
            above = pages[index - 1] if index else -1
            content = tuple(tokens[index * TILE : (index + 1) * TILE])
            pages[index] = self.pages.publish(above, pages[index], content)
        self._published = whole
