"""Attention as transformers' model code calls it, over the KV of a ragged pass.

Registered with AttentionInterface under the name "forerun"; any architecture that asks the interface
can be served, with no copy of its code. K and V of new rows arrive here and are stored here, so the
models run without a cache object of their own and rollback needs nothing from them.

Row-invariant: float32, at least four query rows per KV head, and each row attends to exactly the
column tiles that its own position needs, whatever rows come before or after it in its run.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface

from forerun.core.errors import ModelRefused
from forerun.runtime.kv import COLUMN_TILE, KV

NAME = "forerun"
_LEAST_QUERY_ROWS = 4
_IGNORED = frozenset(
    {"position_ids", "use_cache", "cache", "past_key_values", "cache_position", "is_causal", "dropout"}
    | {"output_router_logits", "output_attentions", "output_hidden_states"}
)
"""Arguments models pass along that do not change the result of a causal pass."""


@dataclass(slots=True)
class Segment:
    """Rows of a run whose positions lie in one column tile."""

    first: int  # rows [first, last) of the pass
    last: int
    columns: int  # columns [0, columns) are attended to: whole tiles
    positions: Tensor  # [rows] int64
    mask: Tensor  # [rows, columns] float32: 0 where visible, -inf elsewhere


@dataclass(slots=True)
class LaidRun:
    """A run with its indices as tensors, made once per pass and used in every layer."""

    kv: KV
    first: int  # rows [first, last) of the pass
    last: int
    start: int  # column of the first row
    lay: Tensor | None  # [ancestors] int64 slots
    keep: Tensor | None  # [rows] int64 slots
    segments: list[Segment]


@dataclass(slots=True)
class PassState:
    """The pass that the current forward belongs to."""

    runs: Sequence[LaidRun]
    layers_seen: set[int]


current_pass: ContextVar[PassState] = ContextVar("forerun_pass")


def lay_run(kv: KV, first: int, rows: int, start: int, lay: Sequence[int], keep: Sequence[int]) -> LaidRun:
    """Reserve columns and derive masks for `rows` new rows at `start`."""
    end = start + rows
    kv.reserve(end)
    device = kv.keys.device
    segments = []
    at = start
    while at < end:
        columns = (at // COLUMN_TILE + 1) * COLUMN_TILE
        until = min(end, columns)
        positions = torch.arange(at, until, device=device)
        hidden = torch.arange(columns, device=device)[None, :] > positions[:, None]
        mask = torch.zeros(hidden.shape, device=device).masked_fill_(hidden, float("-inf"))
        segments.append(Segment(first + at - start, first + until - start, columns, positions, mask))
        at = until
    return LaidRun(
        kv,
        first,
        first + rows,
        start,
        torch.tensor(lay, device=device) if lay else None,
        torch.tensor(keep, device=device) if keep else None,
        segments,
    )


def attend(
    module: torch.nn.Module,
    query: Tensor,  # [1, heads, rows, head_dim]
    key: Tensor,  # [1, kv_heads, rows, head_dim]
    value: Tensor,  # [1, kv_heads, rows, head_dim]
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **rest: Any,
) -> tuple[Tensor, None]:
    """The attention function. Returns [1, rows, heads, head_dim]; padding rows stay 0."""
    unknown = [name for name, given in rest.items() if given is not None and name not in _IGNORED]
    if unknown:
        raise ModelRefused(
            f"{type(module).__name__} asks for {', '.join(sorted(unknown))} in attention, which is not honoured here"
        )
    state = current_pass.get()
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    state.layers_seen.add(layer)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    out = torch.zeros_like(query)
    for run in state.runs:
        rows = slice(run.first, run.last)
        if run.lay is not None:
            run.kv.lay(layer, run.lay, run.start - len(run.lay))
        run.kv.write(layer, run.start, key[0, :, rows], value[0, :, rows], run.keep)
        for part in run.segments:
            rows = slice(part.first, part.last)
            out[0, :, rows] = _attend_segment(run.kv, part, layer, query[0, :, rows], scale, sliding_window, softcap)
    return out.transpose(1, 2), None


def _attend_segment(
    kv: KV, part: Segment, layer: int, query: Tensor, scale: float, window: int | None, softcap: float | None
) -> Tensor:
    """query: [heads, rows, head_dim] -> the same shape."""
    heads, rows, width = query.shape
    held = part.columns
    keys, values = kv.keys[layer, :, :held], kv.values[layer, :, :held]
    kv_heads = keys.shape[0]
    grouped = query.float().reshape(kv_heads, heads // kv_heads, rows, width) * scale
    mask = part.mask
    if window is not None:
        columns = torch.arange(held, device=query.device)
        mask = mask.masked_fill(columns[None, :] <= part.positions[:, None] - window, float("-inf"))
    group = grouped.shape[1]
    flat = grouped.reshape(kv_heads, group * rows, width)
    short = _LEAST_QUERY_ROWS - group * rows
    if short > 0:
        flat = torch.cat([flat, flat[:, :1].expand(kv_heads, short, width)], dim=1)
    scores = torch.bmm(flat, keys.transpose(1, 2))
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores[:, : group * rows].reshape(kv_heads, group, rows, held) + mask
    weights = torch.softmax(scores, dim=-1).reshape(kv_heads, group * rows, held)
    if short > 0:
        weights = torch.cat([weights, weights[:, :1].expand(kv_heads, short, held)], dim=1)
    mixed = torch.bmm(weights, values)[:, : group * rows]
    return mixed.reshape(heads, rows, width).to(query.dtype)


AttentionInterface.register(NAME, attend)
