"""Messages of many sequences share a frame: a write and a wake-up for all that a pass says, not for each sequence."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

log = logging.getLogger(__name__)

Frame = TypeVar("Frame")
Item = TypeVar("Item")

MOST_FRAME_BYTES = 1 << 20
"""A frame takes no more messages beyond this; one message may be larger."""


def packed(
    make: Callable[[], Frame], items: Iterable[Item], part_of: Callable[[Item], tuple[str, Any]]
) -> Iterator[Frame]:
    """Frames that carry the items in their order. part_of: a repeated field's name, and the item as a message for it.

    What the wire cannot hold concerns one sequence only: it is left out, and logged.
    """
    frame, size = make(), 0
    for item in items:
        try:
            field, message = part_of(item)
        except (TypeError, ValueError):
            log.exception("cannot send %s", item)
            continue
        more = message.ByteSize()
        if size and size + more > MOST_FRAME_BYTES:
            yield frame
            frame, size = make(), 0
        getattr(frame, field).append(message)
        size += more + 1  # an empty message counts too
    if size:
        yield frame
