"""A pass as integers: which rows, on which paths, through which pages. Made once, computed by every rank alike.

Runs become rows here: positions, where K and V of each row go, and which pages each run reads. A row of a
tree goes to several places: a branch has a tail page of its own, in which its ancestors stand in the very columns
that plain decoding would have given them. So there is no tree mask, and attention knows only paths.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from forerun.core.pages import TILE
from forerun.runtime.passes import Run

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Batch:
    """One pass. All int64."""

    tokens: Ints  # [rows]
    positions: Ints  # [rows]
    wanted: Ints  # [logit rows] rows whose logits are asked
    firsts: Ints  # [runs + 1] run r is rows firsts[r] to firsts[r + 1], at consecutive positions of one path
    tables: Ints  # [runs, most tiles] page of each tile, -1 beyond the run's last
    writes: Ints  # [writes, 3] row, page, column in the page
    copies: Ints  # [copies, 2] page from, page to, before anything is written; all are read first

    def to_bytes(self) -> bytes:
        """For other ranks: sizes, then contents."""
        arrays = [getattr(self, field.name) for field in fields(self)]
        shapes = np.array([(*array.shape, -1)[:2] for array in arrays], dtype=np.int64)
        return b"".join([shapes.tobytes(), *(array.tobytes() for array in arrays)])

    @classmethod
    def from_bytes(cls, data: bytes) -> Batch:
        count = len(fields(cls))
        held = bytearray(data)  # torch wants arrays that can be written to
        shapes = np.frombuffer(held, np.int64, 2 * count).reshape(count, 2)
        arrays, at = [], shapes.nbytes
        for rows, columns in shapes.tolist():
            size = rows * columns if columns >= 0 else rows
            array = np.frombuffer(held, np.int64, size, at)
            arrays.append(array if columns < 0 else array.reshape(rows, columns))
            at += array.nbytes
        return cls(*arrays)


def lower(runs: Sequence[Run], copies: Sequence[tuple[int, int]]) -> Batch:
    """Rows of the runs in order. A run whose `parent` is among them leaves it within this pass."""
    firsts = [0]
    tokens: list[int] = []
    positions: list[int] = []
    wanted: list[int] = []
    first_of: dict[int, int] = {}
    for run in runs:
        first_of[id(run)] = len(tokens)
        tokens.extend(run.tokens)
        positions.extend(range(run.start, run.start + len(run.tokens)))
        wanted.extend(range(len(tokens) - run.logit_rows, len(tokens)))
        firsts.append(len(tokens))
    writes: list[tuple[int, int, int]] = []
    for run in runs:
        first, pages = first_of[id(run)], run.path.pages
        writes.extend((first + i, pages[at // TILE], at % TILE) for i, at in enumerate(run.positions))
        writes.extend(_ancestors(run, first_of))
    most = max(run.tiles for run in runs)
    tables = np.full((len(runs), most), -1, dtype=np.int64)
    for row, run in enumerate(runs):
        tables[row, : run.tiles] = run.path.pages[: run.tiles]
    return Batch(
        np.array(tokens, dtype=np.int64),
        np.array(positions, dtype=np.int64),
        np.array(wanted, dtype=np.int64),
        np.array(firsts, dtype=np.int64),
        tables,
        np.array(writes, dtype=np.int64).reshape(-1, 3),
        np.array(copies, dtype=np.int64).reshape(-1, 2),
    )


def _ancestors(run: Run, first_of: dict[int, int]) -> list[tuple[int, int, int]]:
    """Rows of this pass that stand before a branch in its own tail page."""
    tile = run.start // TILE
    page = run.path.pages[tile]
    writes = []
    at, above = run.start - 1, run.parent
    while above is not None and at >= tile * TILE:
        if at < above.start:
            above = above.parent
            continue
        writes.append((first_of[id(above)] + at - above.start, page, at % TILE))
        at -= 1
    return writes
