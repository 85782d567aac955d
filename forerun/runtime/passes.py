"""What a pass computes, and what computes it. Targets, drafts and simulated models meet here.

A pass is a list of runs. A run is consecutive tokens of one path of one sequence: a prompt chunk, the last
committed token with the guesses below it, a branch of those guesses, or one node of a draft's tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from forerun.core.pages import TILE, Pages, Path

Row = NDArray[np.float32]  # [vocab]


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """Row i stands at position and column `start + i` of `path`, which has room for it."""

    path: Path
    tokens: tuple[int, ...]
    start: int
    logit_rows: int  # how many of the last rows are wanted as logits
    parent: Run | None = None  # of the same pass: the rows before `start` that are not in KV yet are its own

    @property
    def positions(self) -> range:
        return range(self.start, self.start + len(self.tokens))

    @property
    def tiles(self) -> int:
        """Pages it reads."""
        return -(-(self.start + len(self.tokens)) // TILE)


class Model(Protocol):
    """Computes passes. Layout of KV, dtype, device and parallelism are its own business."""

    vocab_size: int  # width of a logits row, padding included
    context_limit: int
    pages: Pages  # its KV, as numbers: an engine takes paths through them

    def forward(self, runs: Sequence[Run]) -> list[NDArray[np.float32]]:
        """[logit_rows, vocab] float32 for each run, in order. Raises GroupLost: all KV is gone, see `restart`."""
        ...

    def restart(self) -> None:
        """After GroupLost: ready again, with nothing in KV and `pages` forgotten."""
        ...
