"""A transformers model as a `Model`: ragged passes of one row each token, no padding per sequence.

Row-invariant: what is computed for a token does not depend on what shares its pass. Matrix products
take whole row tiles, since a product's order of additions depends on its number of rows below that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from forerun.core.errors import ModelRefused
from forerun.core.pages import KV, TILE, Pages
from forerun.runtime.attention import PagedAttention, PassState, current_pass
from forerun.runtime.batch import Batch, lower
from forerun.runtime.memory import MemoryUse
from forerun.runtime.packed import pack_linears, weight_bytes
from forerun.runtime.passes import Run
from forerun.runtime.steady import steady
from forerun.runtime.tiled import TiledAttention

if TYPE_CHECKING:
    from forerun.runtime.cuda import GraphedForward

_PROOF = 9
"""Tokens of the proof at start: enough for rows of one pass and of many, few enough to take no time."""

_LONG_PROOF = 2 * TILE + _PROOF
"""Tokens of the proof that the rows of a long pass are those of short ones."""

_PIECES = (16, 40, 64)
"""In which that text is computed the second time, beside what is left of it."""

_MOST_ROWS, _MEASURED_TILES = 256, 8
"""Rows of the largest pass, and KV tiles of those that are measured at start (calibrate.py)."""

_SEQUENCES = 16
"""For how many sequences of full length there is KV unless said."""

ROW_TILE = {torch.float32: 16, torch.bfloat16: 4}
"""Least rows of a pass from which on products are bit-equal for every number of rows (tested)."""


@dataclass(frozen=True, slots=True)
class KVShape:
    """What one token's keys and values are, on this rank."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    element_bytes: int  # as the model computes them

    @classmethod
    def of(cls, model: torch.nn.Module) -> KVShape:
        config = model.config.get_text_config()  # type: ignore[operator, union-attr]
        heads = int(config.num_attention_heads)
        kv_heads = int(getattr(config, "num_key_value_heads", None) or heads)
        head_dim = int(getattr(config, "head_dim", None) or config.hidden_size // heads)
        size = next(model.parameters()).element_size()
        return cls(int(config.num_hidden_layers), heads, kv_heads, head_dim, size)

    @property
    def page_bytes(self) -> int:
        """Of keys and values."""
        return self.layers * 2 * self.kv_heads * TILE * self.head_dim * self.element_bytes


def _padded(rows: int, tile: int) -> int:
    """Rows that a pass of `rows` computes on a CPU: of few different numbers.

    oneDNN keeps half a megabyte of code for each number of rows of each shape of weights, up to a thousand of them.
    """
    step = 4 if rows <= 16 else 8 if rows <= 64 else 16
    return max(tile, -(-rows // step) * step)


class TransformersModel:
    """Any decoder-only model whose attention goes through transformers' AttentionInterface.

    Raises:
        ModelRefused: its layers keep state outside that interface, so they could not be rolled back.
    """

    def __init__(
        self, model: torch.nn.Module, context_limit: int, pages: int | None = None, *, exact: bool = True
    ) -> None:
        """pages: of KV; exact: prove at start that rows do not depend on their company (a draft need not be)."""
        parameter = next(model.parameters())
        self._dtype, self._device = parameter.dtype, parameter.device
        shape = KVShape.of(model)
        pack_linears(model)
        if self._device.type == "cpu":
            steady(model)
        self._model = model
        self._shape = shape
        self._tile = ROW_TILE.get(self._dtype, 16)
        self.vocab_size = int(model.config.get_text_config().vocab_size)  # type: ignore[operator, union-attr]
        self.context_limit = context_limit
        self.pages = Pages(pages or _SEQUENCES * -(-context_limit // TILE))
        self._graphed: GraphedForward | None = None
        self.attention: PagedAttention = self._paged_attention()
        self._prove(exact)

    def _paged_attention(self) -> PagedAttention:
        """Of the device."""
        shape, pages = self._shape, self.pages.count
        if self._device.type != "cuda":
            return TiledAttention(shape.layers, pages, shape.heads, shape.kv_heads, shape.head_dim, self._dtype)
        from forerun.runtime.cuda import GraphedForward, VarlenAttention
        from forerun.runtime.cuda_kernels import choose, make_exact

        make_exact()
        kernel = choose(shape.heads, shape.kv_heads, shape.head_dim, self._dtype, self._device, self.context_limit)
        varlen = VarlenAttention(
            kernel,
            layers=shape.layers,
            pages=pages,
            kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            context_limit=self.context_limit,
            dtype=self._dtype,
            device=self._device,
        )
        self._graphed = GraphedForward(self._compute, varlen, graphs=True)
        return varlen

    def forward(self, runs: Sequence[Run]) -> list[NDArray[np.float32]]:
        """[logit_rows, vocab] float32 for each run."""
        logits = self.execute(lower(runs, self.pages.take_copies()))
        return [part.numpy() for part in torch.split(logits, [run.logit_rows for run in runs])]

    def memory(self, baseline: int, resident: int) -> MemoryUse:
        """What it takes. resident: of the process, after the largest pass; baseline: before the model was loaded."""
        weights = weight_bytes(self._model)
        if self._device.type == "cuda":
            baseline, resident = 0, torch.cuda.memory_reserved(self._device)
        touched = self.attention.touched_bytes()
        # The largest pass so far was one of few columns.
        farther = self.attention.transient_bytes(_MOST_ROWS, self.context_limit)
        farther -= self.attention.transient_bytes(_MOST_ROWS, min(self.context_limit, _MEASURED_TILES * TILE))
        workspace = max(0, resident - baseline - weights - touched) + farther
        pages = self.pages.count
        return MemoryUse(baseline, weights, pages * self._shape.page_bytes, pages * TILE, workspace)

    @property
    def numerics(self) -> str:
        """What decides its bits beside weights, dtype and versions."""
        return "tiled, pairs" if self._graphed is None else self._graphed.numerics

    def restart(self) -> None:
        """Nothing to bring back: the model is this process."""
        self.pages.forget()

    @torch.inference_mode()
    def execute(self, batch: Batch) -> Tensor:
        """[len(batch.wanted), vocab] float32 on the CPU."""
        if self._graphed is not None:
            return self._graphed(batch)
        pad = (0, _padded(len(batch.tokens), self._tile) - len(batch.tokens))
        asked = (0, _padded(len(batch.wanted), self._tile) - len(batch.wanted))
        self.attention.begin(batch)
        logits = self._compute(
            torch.from_numpy(np.pad(batch.tokens, pad)),
            torch.from_numpy(np.pad(batch.positions, pad)),
            torch.from_numpy(np.pad(batch.wanted, asked)),
        )
        return logits[: len(batch.wanted)].float()

    def _compute(self, tokens: Tensor, positions: Tensor, asked: Tensor) -> Tensor:
        """[rows] each, at least a row tile -> [asked, vocab], on the device, in the model's dtype."""
        state = PassState(self.attention, set())
        token = current_pass.set(state)
        try:
            output = self._model(
                input_ids=tokens[None], position_ids=positions[None], use_cache=False, logits_to_keep=asked
            )
        finally:
            current_pass.reset(token)
        if len(state.layers_seen) != self._shape.layers:
            name, seen = type(self._model).__name__, len(state.layers_seen)
            raise ModelRefused(
                f"{name} sent {seen} of its {self._shape.layers} layers through transformers' attention interface; "
                "the others keep state that cannot be rolled back"
            )
        return cast(Tensor, output.logits)[0]

    def _prove(self, exact: bool) -> None:
        """A few small passes at start: every layer asks for attention, shapes fit, logits are numbers, bits hold."""
        name = type(self._model).__name__
        count = min(_PROOF, self.context_limit - 1)
        tokens = tuple(number * 37 % self.vocab_size for number in range(count))
        try:
            whole = self.forward([Run(KV(self.pages).extend(count), tokens, 0, count)])[0]
            self.pages.forget()
            if whole.shape != (count, self.vocab_size) or not np.isfinite(whole.max(axis=-1)).all():
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
        finally:
            self.pages.forget()

    def _alone_and_in_company(self, tokens: tuple[int, ...], whole: NDArray[np.float32]) -> bool:
        """Whether the rows computed one by one, the last of them beside another sequence, have the same bits."""
        path = KV(self.pages).extend(len(tokens))
        other = tuple(reversed(tokens)) * 2
        company = Run(KV(self.pages).extend(len(other)), other, 0, 1)
        for at, token in enumerate(tokens):
            run = Run(path, (token,), at, 1)
            rows = self.forward([company, run] if at == len(tokens) - 1 else [run])[-1]
            if not np.array_equal(rows[0], whole[at]):
                return False
        return self._long_and_short(len(tokens))

    def _long_and_short(self, rows: int) -> bool:
        """The same for the last `rows` of a text of several pages: computed with all of it, and after pieces of it.

        Pieces of several sizes, since where threads divide a tensor depends on its rows.
        """
        length = min(_LONG_PROOF, self.context_limit - 1, (self.pages.count - 1) // 2 * TILE)
        if length <= rows:
            return True
        self.pages.forget()
        text = tuple(at * 31 % self.vocab_size for at in range(length))
        whole = self.forward([Run(KV(self.pages).extend(length), text, 0, rows)])[0]
        path = KV(self.pages).extend(length)
        start = 0
        for size in (*_PIECES, length):
            piece = text[start : length - rows][:size]
            if piece:
                self.forward([Run(path, piece, start, 0)])
                start += len(piece)
        return np.array_equal(self.forward([Run(path, text[-rows:], length - rows, rows)])[0], whole)
