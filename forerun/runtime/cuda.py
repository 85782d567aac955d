"""Passes on an NVIDIA GPU: paged K and V in the model's dtype, FlashAttention, CUDA graphs.

    bits of a row = f(its own path)

cuBLAS picks a kernel by the number of rows, and norms lay out their sums by it. So every forward has exactly `tile`
rows, padded at the end, and a longer pass is computed in slices of `tile` rows in turn. The cost: a decode pass reads
all weights anyway, so up to `tile` rows cost about what one does, but a long prompt reads them once for each slice.
Attention is given constants too: the longest query and K (kernels are chosen by them; a query length of 1 would turn
heads into rows) and no split of K. What could still differ is tried at start, see `choose`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from forerun.core.errors import ModelRefused
from forerun.core.pages import TILE
from forerun.runtime.batch import Batch

ROW_TILE = 64
"""Rows of every forward. tests/gpu/run.sh speed prints what 16, 32, 64 and 128 cost."""

LEAST_GATHERED = 16
"""Pages of the smallest bucket of gathered K and V."""


class Varlen(Protocol):
    """torch.nn.attention.varlen.varlen_attn of torch 2.12, as far as it is used here."""

    def __call__(
        self,
        query: Tensor,  # [rows, heads, head_dim]
        key: Tensor,  # [columns, kv_heads, head_dim], with block_table [pages, page, kv_heads, head_dim]
        value: Tensor,
        cu_seq_q: Tensor,  # [runs + 1] int32
        cu_seq_k: Tensor | None,  # [runs + 1] int32: first column of each run
        max_q: int,
        max_k: int,
        *,
        scale: float,
        window_size: tuple[int, int],  # columns to the left and right of a row's own that it sees; -1: all
        enable_gqa: bool,
        seqused_k: Tensor,  # [runs] int32: the last of a run's rows stands at column seqused_k - 1
        block_table: Tensor | None,  # [runs, most pages] int32
        num_splits: int,
    ) -> Tensor:  # [rows, heads, head_dim]
        ...


# --- a pass as integers ----------------------------------------------------------------------------


def cut(batch: Batch, tile: int) -> Iterator[Batch]:
    """The pass in parts of at most `tile` rows, to be computed in turn. Copies go with the first.

    A row's ancestors must stand before it in the batch, so that no part needs what a later one computes.
    """
    rows = len(batch.tokens)
    for first in range(0, max(rows, 1), tile):
        last = min(first + tile, rows)
        touched = (batch.firsts[1:] > first) & (batch.firsts[:-1] < last)
        starts = np.clip(batch.firsts[:-1][touched], first, last) - first
        write = batch.writes[(batch.writes[:, 0] >= first) & (batch.writes[:, 0] < last)]
        yield Batch(
            batch.tokens[first:last],
            batch.positions[first:last],
            batch.wanted[(batch.wanted >= first) & (batch.wanted < last)] - first,
            np.append(starts, last - first),
            batch.tables[touched],
            write - np.array([first, 0, 0]),
            batch.copies if first == 0 else batch.copies[:0],
        )


def bucket(count: int, least: int) -> int:
    """The smallest least * 2^k that holds `count`."""
    size = least
    while size < count:
        size *= 2
    return size


@dataclass(frozen=True, slots=True)
class Size:
    """What two forwards must share to be replays of one graph."""

    writes: int
    gathered: int  # pages; 0 if pages are read in place


@dataclass(frozen=True, slots=True)
class Laid:
    """One forward of exactly `tile` rows. Padding rows are a run of their own over a scratch page."""

    tokens: NDArray[np.int64]  # [tile]
    positions: NDArray[np.int64]  # [tile]
    write_rows: NDArray[np.int64]  # [size.writes]
    write_slots: NDArray[np.int64]  # [size.writes] page * columns of a page + column
    gather: NDArray[np.int64]  # [size.gathered] pages, the runs' in turn
    cu_q: NDArray[np.int32]  # [tile + 2]
    cu_k: NDArray[np.int32]  # [tile + 2] first column in what is gathered, whole pages for each run
    used: NDArray[np.int32]  # [tile + 1]
    table: NDArray[np.int32]  # [tile + 1, width] if pages are read in place, else [tile + 1, 0]

    @property
    def size(self) -> Size:
        return Size(len(self.write_rows), len(self.gather))


def lay(batch: Batch, *, tile: int, width: int, page: int, scratch: int, in_place: bool) -> Laid:
    """`batch`, of at most `tile` rows, with paddings. width: most pages of a run; scratch: a page nobody reads."""
    rows, runs = len(batch.tokens), len(batch.firsts) - 1
    if rows > tile:
        raise ValueError(f"a forward has {tile} rows, not {rows}; see cut()")
    padding = tile - rows
    cu_q = np.full(tile + 2, tile, dtype=np.int32)
    cu_q[: runs + 1] = batch.firsts
    used = np.zeros(tile + 1, dtype=np.int32)
    used[:runs] = batch.positions[batch.firsts[1:] - 1] + 1
    used[runs] = padding
    if (most := int(used.max())) > width * page:
        raise ValueError(f"a run reaches column {most}, there is room for {width * page}")
    writes = bucket(len(batch.writes), tile)
    write_rows = np.zeros(writes, dtype=np.int64)
    write_slots = np.full(writes, scratch * page, dtype=np.int64)
    write_rows[: len(batch.writes)] = batch.writes[:, 0]
    write_slots[: len(batch.writes)] = batch.writes[:, 1] * page + batch.writes[:, 2]
    table = np.full((tile + 1, width), scratch, dtype=np.int32)
    table[:runs, : batch.tables.shape[1]] = np.where(batch.tables < 0, scratch, batch.tables)
    pages = -(-used // page)
    gather = np.zeros(0, dtype=np.int64)
    if not in_place:
        held = table[np.arange(width) < pages[:, None]]
        gather = np.full(bucket(len(held), LEAST_GATHERED), scratch, dtype=np.int64)
        gather[: len(held)] = held
    return Laid(
        np.pad(batch.tokens, (0, padding)),
        np.pad(batch.positions, (0, padding)),
        write_rows,
        write_slots,
        gather,
        cu_q,
        np.concatenate([[0], np.cumsum(pages * page)]).astype(np.int32),
        used,
        table if in_place else table[:, :0],
    )


class Fixed:
    """A `Laid` at addresses that do not change: what a captured graph reads, filled anew before each replay."""

    def __init__(self, laid: Laid, device: torch.device) -> None:
        self.size = laid.size
        wide, narrow = _packed(laid)
        self._wide = torch.zeros(wide.shape, dtype=torch.int64, device=device)
        self._narrow = torch.zeros(narrow.shape, dtype=torch.int32, device=device)
        tile = len(laid.tokens)
        sizes = [tile, tile, self.size.writes, self.size.writes, self.size.gathered]
        self.tokens, self.positions, self.write_rows, self.write_slots, self.gather = self._wide.split(sizes)
        self.cu_q, self.cu_k, self.used, table = self._narrow.split([tile + 2, tile + 2, tile + 1, laid.table.size])
        self.table = table.view(laid.table.shape)

    def fill(self, laid: Laid) -> None:
        for to, content in zip((self._wide, self._narrow), _packed(laid), strict=True):
            host = torch.from_numpy(content)
            to.copy_(host.pin_memory() if to.is_cuda else host, non_blocking=True)


def _packed(laid: Laid) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    return (
        np.concatenate([laid.tokens, laid.positions, laid.write_rows, laid.write_slots, laid.gather]),
        np.concatenate([laid.cu_q, laid.cu_k, laid.used, laid.table.ravel()]),
    )


# --- attention -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Kernel:
    """A way to attend."""

    name: str  # of what decides the bits, for numerics_id
    attend: Varlen
    in_place: bool  # reads pages through a block table, else from a gathered copy
    starts: bool = True  # wants cu_seq_k with a block table; FlashAttention 3 refuses it


class VarlenAttention:
    """`PagedAttention` of a GPU: every run is one sequence of a variable-length kernel.

    A pass of more than `tile` rows comes in parts, see `cut`. Page `pages` is blank for ever: it holds zeros.
    """

    def __init__(
        self,
        kernel: Kernel,
        *,
        layers: int,
        pages: int,
        kv_heads: int,
        head_dim: int,
        context_limit: int,
        dtype: torch.dtype,
        device: torch.device,
        page: int = TILE,  # columns of a page
        tile: int = ROW_TILE,
    ) -> None:
        if tile > page:
            raise ValueError(f"the rows of a forward, {tile}, must fit into a page of {page} columns")
        self.tile = tile
        self.kernel = kernel
        self._page = page
        self._width = -(-context_limit // page)
        self._scratch = pages + 1
        self.keys = torch.zeros((layers, pages + 2, page, kv_heads, head_dim), dtype=dtype, device=device)
        self.values = torch.zeros_like(self.keys)
        self.bytes_moved = 0  # by page copies, since start
        self._fixed: dict[Size, Fixed] = {}
        self.now: Fixed

    def transient_bytes(self, rows: int, columns: int) -> int:
        return 0  # its kernels keep no scores

    def touched_bytes(self) -> int:
        """All of it: a GPU's memory is taken at once."""
        return self.keys.nbytes + self.values.nbytes

    @torch.inference_mode()
    def begin(self, batch: Batch) -> None:
        if len(batch.copies):
            source, to = torch.from_numpy(batch.copies).to(self.keys.device).T
            for held in (self.keys, self.values):
                held[:, to] = held[:, source]
                self.bytes_moved += len(batch.copies) * held[:, 0].nbytes
        laid = lay(
            batch,
            tile=self.tile,
            width=self._width,
            page=self._page,
            scratch=self._scratch,
            in_place=self.kernel.in_place,
        )
        if laid.size not in self._fixed:
            self._fixed[laid.size] = Fixed(laid, self.keys.device)
        self.now = self._fixed[laid.size]
        self.now.fill(laid)

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None, softcap: Any
    ) -> Tensor:
        if softcap is not None:
            raise ModelRefused(f"attention scores capped at {softcap} cannot be had from FlashAttention in torch")
        now = self.now
        keys, values = self.keys[layer], self.values[layer]
        for pool, new in ((keys, key), (values, value)):
            rows = new.transpose(0, 1).index_select(0, now.write_rows)
            pool.flatten(0, 1).index_copy_(0, now.write_slots, rows)
        if not self.kernel.in_place:
            keys, values = (pool.index_select(0, now.gather).flatten(0, 1) for pool in (keys, values))
        return self.kernel.attend(
            query.transpose(0, 1),
            keys,
            values,
            now.cu_q,
            now.cu_k if self.kernel.starts or not self.kernel.in_place else None,
            max(2, self.tile),
            self._width * self._page,
            scale=scale,
            window_size=(-1 if window is None else window - 1, 0),
            enable_gqa=True,
            seqused_k=now.used,
            block_table=now.table if self.kernel.in_place else None,
            num_splits=1,
        )


class GraphedForward:
    """Runs passes in forwards of `tile` rows, each size of forward captured once as a CUDA graph and replayed."""

    def __init__(
        self,
        compute: Callable[[Tensor, Tensor, Tensor], Tensor],
        attention: VarlenAttention,
        *,
        graphs: bool,
    ) -> None:
        """compute: (tokens [tile], positions [tile], rows whose logits are asked) -> logits, of all rows or none."""
        self._compute = compute
        self._attention = attention
        self.numerics = f"{attention.kernel.name}, tile {attention.tile}"
        self._all = torch.arange(attention.tile, device=attention.keys.device)
        self._pool = torch.cuda.graph_pool_handle() if graphs else None
        self._graphs: dict[tuple[Size, bool], tuple[torch.cuda.CUDAGraph, Tensor]] = {}

    @torch.inference_mode()
    def __call__(self, batch: Batch) -> Tensor:
        """[len(batch.wanted), vocab] float32 on the CPU."""
        logits = []
        for part in cut(batch, self._attention.tile):
            self._attention.begin(part)
            out = self._forward(head=len(part.wanted) > 0)
            logits.append(out[torch.from_numpy(part.wanted).to(out.device)].float())
        found = torch.cat(logits)
        if not found.is_cuda:
            return found
        host = torch.empty(found.shape, dtype=found.dtype, pin_memory=True)  # several times faster than .cpu()
        return host.copy_(found)

    def _forward(self, head: bool) -> Tensor:
        """Stays valid until the next forward of the same size."""
        now = self._attention.now
        if self._pool is None:
            return self._once(now, head)
        key = now.size, head
        if key not in self._graphs:
            self._graphs[key] = self._capture(now, head)
        graph, logits = self._graphs[key]
        graph.replay()
        return logits

    def _once(self, now: Fixed, head: bool) -> Tensor:
        return self._compute(now.tokens, now.positions, self._all if head else self._all[:0])

    def _capture(self, now: Fixed, head: bool) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        """Once for real, so that kernels and workspaces are loaded; K and V written twice are the same."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._once(now, head)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            logits = self._once(now, head)
        return graph, logits
