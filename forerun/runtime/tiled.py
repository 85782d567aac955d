"""Paged attention on the CPU: float32, in tiles, all runs of a pass in a few batched products.

A product is one page against the query rows of one run. Scores of a run's pages stand side by side for one
softmax, and what the pages contribute is added up page by page. So a row's bits depend on its own path
alone: not on the run's length, the batch, or pages beyond its own (they weigh exactly 0). At least
four query rows a product: fewer take another kernel, which adds in another order.

K lies transposed, [layers, pages, kv_heads, head_dim, TILE]: with few query rows that is nearly twice as fast.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from forerun.core.pages import TILE
from forerun.runtime.batch import Batch

_LEAST_QUERY_ROWS = 4
_MOST_SLICES = 6


@dataclass(slots=True)
class Group:
    """Runs of about as many rows and pages, computed together. Short runs repeat their last row."""

    runs: int
    rows: int  # of each run, repetitions included
    tiles: int  # of the longest run
    row: Tensor  # [runs * rows] row of the pass
    real: Tensor | None  # which of them are no repetition; None: all
    target: Tensor  # [real rows] row of the pass
    position: Tensor  # [runs, rows]
    spans: list[tuple[int, int, int, int]]  # pages [a, b) are entries [c, d)
    owner: Tensor  # [entries] run that reads the page
    table: Tensor  # [runs * tiles] entry of each tile; any where there is none
    back: Tensor  # [entries] index into `table`
    in_order: bool  # entries are the table
    deep: list[int]  # by tile: how many runs have so many; they come first
    tile: list[Tensor]  # by tile: [deep] entries
    masks: dict[int | None, Tensor] = field(default_factory=dict)  # by window

    def mask(self, window: int | None) -> Tensor:
        """[runs, 1, 1, rows, tiles * TILE]: 0 where a row sees a column, -inf elsewhere."""
        known = self.masks.get(window)
        if known is None:
            column = torch.arange(self.tiles * TILE)
            position = self.position[:, :, None]
            hidden = column > position
            if window is not None:
                hidden |= column <= position - window
            known = torch.zeros(hidden.shape).masked_fill_(hidden, float("-inf"))[:, None, None]
            self.masks[window] = known
        return known


class TiledAttention:
    """`PagedAttention` of a CPU."""

    def __init__(self, layers: int, pages: int, heads: int, kv_heads: int, head_dim: int) -> None:
        """Zeroed and untouched: memory grows with the pages that are used. One page more is blank for ever."""
        self._least_rows = -(-_LEAST_QUERY_ROWS * kv_heads // heads)
        self._keys = torch.zeros((layers, pages + 1, kv_heads, head_dim, TILE))
        self._values = torch.zeros((layers, pages + 1, kv_heads, TILE, head_dim))
        self._groups: list[Group] = []
        self._write = torch.zeros((0, 3), dtype=torch.int64)
        self._stretches: list[tuple[int, int, int, int]] = []
        self._touched: set[int] = set()  # pages ever written
        self.bytes_moved = 0  # by page copies, since start

    def begin(self, batch: Batch) -> None:
        if len(batch.copies):
            source, to = torch.from_numpy(batch.copies).T
            self._keys[:, to] = self._keys[:, source]
            self._values[:, to] = self._values[:, source]
            self.bytes_moved += len(batch.copies) * self._page_bytes
        self._touched.update(batch.writes[:, 1].tolist(), batch.copies[:, 1].tolist())
        self._write = torch.from_numpy(batch.writes.copy())
        self._stretches = _stretches(batch.writes)
        self._groups = group(batch, self._least_rows)

    @property
    def _page_bytes(self) -> int:
        return 2 * self._keys[:, 0].nbytes

    def touched_bytes(self) -> int:
        return len(self._touched) * self._page_bytes

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> Tensor:
        heads, rows, width = query.shape
        kv_heads = key.shape[0]
        keys, values = self._keys[layer], self._values[layer]
        self._store(keys, values, key.float(), value.float())
        out = query.new_zeros((rows, heads, width))
        grouped = (query.float() * scale).view(kv_heads, heads // kv_heads, rows, width)
        for part in self._groups:
            mixed = _attend_group(part, grouped, keys, values, part.mask(window), softcap)
            out.index_copy_(0, part.target, mixed.to(out.dtype))
        return out

    def _store(self, keys: Tensor, values: Tensor, key: Tensor, value: Tensor) -> None:
        """New rows go to their columns: stretches of them as slices while there are few, which is faster."""
        if len(self._stretches) <= _MOST_SLICES:
            for row, page, column, count in self._stretches:
                keys[page, :, :, column : column + count] = key[:, row : row + count].transpose(1, 2)
                values[page, :, column : column + count] = value[:, row : row + count]
            return
        rows, pages, columns = self._write.unbind(1)
        keys[pages, :, :, columns] = key.index_select(1, rows).transpose(0, 1)
        values[pages, :, columns] = value.index_select(1, rows).transpose(0, 1)


def _attend_group(
    part: Group, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, softcap: float | None
) -> Tensor:
    """query: [kv_heads, group, rows of the pass, head_dim] -> [real rows, heads, head_dim]."""
    kv_heads, share, _, width = query.shape
    runs, rows, tiles = part.runs, part.rows, part.tiles
    flat = share * rows
    entries = len(part.owner)
    asked = query.index_select(2, part.row).view(kv_heads, share, runs, rows, width).permute(2, 0, 1, 3, 4)
    asked = asked.reshape(runs, kv_heads, flat, width).index_select(0, part.owner).view(-1, flat, width)
    scores = torch.empty((entries, kv_heads, flat, TILE))
    for a, b, c, d in part.spans:
        torch.bmm(
            asked[c * kv_heads : d * kv_heads],
            keys[a:b].view(-1, width, TILE),
            out=scores[c:d].view(-1, flat, TILE),
        )
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if not part.in_order:
        scores = scores.index_select(0, part.table)
    side_by_side = scores.view(runs, tiles, kv_heads, share, rows, TILE).permute(0, 2, 3, 4, 1, 5)
    side_by_side = side_by_side.reshape(runs, kv_heads, share, rows, tiles * TILE) + mask
    weights = torch.softmax(side_by_side, dim=-1).view(runs, kv_heads, flat, tiles, TILE).permute(0, 3, 1, 2, 4)
    weights = weights.reshape(runs * tiles, kv_heads, flat, TILE)
    if not part.in_order:
        weights = weights.index_select(0, part.back)
    given = torch.empty((entries, kv_heads, flat, width))
    for a, b, c, d in part.spans:
        torch.bmm(
            weights[c:d].reshape(-1, flat, TILE),
            values[a:b].view(-1, TILE, width),
            out=given[c:d].view(-1, flat, width),
        )
    mixed = given.index_select(0, part.tile[0])  # [runs, kv_heads, flat, width]
    for deep, tile in zip(part.deep[1:], part.tile[1:], strict=True):
        mixed[:deep] += given.index_select(0, tile)
    mixed = mixed.view(runs, kv_heads * share, rows, width).transpose(1, 2).reshape(runs * rows, -1, width)
    return mixed if part.real is None else mixed.index_select(0, part.real)


def group(batch: Batch, least_rows: int) -> list[Group]:
    """Runs by their numbers of rows and pages, each up to four times that of the shortest."""
    lengths = np.diff(batch.firsts)
    tiles = (batch.tables >= 0).sum(axis=1)
    buckets: dict[tuple[int, int], list[int]] = {}
    for run in range(len(lengths)):
        key = (_bucket(int(lengths[run])), _bucket(int(tiles[run])))
        buckets.setdefault(key, []).append(run)
    return [
        _group(batch, sorted(runs, key=lambda run: -tiles[run]), lengths, tiles, least_rows)
        for _, runs in sorted(buckets.items())
    ]


def _bucket(number: int) -> int:
    """1, 2 to 4, 5 to 16, ..."""
    return (max(0, number - 1).bit_length() + 1) // 2


def _group(
    batch: Batch, chosen: list[int], lengths: NDArray[np.int64], tiles: NDArray[np.int64], least_rows: int
) -> Group:
    """chosen: runs, those of most pages first."""
    count = len(chosen)
    most_tiles = int(tiles[chosen[0]])
    most_rows = max(least_rows, *(int(lengths[run]) for run in chosen))
    offset = np.minimum(np.arange(most_rows)[None, :], lengths[chosen][:, None] - 1)
    row = batch.firsts[chosen][:, None] + offset  # [runs, rows]
    real = (np.arange(most_rows)[None, :] < lengths[chosen][:, None]).reshape(-1)

    table = batch.tables[chosen, :most_tiles]  # [runs, tiles]
    slots = np.flatnonzero(table.reshape(-1) >= 0)
    order = np.argsort(table.reshape(-1)[slots], kind="stable")
    back = slots[order]  # of each entry, in order of pages
    pages = table.reshape(-1)[back]
    entry = np.zeros(count * most_tiles, dtype=np.int64)
    entry[back] = np.arange(len(back))
    deep = [int((tiles[chosen] > tile).sum()) for tile in range(most_tiles)]
    by_tile = entry.reshape(count, most_tiles)
    return Group(
        count,
        most_rows,
        most_tiles,
        torch.from_numpy(row.reshape(-1)),
        None if real.all() else torch.from_numpy(np.flatnonzero(real)),
        torch.from_numpy(row.reshape(-1)[real]),
        torch.from_numpy(batch.positions[row]),
        _spans(pages),
        torch.from_numpy(back // most_tiles),
        torch.from_numpy(entry),
        torch.from_numpy(back),
        len(back) == len(entry) and bool((entry == np.arange(len(entry))).all()),
        deep,
        [torch.from_numpy(by_tile[:n, tile].copy()) for tile, n in enumerate(deep)],
    )


def _stretches(writes: NDArray[np.int64]) -> list[tuple[int, int, int, int]]:
    """(row, page, column, count): neighbouring rows that go to neighbouring columns of one page."""
    breaks = np.flatnonzero((np.diff(writes, axis=0) != (1, 0, 1)).any(axis=1)) + 1
    starts = [0, *breaks.tolist()]
    ends = [*breaks.tolist(), len(writes)]
    return [(*writes[start].tolist(), end - start) for start, end in zip(starts, ends, strict=True)]


def _spans(pages: NDArray[np.int64]) -> list[tuple[int, int, int, int]]:
    """Stretches of neighbouring pages: they are one product without a copy."""
    ends = [*(np.flatnonzero(np.diff(pages) != 1) + 1).tolist(), len(pages)]
    spans, first = [], 0
    for end in ends:
        spans.append((int(pages[first]), int(pages[end - 1]) + 1, first, end))
        first = end
    return spans
