"""Attention of rows that all have one length: many conversations written at once, and whole rows in training.

Registered with transformers' AttentionInterface as "forerun_wide". A step of writing reads exactly the columns that
are filled, without a copy per query head; a cache that grows by concatenation would copy all of itself every step.
It promises no bits: what is distilled is served, and judged, by others.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from forerun.runtime.attention import check_asked

WIDE = "forerun_wide"


class WideCache:
    """Keys and values of `rows` rows, each with the same `filled` columns of `capacity`."""

    def __init__(self, rows: int, capacity: int) -> None:
        self.filled = 0
        self._rows, self._capacity = rows, capacity
        self._held: dict[int, tuple[Tensor, Tensor]] = {}  # by layer, [rows, kv_heads, capacity, head_dim] each

    def append(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """[rows or 1, kv_heads, new, head_dim] -> the same with all columns so far. One row stands for all rows.

        `filled` moves once every layer has been here; that is the caller's.
        """
        if layer not in self._held:
            shape = (self._rows, key.shape[1], self._capacity)
            self._held[layer] = (key.new_zeros(*shape, key.shape[3]), value.new_zeros(*shape, value.shape[3]))
        keys, values = self._held[layer]
        end = self.filled + key.shape[2]
        keys[:, :, self.filled : end] = key
        values[:, :, self.filled : end] = value
        return keys[: len(key), :, :end], values[: len(value), :, :end]


current_cache: ContextVar[WideCache | None] = ContextVar("forerun_wide_cache", default=None)


def attend(
    module: nn.Module,
    query: Tensor,  # [rows, heads, new, head_dim]
    key: Tensor,  # [rows, kv_heads, new, head_dim]
    value: Tensor,  # [rows, kv_heads, new, head_dim]
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **rest: Any,
) -> tuple[Tensor, None]:
    """The attention function: one new column of every row, or all columns. Returns [rows, new, heads, head_dim]."""
    check_asked(module, {**rest, "softcap": softcap}, "; such models are not distilled")
    query, key = query.to(value.dtype), key.to(value.dtype)  # under autocast rotary embeddings come in float32
    cache = current_cache.get()
    if cache is not None:
        key, value = cache.append(int(module.layer_idx), key, value)  # type: ignore[arg-type]
    rows, heads, new, width = query.shape
    kv_heads, columns = key.shape[1], key.shape[2]
    if new == 1:  # the query heads of a KV head are its rows, so nothing is repeated
        first = max(0, columns - sliding_window) if sliding_window else 0
        grouped = query.reshape(rows, kv_heads, heads // kv_heads, width)
        out = F.scaled_dot_product_attention(grouped, key[:, :, first:], value[:, :, first:], scale=scaling)
        return out.reshape(rows, 1, heads, -1), None
    if new != columns:
        raise ValueError(f"{new} columns were given to a cache of {columns - new}; one, or all at once")
    group = heads // kv_heads
    key, value = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
    if sliding_window and sliding_window < columns:
        at = torch.arange(columns, device=query.device)
        near = (at[:, None] >= at) & (at[:, None] - at < sliding_window)
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=near, scale=scaling)
    else:
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling)
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register(WIDE, attend)


def step(model: nn.Module, tokens: Tensor, cache: WideCache | None = None) -> Tensor:
    """[rows, new] tokens after what `cache` holds -> logits: of the last column with a cache, of all without one."""
    start = 0 if cache is None else cache.filled
    positions = torch.arange(start, start + tokens.shape[1], device=tokens.device)[None]
    token = current_cache.set(cache)
    try:
        output = model(
            input_ids=tokens, position_ids=positions, use_cache=False, logits_to_keep=0 if cache is None else 1
        )
    finally:
        current_cache.reset(token)
    if cache is not None:
        cache.filled += tokens.shape[1]
    return cast(Tensor, output.logits)
