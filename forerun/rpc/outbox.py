"""What waits to be written to a peer, merged while it waits: a slow reader costs memory for one message.

Thread-safe on the putting side. It knows how messages merge, not how they travel.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Parcel(Generic[Item]):
    """An item on its way in: what it merges with, and whether it may be dropped."""

    item: Item
    key: Hashable | None = None
    merge: Callable[[Item, Item], Item] | None = None
    droppable: bool = False


class Outbox(Generic[Item]):
    """FIFO of keyed items; an item whose key still waits is merged into it.

    `most` bounds what `put` keeps of droppable items: the oldest droppable one goes first.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, most: int = 4096) -> None:
        self._loop = loop
        self._most = most
        self._lock = threading.Lock()
        self._items: dict[Hashable, tuple[Item, bool]] = {}
        self._ready = asyncio.Event()
        self._serial = 0
        self.dropped = 0

    def put(
        self,
        item: Item,
        key: Hashable | None = None,
        merge: Callable[[Item, Item], Item] | None = None,
        droppable: bool = False,
    ) -> None:
        """Append, or merge into the waiting item of the same key. From any thread."""
        self.put_all([Parcel(item, key, merge, droppable)])

    def put_all(self, parcels: Iterable[Parcel[Item]]) -> None:
        """The same for several at once: whoever takes gets all of them or none. From any thread."""
        with self._lock:
            empty = not self._items
            for parcel in parcels:
                self._add(parcel)
            wake = empty and bool(self._items)
        if wake:
            try:
                self._loop.call_soon_threadsafe(self._ready.set)
            except RuntimeError:  # the loop is closed: the process ends and nobody reads
                return

    def _add(self, parcel: Parcel[Item]) -> None:
        key = parcel.key
        if key is None:
            self._serial += 1
            key = self._serial
        waiting = self._items.get(key)
        if waiting is not None and parcel.merge is not None:
            self._items[key] = (parcel.merge(waiting[0], parcel.item), parcel.droppable)
            return
        self._items[key] = (parcel.item, parcel.droppable)
        if len(self._items) > self._most:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        victim = next((key for key, (_, droppable) in self._items.items() if droppable), None)
        if victim is not None:
            del self._items[victim]
            self.dropped += 1

    async def take(self) -> list[Item]:
        """Everything that waits, at least one item. From the loop's thread."""
        while True:
            with self._lock:
                if self._items:
                    taken = [item for item, _ in self._items.values()]
                    self._items.clear()
                    self._ready.clear()
                    return taken
                self._ready.clear()
            await self._ready.wait()
