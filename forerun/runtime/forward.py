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

_PROOF = 9
"""Tokens of the proof at start: enough for rows of one pass and of many, few enough to take no time."""

ROW_TILE = {torch.float32: 16, torch.bfloat16: 4}
"""Least rows of a pass from which on products are bit-equal for every number of rows (tested)."""


class TransformersModel:
    """Any decoder-only model whose attention goes through transformers' AttentionInterface.

    Raises:
        ModelRefused: its layers keep state outside that interface, so they could not be rolled back.
    """

    def __init__(self, model: torch.nn.Module, context_limit: int, exact: bool = True) -> None:
        """`exact`: prove at start that rows do not depend on their company. A draft need not be."""
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
        self._prove(exact)

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

    def _prove(self, exact: bool) -> None:
        """A few small passes at start: every layer asks for attention, shapes fit, logits are numbers, bits hold."""
        name = type(self._model).__name__
        count = min(_PROOF, self.context_limit - 1)
        tokens = tuple(number * 37 % self.vocab_size for number in range(count))
        try:
            whole = self.forward([Run(self.new_kv(), tokens, 0, count)])[0]
            if whole.shape != (count, self.vocab_size) or not np.isfinite(whole).all():
                raise ModelRefused(f"{name} gave logits of shape {whole.shape}, or not finite ones")
            if exact and not self._alone_and_in_company(tokens, whole):
                raise ModelRefused(
                    f"{name} computes other bits for a token when others share its pass (mixtures of experts do), "
                    "so its text would depend on what is drafted and who else is served"
                )
        except ModelRefused:
            raise
        except Exception as error:
            raise ModelRefused(f"{name} cannot run here: {type(error).__name__}: {error}") from error

    def _alone_and_in_company(self, tokens: tuple[int, ...], whole: NDArray[np.float32]) -> bool:
        """Whether the rows computed one by one, the last of them beside another sequence, have the same bits."""
        kv = self.new_kv()
        company = Run(self.new_kv(), tuple(reversed(tokens)) * 2, 0, 1)
        for at, token in enumerate(tokens):
            run = Run(kv, (token,), at, 1)
            rows = self.forward([company, run] if at == len(tokens) - 1 else [run])[-1]
            if not np.array_equal(rows[0], whole[at]):
                return False
        return True


def _padded(rows: list[int], tile: int) -> list[int]:
    """At least one tile of rows, the first one repeated."""
    return rows + [rows[0] if rows else 0] * max(0, tile - len(rows))
