"""Who is served now: the queue, the running sequences, and who gives way when KV runs out.

Whoever is admitted finds room for what is known of it; later arrivals wait. When a running sequence needs a
page and there is none, the one admitted last gives its pages back and waits at the head of the queue: it goes
on from its tokens, and its text is the same. Nothing here computes or decides about tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterator

from forerun.core.pages import OutOfPages, Pages
from forerun.core.params import SeqId
from forerun.core.plan import Share
from forerun.runtime.passes import Run
from target_worker.sequence import TargetSequence

Key = tuple[Hashable, SeqId]


class Lineup:
    """Sequences by key, each either queued or running."""

    def __init__(self, pages: Pages, most: int) -> None:
        self._pages = pages
        self._most = most  # running at once
        self._all: dict[Key, TargetSequence] = {}
        self._queued: deque[Key] = deque()
        self._running: deque[Key] = deque()  # in order of turns
        self._admitted: list[Key] = []  # running, in order of admission
        self.preemptions = 0

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[TargetSequence]:
        return iter(self._all.values())

    @property
    def waiting_len(self) -> int:
        return len(self._queued)

    @property
    def running(self) -> list[TargetSequence]:
        return [self._all[key] for key in self._running]

    def get(self, key: Key) -> TargetSequence | None:
        return self._all.get(key)

    def add(self, key: Key, sequence: TargetSequence) -> None:
        self._all[key] = sequence
        self._queued.append(key)

    def remove(self, key: Key) -> TargetSequence | None:
        """Its pages are its own to give back."""
        sequence = self._all.pop(key, None)
        if sequence is not None:
            for queue in (self._queued, self._running, self._admitted):
                if key in queue:
                    queue.remove(key)
        return sequence

    def admit(self) -> None:
        """From the queue, in order, while there is room."""
        while self._queued and len(self._running) < self._most:
            sequence = self._all[self._queued[0]]
            due = sum(other.pages_due for other in self.running)
            # One page to spare, for whoever grows next; more would leave KV unused for what may never come.
            if self._running and due + sequence.pages_asked() + 1 > self._pages.available:
                break
            sequence.admit()
            key = self._queued.popleft()
            self._running.append(key)
            self._admitted.append(key)

    def lay(self, shares: list[Share[TargetSequence]]) -> list[tuple[Share[TargetSequence], list[Run]]]:
        """Runs for all shares. Those admitted last give way where there are no pages for all.

        Whoever got the fewest rows comes first in the next pass: prompts take turns, and nobody is passed over twice.
        """
        laid: dict[Key, tuple[Share[TargetSequence], list[Run]]] = {}
        for share in shares:
            key = share.key.link, share.key.seq
            while key in self._admitted:
                try:
                    laid[key] = (share, share.key.lay(share))
                    break
                except OutOfPages:
                    if len(self._admitted) == 1:
                        raise  # it does not fit alone: refused at Start
                    laid.pop(self._preempt_last(), None)
        rows = {key: share.debt_rows for key, (share, _) in laid.items()}
        self._running = deque(sorted(self._running, key=lambda key: rows.get(key, 0)))
        return list(laid.values())

    def _preempt_last(self) -> Key:
        key = self._admitted.pop()
        self._running.remove(key)
        self._queued.appendleft(key)
        self._all[key].preempt()
        self.preemptions += 1
        return key
