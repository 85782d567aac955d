"""Keys and values of one sequence: a cache that the ledger can rebuild at any time.

Columns are positions. The trunk, columns [0, cached_len), belongs to committed tokens. Beyond it lies
one path of guesses at a time; rows of other branches wait in slots and are laid into the columns
before a pass attends to them, so every row sees its ancestors in the order plain decoding would.
Rollback is `cached_len` moving, nothing more. It does not know tokens, trees or models.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

COLUMN_TILE = 128
"""Columns are attended to in whole tiles: a row's bits then do not depend on what else is held."""

_SLOT_CHUNK = 32


class KV:
    """[layers, kv_heads, columns, head_dim] keys and values; float32 on the CPU (converting costs more)."""

    def __init__(self, layers: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
        self.cached_len = 0  # committed tokens whose rows lie in the trunk
        self.keys = torch.zeros((layers, kv_heads, 0, head_dim), dtype=dtype, device=device)
        self.values = self.keys
        self._slot_keys = self.keys
        self._slot_values = self.keys
        self._free_slots: list[int] = []

    @property
    def bytes(self) -> int:
        return 2 * self.keys.nbytes + 2 * self._slot_keys.nbytes

    def reserve(self, length: int) -> None:
        """Room for columns [0, length): grows by half, in whole tiles, and keeps what is there."""
        columns = self.keys.shape[2]
        if length <= columns:
            return
        wanted = max(length, columns * 3 // 2)
        wanted += -wanted % COLUMN_TILE
        self.keys, self.values = (_grown(old, wanted) for old in (self.keys, self.values))

    def truncate(self, length: int) -> None:
        """Forget committed rows beyond `length`. Costs nothing: the columns are overwritten later."""
        if length > self.cached_len:
            raise ValueError(f"cannot truncate to {length}: only {self.cached_len} tokens are cached")
        self.cached_len = length

    def extend(self, length: int) -> None:
        """Rows that a pass left in the columns from `cached_len` on now belong to committed tokens."""
        self.cached_len = length

    @torch.inference_mode()
    def take_slots(self, count: int) -> list[int]:
        """Places for rows of branches, to be given back with `free_slots`."""
        while len(self._free_slots) < count:
            have = self._slot_keys.shape[2]
            grown = have + _SLOT_CHUNK
            self._slot_keys, self._slot_values = (_grown(old, grown) for old in (self._slot_keys, self._slot_values))
            self._free_slots.extend(range(have, grown))
        return [self._free_slots.pop() for _ in range(count)]

    def free_slots(self, slots: Sequence[int]) -> None:
        self._free_slots.extend(slots)

    @property
    def used_slots(self) -> int:
        return self._slot_keys.shape[2] - len(self._free_slots)

    def lay(self, layer: int, slots: Tensor, start: int) -> None:
        """Copy the rows in `slots` into the columns from `start` on, in one layer."""
        end = start + len(slots)
        self.keys[layer, :, start:end] = self._slot_keys[layer, :, slots]
        self.values[layer, :, start:end] = self._slot_values[layer, :, slots]

    @torch.inference_mode()
    def lay_path(self, slots: Sequence[int], start: int) -> None:
        """The same in all layers: the branch that won moves into the trunk."""
        end = start + len(slots)
        self.keys[:, :, start:end] = self._slot_keys[:, :, slots]
        self.values[:, :, start:end] = self._slot_values[:, :, slots]

    def write(self, layer: int, start: int, keys: Tensor, values: Tensor, slots: Tensor | None) -> None:
        """Store new rows [kv_heads, rows, head_dim] at the columns from `start` on, and in their slots."""
        end = start + keys.shape[1]
        self.keys[layer, :, start:end] = keys
        self.values[layer, :, start:end] = values
        if slots is not None:
            self._slot_keys[layer, :, slots] = keys.to(self._slot_keys.dtype)
            self._slot_values[layer, :, slots] = values.to(self._slot_values.dtype)


def _grown(old: Tensor, columns: int) -> Tensor:
    layers, heads, have, width = old.shape
    new = torch.zeros((layers, heads, columns, width), dtype=old.dtype, device=old.device)
    new[:, :, :have] = old
    return new
