"""Messages of many sequences share a frame: a write and a wake-up for all that a pass says, not for each sequence."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

Frame = TypeVar("Frame")

MOST_FRAME_BYTES = 1 << 20
"""A frame takes no more messages beyond this; one message may be larger."""


def packed(make: Callable[[], Frame], parts: Iterable[tuple[str, Any]]) -> Iterator[Frame]:
    """Frames that carry `parts`, pairs of a repeated field's name and a message for it, in their order."""
    frame, size = make(), 0
    for field, message in parts:
        more = message.ByteSize()
        if size and size + more > MOST_FRAME_BYTES:
            yield frame
            frame, size = make(), 0
        getattr(frame, field).append(message)
        size += more + 1  # an empty message counts too
    if size:
        yield frame
