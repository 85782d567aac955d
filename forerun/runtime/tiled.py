"""Paged attention on the CPU: float32, in tiles, all runs of a pass in a few batched products.

A product is one page against the query rows of one run. Scores of a run's pages stand side by side for one
softmax, and what the pages contribute is added up page by page. So a row's bits depend on its own path
alone: not on the run's length, the batch, or pages beyond its own (they weigh exactly 0). At least
four query rows a product: fewer take another kernel, which adds in another order.

K lies transposed, [layers, pages, kv_heads, head_dim, TILE]: with few query rows that is nearly twice as fast.
"""

from __future__ import annotations

import math
import mmap
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from forerun.core.pages import TILE
from forerun.runtime.batch import Batch, Ints

_LEAST_LINES = 4
_MOST_SLICES = 6


@dataclass(slots=True)
class Group:
    """Runs of about as many rows and pages, computed together.

    A run's *lines* are its rows times the query heads of one KV head, at least _LEAST_LINES of them; short runs
    repeat their last. An *entry* is one page read by one run. Indices are of rows of the named tensor, as they lie.
    """

    runs: int
    lines: int  # of each run, repetitions included
    tiles: int  # of the longest run
    spans: list[tuple[int, int, int, int]]  # pages [a, b) are entries [c, d)
    query: Tensor  # [entries * kv_heads * lines] of [rows * heads, head_dim]
    target: Tensor  # [runs * kv_heads * lines] of the same
    side_by_side: Tensor | None  # [runs * kv_heads * lines * tiles] of [entries * kv_heads * lines, TILE]; None: as is
    apart: Tensor | None  # [entries * kv_heads * lines] of [runs * kv_heads * lines * tiles, TILE]
    deep: list[int]  # by tile: how many runs have so many; they come first
    tile: list[Tensor]  # by tile: [deep] entries
    position: Tensor  # [runs, lines]
    masks: dict[int | None, Tensor] = field(default_factory=dict)  # by window

    def mask(self, window: int | None) -> Tensor:
        """[runs, 1, lines, tiles * TILE]: 0 where a line sees a column, -inf elsewhere."""
        known = self.masks.get(window)
        if known is None:
            column = torch.arange(self.tiles * TILE)
            position = self.position[:, :, None]
            hidden = column > position
            if window is not None:
                hidden |= column <= position - window
            known = torch.zeros(hidden.shape).masked_fill_(hidden, float("-inf"))[:, None]
            self.masks[window] = known
        return known


class TiledAttention:
    """`PagedAttention` of a CPU."""

    def __init__(self, layers: int, pages: int, heads: int, kv_heads: int, head_dim: int) -> None:
        """Zeroed and untouched: memory grows with the pages that are used. One page more is blank for ever."""
        self._heads, self._kv_heads = heads, kv_heads
        self._keys = _untouched((layers, pages + 1, kv_heads, head_dim, TILE))
        self._values = _untouched((layers, pages + 1, kv_heads, TILE, head_dim))
        self._groups: list[Group] = []
        self._write = torch.zeros((0, 3), dtype=torch.int64)
        self._stretches: list[tuple[int, int, int, int]] = []
        self._each_once = True  # every row goes to one place, in order
        self._touched: set[int] = set()  # pages ever written or read: either makes them take memory
        self.bytes_moved = 0  # by page copies, since start

    def begin(self, batch: Batch) -> None:
        if len(batch.copies):
            source, to = torch.from_numpy(batch.copies).T
            self._keys[:, to] = self._keys[:, source]
            self._values[:, to] = self._values[:, source]
            self.bytes_moved += len(batch.copies) * self._page_bytes
        self._touched.update(batch.tables[batch.tables >= 0].tolist(), batch.copies[:, 1].tolist())
        self._write = torch.from_numpy(batch.writes.copy())
        self._stretches = _stretches(batch.writes)
        self._each_once = bool((batch.writes[:, 0] == np.arange(len(batch.writes))).all())
        self._groups = group(batch, self._heads, self._kv_heads)

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
        keys, values = self._keys[layer], self._values[layer]
        self._store(keys, values, key.float(), value.float())
        asked = (query.float() * scale).transpose(0, 1).reshape(-1, width)  # [rows * heads, head_dim]
        out = query.new_zeros((rows * heads, width))
        for part in self._groups:
            mixed = _attend_group(part, asked, keys, values, part.mask(window), softcap)
            out.index_copy_(0, part.target, mixed.to(out.dtype))
        return out.view(rows, heads, width)

    def _store(self, keys: Tensor, values: Tensor, key: Tensor, value: Tensor) -> None:
        """New rows go to their columns: stretches of them as slices while there are few, which is faster."""
        if len(self._stretches) <= _MOST_SLICES:
            for row, page, column, count in self._stretches:
                keys[page, :, :, column : column + count] = key[:, row : row + count].transpose(1, 2)
                values[page, :, column : column + count] = value[:, row : row + count]
            return
        rows, pages, columns = self._write.unbind(1)
        key, value = key.transpose(0, 1), value.transpose(0, 1)
        if not self._each_once:
            key, value = key.index_select(0, rows), value.index_select(0, rows)
        keys[pages, :, :, columns] = key[: len(rows)]
        values[pages, :, columns] = value[: len(rows)]


def _attend_group(
    part: Group, asked: Tensor, keys: Tensor, values: Tensor, mask: Tensor, softcap: float | None
) -> Tensor:
    """asked: [rows * heads, head_dim] -> [runs * kv_heads * lines, head_dim], as `part.target` says."""
    _, kv_heads, width, _ = keys.shape
    lines, entries = part.lines, part.spans[-1][3]
    query = asked.index_select(0, part.query).view(-1, lines, width)
    scores = torch.empty((entries * kv_heads, lines, TILE))
    for a, b, c, d in part.spans:
        here = slice(c * kv_heads, d * kv_heads)
        _products(query[here], keys[a:b].view(-1, width, TILE), scores[here])
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if part.side_by_side is not None:
        scores = scores.view(-1, TILE).index_select(0, part.side_by_side)
    scores = scores.view(part.runs, kv_heads, lines, part.tiles * TILE).add_(mask)
    weights = torch.softmax(scores, dim=-1).view(-1, TILE)
    if part.apart is not None:
        weights = weights.index_select(0, part.apart)
    weights = weights.view(-1, lines, TILE)
    given = torch.empty((entries, kv_heads * lines * width))
    for a, b, c, d in part.spans:
        here = slice(c * kv_heads, d * kv_heads)
        _products(weights[here], values[a:b].view(-1, TILE, width), given[c:d].view(-1, lines, width))
    mixed = given.index_select(0, part.tile[0])  # [runs, kv_heads * lines * head_dim]
    for deep, tile in zip(part.deep[1:], part.tile[1:], strict=True):
        mixed[:deep] += given.index_select(0, tile)
    return mixed.view(-1, width)


def _products(left: Tensor, right: Tensor, out: Tensor) -> None:
    """out = left @ right, a product for each of the first dimension. A single one would be divided among threads."""
    if len(left) > 1:
        torch.bmm(left, right, out=out)
    else:
        out.copy_(torch.bmm(left.expand(2, -1, -1), right.expand(2, -1, -1))[:1])


def _untouched(shape: tuple[int, ...]) -> Tensor:
    """Zeros that take no memory before they are written."""
    size = 4 * math.prod(shape)
    return torch.frombuffer(mmap.mmap(-1, size), dtype=torch.float32).view(shape)


def group(batch: Batch, heads: int, kv_heads: int) -> list[Group]:
    """Runs by their numbers of rows and pages, each up to four times that of the shortest."""
    lengths = np.diff(batch.firsts)
    tiles = (batch.tables >= 0).sum(axis=1)
    buckets: dict[tuple[int, int], list[int]] = {}
    for run in range(len(lengths)):
        key = (_bucket(int(lengths[run])), _bucket(int(tiles[run])))
        buckets.setdefault(key, []).append(run)
    return [
        _group(batch, np.array(sorted(runs, key=lambda run: -tiles[run])), lengths, tiles, heads, kv_heads)
        for _, runs in sorted(buckets.items())
    ]


def _bucket(number: int) -> int:
    """1, 2 to 4, 5 to 16, ..."""
    return (max(0, number - 1).bit_length() + 1) // 2


def _group(batch: Batch, chosen: Ints, lengths: Ints, tiles: Ints, heads: int, kv_heads: int) -> Group:
    """chosen: runs, those of most pages first."""
    share, runs, most_tiles = heads // kv_heads, len(chosen), int(tiles[chosen[0]])
    lines = max(_LEAST_LINES, share * int(lengths[chosen].max()))
    line = np.minimum(np.arange(lines)[None, :], share * lengths[chosen][:, None] - 1)  # [runs, lines] of its own
    row = batch.firsts[chosen][:, None] + line // share
    # Query heads of one KV head are neighbours: head = kv_head * share + line % share.
    asked = (row * heads + line % share)[:, None, :] + (np.arange(kv_heads) * share)[None, :, None]

    table = batch.tables[chosen, :most_tiles].reshape(-1)  # [runs * tiles]
    held = np.flatnonzero(table >= 0)
    held = held[np.argsort(table[held], kind="stable")]  # of each entry, its place in the table; entries by page
    entry = np.zeros(len(table), dtype=np.int64)  # of each place; any where there is no page
    entry[held] = np.arange(len(held))
    by_tile = entry.reshape(runs, most_tiles)
    deep = [int((tiles[chosen] > tile).sum()) for tile in range(most_tiles)]
    side_by_side = apart = None
    if most_tiles > 1 or runs > 1:
        each = np.arange(kv_heads * lines)
        wide = by_tile[:, None, :] * len(each) + each[None, :, None]  # [runs, kv_heads * lines, tiles]
        side_by_side = torch.from_numpy(wide.reshape(-1))
        run, tile = np.divmod(held, most_tiles)
        narrow = (run[:, None] * len(each) + each[None, :]) * most_tiles + tile[:, None]  # [entries, kv_heads * lines]
        apart = torch.from_numpy(narrow.reshape(-1))
    return Group(
        runs,
        lines,
        most_tiles,
        _spans(table[held]),
        torch.from_numpy(asked[held // most_tiles].reshape(-1)),
        torch.from_numpy(asked.reshape(-1)),
        side_by_side,
        apart,
        deep,
        [torch.from_numpy(by_tile[:n, tile].copy()) for tile, n in enumerate(deep)],
        torch.from_numpy(batch.positions[row]),
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
