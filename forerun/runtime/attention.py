"""Attention as transformers' model code calls it, over the paged KV of a ragged pass.

Registered with AttentionInterface under the name "forerun"; any architecture that asks the interface can be
served, with no copy of its code. K and V of new rows arrive here and are stored here, so the models run
without a cache object of their own and rollback needs nothing from them.

How it is computed is the device's: `tiled.py` on the CPU, `cuda.py` on GPUs.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import AttentionInterface

from forerun.core.errors import ModelRefused
from forerun.runtime.batch import Batch

NAME = "forerun"
_IGNORED = frozenset(
    {"position_ids", "use_cache", "cache", "past_key_values", "cache_position", "is_causal", "dropout"}
    | {"output_router_logits", "output_attentions", "output_hidden_states"}
)
"""Arguments models pass along that do not change the result of a causal pass."""


class PagedAttention(Protocol):
    """The KV of all sequences and how rows attend to it. Row-invariant: a row's result depends on its path alone."""

    def begin(self, batch: Batch) -> None:
        """Copy pages and prepare the indices of a pass."""
        ...

    def transient_bytes(self, rows: int, columns: int) -> int:
        """Beside KV, about the most that a pass of so many rows over so many columns needs for itself."""
        ...

    def touched_bytes(self) -> int:
        """Of KV, what was ever written: the rest of it takes no memory yet."""
        ...

    def attend(
        self,
        layer: int,
        query: Tensor,  # [heads, rows, head_dim], padding rows at the end
        key: Tensor,  # [kv_heads, rows, head_dim]
        value: Tensor,  # [kv_heads, rows, head_dim]
        scale: float,
        window: int | None,  # a row at position p sees columns above p - window
        softcap: float | None,
    ) -> Tensor:
        """Store the new rows, then attend: [rows, heads, head_dim], padding rows get anything."""
        ...


@dataclass(slots=True)
class PassState:
    """The pass that the current forward belongs to."""

    attention: PagedAttention
    layers_seen: set[int]


current_pass: ContextVar[PassState] = ContextVar("forerun_pass")


def check_asked(module: torch.nn.Module, asked: Mapping[str, Any], so: str) -> None:
    """Raises ModelRefused if a model passes an argument that would change the result. so: what follows from it."""
    unknown = sorted(name for name, given in asked.items() if given is not None and name not in _IGNORED)
    if unknown:
        raise ModelRefused(f"{type(module).__name__} asks for {', '.join(unknown)} in attention{so}")


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
    """The attention function. Returns [1, rows, heads, head_dim]."""
    check_asked(module, rest, ", which is not honoured here")
    state = current_pass.get()
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    state.layers_seen.add(layer)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    out = state.attention.attend(layer, query[0], key[0], value[0], scale, sliding_window, softcap)
    return out[None], None


AttentionInterface.register(NAME, attend)
