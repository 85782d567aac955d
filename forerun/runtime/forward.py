"""A transformers model as a `Model`: ragged passes of one row each token, no padding per sequence.

Row-invariant: what is computed for a token does not depend on what shares its pass. Matrix products
take whole row tiles, since a product's order of additions depends on its number of rows below that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from forerun.core.errors import ModelRefused
from forerun.runtime.attention import PassState, current_pass, lay_run
from forerun.runtime.kv import KV
from forerun.runtime.packed import pack_linears
from forerun.runtime.passes import Run

ROW_TILE = {torch.float32: 16, torch.bfloat16: 4}
"""Least rows of a pass from which on products are bit-equal for every number of rows (tested)."""


class TransformersModel:
    """Any decoder-only model whose attention goes through transformers' AttentionInterface.

    Raises:
        ModelRefused: its layers keep state outside that interface, so they could not be rolled back.
    """

    def __init__(self, model: torch.nn.Module, context_limit: int) -> None:
        parameter = next(model.parameters())
        self._dtype, self._device = parameter.dtype, parameter.device
        pack_linears(model)
        self._model = model
        config = model.config.get_text_config()  # type: ignore[operator, union-attr]
        self._layers = int(config.num_hidden_layers)
        heads = int(config.num_attention_heads)
        self._kv_heads = int(getattr(config, "num_key_value_heads", None) or heads)
        self._head_dim = int(getattr(config, "head_dim", None) or config.hidden_size // heads)
        self._tile = ROW_TILE.get(self._dtype, 16)
        self.vocab_size = int(config.vocab_size)
        self.context_limit = context_limit
        self._prove()

    def new_kv(self) -> KV:
        return KV(self._layers, self._kv_heads, self._head_dim, torch.float32, self._device)

    @torch.inference_mode()
    def forward(self, runs: Sequence[Run]) -> list[NDArray[np.float32]]:
        """[logit_rows, vocab] float32 for each run."""
        tokens: list[int] = []
        positions: list[int] = []
        wanted: list[int] = []
        laid = []
        for run in runs:
            first = len(tokens)
            laid.append(lay_run(cast(KV, run.kv), first, len(run.tokens), run.start, run.lay, run.keep))
            tokens.extend(run.tokens)
            positions.extend(range(run.start, run.start + len(run.tokens)))
            wanted.extend(range(len(tokens) - run.logit_rows, len(tokens)))
        logits = self._rows(laid, tokens, positions, wanted)
        counts = [run.logit_rows for run in runs]
        return [part.numpy() for part in torch.split(logits, counts)]

    def _rows(self, laid: list, tokens: list[int], positions: list[int], wanted: list[int]) -> Tensor:  # type: ignore[type-arg]
        """Run the model over the rows; [len(wanted), vocab] float32 on the CPU."""
        pad = max(0, self._tile - len(tokens))
        state = PassState(laid, set())
        token = current_pass.set(state)
        try:
            output = self._model(
                input_ids=torch.tensor([tokens + [0] * pad], device=self._device),
                position_ids=torch.tensor([positions + [0] * pad], device=self._device),
                use_cache=False,
                logits_to_keep=torch.tensor(_padded(wanted, self._tile), device=self._device),
            )
        finally:
            current_pass.reset(token)
        if len(state.layers_seen) != self._layers:
            raise ModelRefused(
                f"{type(self._model).__name__} sent {len(state.layers_seen)} of its {self._layers} layers through "
                "transformers' attention interface; the others keep state that cannot be rolled back"
            )
        return cast(Tensor, output.logits)[0, : len(wanted)].float().cpu()

    def _prove(self) -> None:
        """One small pass at start: shapes fit, every layer asks for attention, logits are finite."""
        rows = self.forward([Run(self.new_kv(), (0, 1, 2, 3), 0, logit_rows=1)])[0]
        if rows.shape != (1, self.vocab_size) or not np.isfinite(rows).all():
            raise ModelRefused(f"{type(self._model).__name__} gave logits of shape {rows.shape}, or not finite ones")


def _padded(rows: list[int], tile: int) -> list[int]:
    """At least one tile of rows, the first one repeated."""
    return rows + [rows[0] if rows else 0] * max(0, tile - len(rows))
