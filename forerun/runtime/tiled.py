"""Paged attention on the CPU: float32, in tiles, all runs of a pass in a few batched products.

A product is one page against the query rows of one run. Scores of a run's pages stand side by side for one
softmax, and what the pages contribute is added up in pairs: page 2n and the next, then these pairs in pairs. So a
row's bits depend on its own path alone: not on the run's length, the batch, or pages beyond its own (they weigh
exactly 0). At least four query rows a product: fewer take another kernel, which adds in another order.

K and V are kept as the model computes them and gathered into float32 page by page, which changes no bits: pages lie
anywhere, a product for each costs more than gathering, and bfloat16 is half the bytes to read.
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

from forerun.core.errors import ModelRefused
from forerun.core.pages import TILE
from forerun.runtime.batch import Batch, Ints

_LEAST_LINES = 4
_MOST_SLICES = 6
_FEW_TILES = 4
_FEW_PIECES, _FEW_ROWS = 4, 4
"""So few pieces of so few rows and pages are one group: its operations cost more than the lines that it repeats."""

SCORES_BYTES = 32 << 20
"""Of the scores that are computed at once, as far as one row of one run allows. A pass has some copies of them."""

_WORTH_A_SPAN = 3
"""Neighbouring pages from which on they are fetched as one piece rather than one by one."""
_GATHERED_BYTES = 4 << 20
"""Of float32 pages at once: they stay in the cache until they are multiplied."""


@dataclass(frozen=True, slots=True)
class Block:
    """Entries that are computed together."""

    start: int
    end: int
    spans: list[tuple[int, int, int]] | None  # pages [a, b) stand from entry c of the block on; None: too many
    index: Tensor  # [end - start] pages


@dataclass(slots=True)
class Group:
    """Runs of about as many rows and pages, computed together.

    A run's *lines* are its rows times the query heads of one KV head, at least _LEAST_LINES of them; short runs
    repeat their last. An *entry* is one page read by one run, in the order of the pages.
    Indices are of rows of the named tensor, as they lie.
    """

    runs: int
    lines: int  # of each run, repetitions included
    tiles: int  # of the longest run
    pages: Ints  # [entries]
    blocks: list[Block]
    query: Tensor  # [entries * kv_heads * lines] of [rows * heads, head_dim]
    target: Tensor  # [runs * kv_heads * lines] of the same
    side_by_side: (
        Tensor | None
    )  # [runs * kv_heads * lines * tiles] of [entries * kv_heads * lines + 1, TILE]; None: as is
    apart: Tensor | None  # [entries * kv_heads * lines] of [runs * kv_heads * lines * tiles, TILE]
    by_tile: Tensor | None  # [tiles * runs] of [entries + 1]; None: as is
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

    def __init__(
        self, layers: int, pages: int, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype = torch.float32
    ) -> None:
        """Zeroed and untouched: memory grows with the pages that are used. One page more is blank for ever."""
        self._heads, self._kv_heads = heads, kv_heads
        self._keys = _untouched((layers, pages + 1, kv_heads, head_dim, TILE), dtype)
        self._values = _untouched((layers, pages + 1, kv_heads, TILE, head_dim), dtype)
        self._gather = Gather(kv_heads * head_dim * TILE, dtype)
        self._groups: list[Group] = []
        self._places: Tensor | None = None
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
        self._places = None
        self._groups = group(batch, self._heads, self._kv_heads, self._gather.block)

    @property
    def _page_bytes(self) -> int:
        return 2 * self._keys[:, 0].nbytes

    def transient_bytes(self, rows: int, columns: int) -> int:
        # Scores and weights, as computed and in order; the query once for every page, and twice what a page gives.
        copies = 3 + 3 * self._keys.shape[3] / TILE
        return int(copies * min(SCORES_BYTES, 4 * self._heads * rows * columns))

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
        if key.dtype is not self._keys.dtype:
            raise ModelRefused(f"layer {layer} gave K in {key.dtype}, its weights are in {self._keys.dtype}")
        keys, values = self._keys[layer], self._values[layer]
        self._store(keys, values, key, value)
        asked = query.transpose(0, 1).reshape(-1, width)  # [rows * heads, head_dim]
        parts = [
            _attend_group(part, asked, scale, keys, values, part.mask(window), softcap, self._gather)
            for part in self._groups
        ]
        mixed = parts[0] if len(parts) == 1 else torch.cat(parts)
        return mixed.index_select(0, self._back(rows)).to(query.dtype).view(rows, heads, width)

    def _back(self, rows: int) -> Tensor:
        """[rows * heads] of the groups' lines, one after another. Padding rows get what the first row gets."""
        if self._places is None:
            places, before = torch.zeros(rows * self._heads, dtype=torch.int64), 0
            for part in self._groups:
                places[part.target] = torch.arange(before, before + len(part.target))
                before += len(part.target)
            self._places = places
        return self._places

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


class Gather:
    """Pages as float32, a block of entries at a time, in memory that is used again for every block."""

    def __init__(self, elements: int, dtype: torch.dtype) -> None:
        """elements: of a page."""
        self.block = max(1, _GATHERED_BYTES // (4 * elements))
        self._plain = torch.empty(self.block * elements)
        self._stored = self._plain if dtype is torch.float32 else torch.empty(self.block * elements, dtype=dtype)

    def __call__(self, store: Tensor, block: Block) -> Tensor:
        """store: [pages, kv_heads, a, b] -> [entries * kv_heads, a, b] float32 of the block's entries."""
        _, kv_heads, *shape = store.shape
        entries, spans = block.end - block.start, block.spans
        size = entries * kv_heads * shape[0] * shape[1]
        if spans is not None and len(spans) == 1 and store.dtype is torch.float32:
            return store[spans[0][0] : spans[0][1]].view(entries * kv_heads, *shape)
        plain = self._plain[:size].view(entries, kv_heads, *shape)
        if spans is None:
            found = self._stored[:size].view(plain.shape)
            torch.index_select(store, 0, block.index, out=found)
            if found.dtype is not torch.float32:
                plain.copy_(found)
        else:
            for a, b, at in spans:
                plain[at : at + b - a].copy_(store[a:b])
        return plain.view(entries * kv_heads, *shape)


def _attend_group(
    part: Group,
    asked: Tensor,
    scale: float,
    keys: Tensor,
    values: Tensor,
    mask: Tensor,
    softcap: float | None,
    gather: Gather,
) -> Tensor:
    """asked: [rows * heads, head_dim] -> [runs * kv_heads * lines, head_dim] float32, as `part.target` says."""
    _, kv_heads, width, _ = keys.shape
    lines, entries = part.lines, len(part.pages)
    query = asked.index_select(0, part.query).float().mul(scale).view(-1, lines, width)
    lined = torch.empty((entries * kv_heads * lines + 1, TILE))
    lined[-1] = 0.0  # stands where a run has no page: of another's scores there, none might be a number
    scores = lined[:-1].view(entries * kv_heads, lines, TILE)
    for block in part.blocks:
        here = slice(block.start * kv_heads, block.end * kv_heads)
        _products(query[here], gather(keys, block), scores[here])
    if softcap is not None:
        lined = torch.tanh(lined / softcap) * softcap
    lined = lined[:-1] if part.side_by_side is None else lined.index_select(0, part.side_by_side)
    scores = lined.view(part.runs, kv_heads, lines, part.tiles * TILE).add_(mask)
    weights = torch.softmax(scores, dim=-1).view(-1, TILE)
    if part.apart is not None:
        weights = weights.index_select(0, part.apart)
    weights = weights.view(-1, lines, TILE)
    given = torch.empty((entries + 1, kv_heads * lines, width))
    given[-1] = -0.0  # stands where a run has no page: what it is added to keeps its bits, the sign of a zero too
    for block in part.blocks:
        here = slice(block.start * kv_heads, block.end * kv_heads)
        _products(weights[here], gather(values, block), given[:-1].view(-1, lines, width)[here])
    given = given[:-1] if part.by_tile is None else given.index_select(0, part.by_tile)
    return _in_pairs(given.view(part.tiles, -1, width))


def _in_pairs(given: Tensor) -> Tensor:
    """given: [tiles, ...], overwritten -> [...], their sum. Which are added first depends on their places alone."""
    step = 1
    while step < len(given):
        given[: len(given) - step : 2 * step] += given[step :: 2 * step]
        step *= 2
    return given[0]


def _products(left: Tensor, right: Tensor, out: Tensor) -> None:
    """out = left @ right, a product for each of the first dimension. A single one would be divided among threads."""
    if len(left) > 1:
        torch.bmm(left, right, out=out)
    else:
        out.copy_(torch.bmm(left.expand(2, -1, -1), right.expand(2, -1, -1))[:1])


def _untouched(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros that take no memory before they are written."""
    size = dtype.itemsize * math.prod(shape)
    return torch.frombuffer(mmap.mmap(-1, size), dtype=dtype).view(shape)


@dataclass(frozen=True, slots=True)
class Pieces:
    """Runs, those whose scores would take too much memory in several. A row's bits do not depend on its piece."""

    run: Ints  # [pieces]
    first: Ints  # [pieces] row
    rows: Ints  # [pieces]
    tiles: Ints  # [pieces] pages that its last row sees

    @classmethod
    def of(cls, batch: Batch, heads: int) -> Pieces:
        pieces: list[tuple[int, int, int]] = []
        for run, (first, end) in enumerate(zip(batch.firsts[:-1].tolist(), batch.firsts[1:].tolist(), strict=True)):
            columns = TILE * int((batch.tables[run] >= 0).sum())
            most = max(1, SCORES_BYTES // (4 * heads * columns))
            pieces.extend((run, start, min(most, end - start)) for start in range(first, end, most))
        run, first, rows = np.array(pieces, dtype=np.int64).T
        return cls(run, first, rows, batch.positions[first + rows - 1] // TILE + 1)


def group(batch: Batch, heads: int, kv_heads: int, block: int) -> list[Group]:
    """Pieces by their numbers of rows and pages, each up to four times that of the shortest. A few pages are as one,
    and a few rows of few pieces.

    block: entries that are computed together.
    """
    pieces = Pieces.of(batch, heads)
    buckets: dict[tuple[int, int], list[int]] = {}
    least = _FEW_ROWS if len(pieces.rows) <= _FEW_PIECES and int(pieces.tiles.max()) <= _FEW_TILES else 1
    for piece, (rows, tiles) in enumerate(zip(pieces.rows.tolist(), pieces.tiles.tolist(), strict=True)):
        buckets.setdefault((_bucket(max(least, rows)), _bucket(max(_FEW_TILES, tiles))), []).append(piece)
    groups = []
    for _, alike in sorted(buckets.items()):
        alike.sort(key=lambda piece: -pieces.tiles[piece])
        each = (
            4 * max(_LEAST_LINES * kv_heads, heads * int(pieces.rows[alike].max())) * TILE * int(pieces.tiles[alike[0]])
        )
        most = max(1, SCORES_BYTES // each)
        groups += [
            _group(batch, pieces, np.array(alike[start : start + most]), heads, kv_heads, block)
            for start in range(0, len(alike), most)
        ]
    return groups


def _bucket(number: int) -> int:
    """1, 2 to 4, 5 to 16, ..."""
    return (max(0, number - 1).bit_length() + 1) // 2


def _group(batch: Batch, pieces: Pieces, chosen: Ints, heads: int, kv_heads: int, block: int) -> Group:
    """chosen: pieces, those of most pages first; they are its runs."""
    lengths, tiles = pieces.rows[chosen], pieces.tiles[chosen]
    share, runs, most_tiles = heads // kv_heads, len(chosen), int(tiles[0])
    lines = max(_LEAST_LINES, share * int(lengths.max()))
    line = np.minimum(np.arange(lines)[None, :], share * lengths[:, None] - 1)  # [runs, lines] of its own
    row = pieces.first[chosen][:, None] + line // share
    # Query heads of one KV head are neighbours: head = kv_head * share + line % share.
    asked = (row * heads + line % share)[:, None, :] + (np.arange(kv_heads) * share)[None, :, None]

    table = batch.tables[pieces.run[chosen], :most_tiles].reshape(-1)  # [runs * tiles]
    held = np.flatnonzero(np.arange(most_tiles) < tiles[:, None])
    held = held[np.argsort(table[held], kind="stable")]  # of each entry, its place in the table
    pages = table[held]
    entry = np.full(len(table), len(held), dtype=np.int64)  # of each place; one beyond where there is no page
    entry[held] = np.arange(len(held))
    by_tile = entry.reshape(runs, most_tiles)
    in_order = np.array_equal(by_tile.T.ravel(), np.arange(len(held)))
    side_by_side = apart = None
    if most_tiles > 1 or runs > 1:
        each = np.arange(kv_heads * lines)
        wide = by_tile[:, None, :] * len(each) + each[None, :, None]  # [runs, kv_heads * lines, tiles]
        wide = np.minimum(wide, len(held) * len(each))
        side_by_side = torch.from_numpy(wide.reshape(-1))
        run, tile = np.divmod(held, most_tiles)
        narrow = (run[:, None] * len(each) + each[None, :]) * most_tiles + tile[:, None]  # [entries, kv_heads * lines]
        apart = torch.from_numpy(narrow.reshape(-1))
    return Group(
        runs,
        lines,
        most_tiles,
        pages,
        blocks(pages, block),
        torch.from_numpy(asked[held // most_tiles].reshape(-1)),
        torch.from_numpy(asked.reshape(-1)),
        side_by_side,
        apart,
        None if in_order else torch.from_numpy(by_tile.T.flatten()),
        torch.from_numpy(batch.positions[row]),
    )


def blocks(pages: Ints, most: int) -> list[Block]:
    """pages: of all entries, ascending; most: entries of a block."""
    return [_block(pages, start, min(start + most, len(pages))) for start in range(0, len(pages), most)]


def _block(pages: Ints, start: int, end: int) -> Block:
    own = pages[start:end]
    firsts = [0, *(np.flatnonzero(np.diff(own) != 1) + 1).tolist()]
    spans = None
    if len(firsts) <= max(1, len(own) // _WORTH_A_SPAN):
        ends = [*firsts[1:], len(own)]
        spans = [(int(own[a]), int(own[b - 1]) + 1, a) for a, b in zip(firsts, ends, strict=True)]
    return Block(start, end, spans, torch.from_numpy(own.copy()))


def _stretches(writes: NDArray[np.int64]) -> list[tuple[int, int, int, int]]:
    """(row, page, column, count): neighbouring rows that go to neighbouring columns of one page."""
    breaks = np.flatnonzero((np.diff(writes, axis=0) != (1, 0, 1)).any(axis=1)) + 1
    starts = [0, *breaks.tolist()]
    ends = [*breaks.tolist(), len(writes)]
    return [(*writes[start].tolist(), end - start) for start, end in zip(starts, ends, strict=True)]
