"""Attached workers: what each said of itself, and the way to write to it.

The lease is the stream plus a heartbeat. A link knows no requests; the router does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from forerun.core.messages import Close, Command, Sync
from forerun.core.params import SeqId
from forerun.rpc import codec
from forerun.rpc.frames import packed
from forerun.rpc.outbox import Outbox
from forerun.v1 import attach_pb2

MOST_WAITING = 4096
"""Messages kept for a worker that does not read; then the oldest hints go."""


@dataclass(frozen=True, slots=True)
class RelayedHint:
    """A draft's hint on its way to a target, unread."""

    seq: SeqId
    hint: bytes


Outgoing = Command | RelayedHint


@dataclass(eq=False)
class WorkerLink:
    """One attached worker; compared by identity."""

    hello: attach_pb2.Hello
    outbox: Outbox[Outgoing]
    sequences: int = 0  # placed here by this coordinator and not ended
    replaced: asyncio.Event = field(default_factory=asyncio.Event)  # set when its worker attached anew
    _progress: int = -1
    _alive: asyncio.Event = field(default_factory=asyncio.Event)
    heard: asyncio.Event = field(default_factory=asyncio.Event)  # set by every frame

    def beat(self, heartbeat: attach_pb2.Heartbeat) -> None:
        """Progress, or an engine between two steps, is a sign of life; a step that has no end is not."""
        if heartbeat.idle or heartbeat.progress != self._progress:
            self._progress = heartbeat.progress
            self._alive.set()

    async def stalled(self, limit_s: float) -> None:
        """Returns when the engine has been in one step for `limit_s`."""
        while True:
            self._alive.clear()
            try:
                await asyncio.wait_for(self._alive.wait(), limit_s)
            except TimeoutError:
                return

    @property
    def name(self) -> str:
        return f"{self.hello.worker} ({self.hello.incarnation})"

    @property
    def is_target(self) -> bool:
        return self.hello.role == attach_pb2.ROLE_TARGET

    @property
    def has_room(self) -> bool:
        return self.sequences < self.hello.capacity

    def send(self, item: Outgoing) -> None:
        """Queue for the stream; Syncs of one sequence merge, hints go first when it is full."""
        match item:
            case Sync():
                self.outbox.put(item, ("sync", item.seq), _merge_syncs)
            case RelayedHint():
                self.outbox.put(item, droppable=True)
            case _:
                self.outbox.put(item)


def _merge_syncs(first: Outgoing, later: Outgoing) -> Outgoing:
    assert isinstance(first, Sync) and isinstance(later, Sync)
    return first.then(later)


def coordinator_frames(items: Iterable[Outgoing]) -> Iterator[attach_pb2.CoordinatorFrame]:
    return packed(attach_pb2.CoordinatorFrame, items, _part)


def _part(item: Outgoing) -> tuple[str, Any]:
    match item:
        case RelayedHint():
            return "target", codec.relayed_hint(item.seq, item.hint)
        case Sync() | Close():
            return "draft", codec.put_draft_command(item)
        case _:
            return "target", codec.put_target_command(item)


class Pool:
    """Attached workers of both roles, and who gets the next sequence."""

    def __init__(self, changed: Callable[[Pool], None] = lambda pool: None) -> None:
        self._tell = changed
        self._links: list[WorkerLink] = []
        self._changed = asyncio.Event()

    def add(self, link: WorkerLink) -> None:
        self._links.append(link)
        self._changed.set()
        self._tell(self)

    def remove(self, link: WorkerLink) -> None:
        self._links.remove(link)
        self._tell(self)

    @property
    def targets(self) -> list[WorkerLink]:
        return [link for link in self._links if link.is_target]

    @property
    def drafts(self) -> list[WorkerLink]:
        return [link for link in self._links if not link.is_target]

    async def target(self, refused: Iterable[WorkerLink], wait_s: float, numerics_id: str = "") -> WorkerLink | None:
        """The least loaded target, waiting at most `wait_s` for one to attach.

        Those that compute the bits of `numerics_id` come before all others.
        """
        refused = list(refused)
        deadline = asyncio.get_running_loop().time() + wait_s
        while True:
            fit = [link for link in self.targets if link not in refused]
            if fit:
                return min(fit, key=lambda link: (link.hello.numerics_id != numerics_id, link.sequences))
            self._changed.clear()
            left = deadline - asyncio.get_running_loop().time()
            try:
                await asyncio.wait_for(self._changed.wait(), left)
            except TimeoutError:
                return None

    def draft(self, sources: Iterable[int], refused: Iterable[WorkerLink]) -> WorkerLink | None:
        """The least loaded draft that makes one of `sources` and has room."""
        wanted, refused = set(sources), list(refused)
        fit = [
            link for link in self.drafts if link.has_room and link not in refused and wanted & set(link.hello.sources)
        ]
        return min(fit, key=lambda link: link.sequences, default=None)
