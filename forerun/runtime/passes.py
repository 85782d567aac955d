"""What a pass computes, and what computes it. Targets, drafts and simulated models meet here.

A pass is a list of runs. A run is consecutive tokens of one path of one sequence: a prompt chunk,
the last committed token with the chain to be checked below it, or one leaf of a draft's tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Row = NDArray[np.float32]  # [vocab]


class Cache(Protocol):
    """What an engine may do with a sequence's KV; the model that made it does the rest."""

    cached_len: int

    def truncate(self, length: int) -> None: ...

    def extend(self, length: int) -> None: ...

    def take_slots(self, count: int) -> list[int]: ...

    def free_slots(self, slots: Sequence[int]) -> None: ...

    def lay_path(self, slots: Sequence[int], start: int) -> None: ...

    @property
    def bytes(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive tokens on one path. Row i stands at position and column `start + i`."""

    kv: Cache
    tokens: tuple[int, ...]
    start: int
    logit_rows: int  # how many of the last rows are wanted as logits
    lay: tuple[int, ...] = ()  # slots of the ancestors that stand in the columns just before `start`
    keep: tuple[int, ...] = ()  # slots that take the new rows too; empty if nothing will overlay them


class Model(Protocol):
    """Computes passes. `layout` of KV, dtype, device and parallelism are its own business."""

    vocab_size: int  # width of a logits row, padding included
    context_limit: int

    def new_kv(self) -> Cache: ...

    def forward(self, runs: Sequence[Run]) -> list[NDArray[np.float32]]:
        """[logit_rows, vocab] float32 for each run, in order."""
        ...
