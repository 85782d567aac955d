"""The target talks to itself: it writes the question after the template's header, then the answer, and so on.

A row may be begun: the first words of its question are given, and once it is answered the target goes on by itself, as
it does when a server is told to ignore its end token. Other rows take turns as the template has them.

All rows of a batch have one length, whatever turn each is in: where something is given its tokens are put, else the
target's pick. So there is no padding, and a pass has as many rows as the batch. What the target thought of every
position is kept with the token, since it is at hand: training needs no target any more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from forerun.runtime.distill.turns import Turns
from forerun.runtime.distill.wide import WideCache, step

KEPT = 32
"""Of the target's law at a position the likeliest tokens are kept, and what the others have together."""

QUESTION_LIMIT, ANSWER_LIMIT = 96, 256
"""Tokens of a turn, after which the template cuts in; a question takes no more than a third of a row."""

QUESTION_TEMPERATURE = 1.0
"""Whatever the answers': colder questions would be the same few in every row."""


PIECE = 128
"""Ids that are looked at together, where one look at all of a vocabulary has to do."""


class Kind(IntEnum):
    """Who wrote a token."""

    TEMPLATE = 0  # nobody: given by the template, or by a beginning
    QUESTION = 1
    ANSWER = 2
    BEYOND = 3  # the target, after the end token of an answer


@dataclass(frozen=True, slots=True)
class Conversations:
    """Column 0 is the first token of the template. Laws are of the token at their own column, temperature 1."""

    tokens: NDArray[np.int64]  # [rows, length]
    kinds: NDArray[np.uint8]  # [rows, length] of Kind
    temperatures: NDArray[np.float32]  # [rows] of the answers
    top_ids: NDArray[np.int64]  # [rows, length, KEPT] likeliest first; zeros where the template opens
    top_shares: NDArray[np.float16]  # [rows, length, KEPT] their probabilities

    def __len__(self) -> int:
        return len(self.tokens)

    def rows(self, index: NDArray[np.int64]) -> Conversations:
        parts = (self.tokens, self.kinds, self.temperatures, self.top_ids, self.top_shares)
        return Conversations(*(part[index] for part in parts))  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class Beginning:
    """What a row is given after the template's opening: none of it is trained on."""

    tokens: tuple[int, ...] = ()  # none: the row is not begun
    complete: bool = False  # a whole question, which the target does not go on with


class _Speaker:
    """One row: what it is still given, and whose turn it is."""

    def __init__(self, turns: Turns, question_limit: int, beginning: Beginning) -> None:
        self._turns = turns
        self._question_limit = question_limit
        self._begun = bool(beginning.tokens)
        self._queue = list(beginning.tokens)
        self.kind = Kind.QUESTION
        self._left = question_limit
        if beginning.complete:
            self._queue += turns.to_answer
            self.kind = Kind.ANSWER

    def say(self, picked: int) -> tuple[int, Kind]:
        """The next token of the row, which is `picked` unless one is given, and who wrote it."""
        if self._queue:
            return self._queue.pop(0), Kind.TEMPLATE
        kind, turns = self.kind, self._turns
        question = kind is Kind.QUESTION
        closing = list(turns.to_answer if question else turns.to_question)
        if self._begun and not question:
            if picked == closing[0] or picked in turns.ends:
                self.kind = Kind.BEYOND
            return picked, kind
        self._left -= 1
        if picked == closing[0] or picked in turns.ends:
            picked, self._queue = closing[0], closing[1:]
        elif self._left == 0:
            self._queue = closing
        else:
            return picked, kind
        self.kind, self._left = (Kind.ANSWER, ANSWER_LIMIT) if question else (Kind.QUESTION, self._question_limit)
        return picked, kind


@torch.inference_mode()
def write(
    target: nn.Module,
    turns: Turns,
    vocab_size: int,
    rows: int,
    length: int,
    temperatures: Sequence[float],
    seed: tuple[int, int],
    told: Callable[[int], None] = lambda tokens: None,
    beginnings: Sequence[Beginning] = (),
) -> Conversations:
    """`rows` conversations of `length` tokens, each temperature equally often; the same for the same (seed, number).

    beginnings: one per row, or none at all.
    told: hears how many tokens were written since it was last called.
    """
    device = next(target.parameters()).device
    random = np.random.default_rng(seed)
    answers = random.permutation(np.resize(np.array(temperatures, np.float32), rows))
    draws = random.random((length, rows))
    opening = len(turns.opening)
    made = Conversations(
        np.zeros((rows, length), np.int64),
        np.zeros((rows, length), np.uint8),
        answers,
        np.zeros((rows, length, KEPT), np.int64),
        np.zeros((rows, length, KEPT), np.float16),
    )
    made.tokens[:, :opening] = turns.opening
    question_limit = max(1, min(QUESTION_LIMIT, length // 3))
    begun = beginnings or [Beginning()] * rows
    speakers = [_Speaker(turns, question_limit, beginning) for beginning in begun]
    cache = WideCache(rows, length)
    logits = step(target, torch.tensor([turns.opening], device=device), cache).expand(rows, -1, -1)
    told(rows * opening)
    for at in range(opening, length):
        row_logits = logits[:, -1, :vocab_size].float()
        asking = np.array([speaker.kind is Kind.QUESTION for speaker in speakers])
        warm = torch.from_numpy(np.where(asking, np.float32(QUESTION_TEMPERATURE), answers)).to(device)
        picked = sample(row_logits, warm, torch.from_numpy(draws[at]).float().to(device)).tolist()
        ids, shares = likeliest(row_logits, KEPT)
        made.top_ids[:, at, : ids.shape[1]] = ids.cpu().numpy()
        made.top_shares[:, at, : ids.shape[1]] = shares.to(torch.float16).cpu().numpy()
        for row, speaker in enumerate(speakers):
            made.tokens[row, at], made.kinds[row, at] = speaker.say(picked[row])
        told(rows)
        if at + 1 < length:
            logits = step(target, torch.from_numpy(made.tokens[:, at : at + 1]).to(device), cache)
    return made


def sample(logits: Tensor, temperatures: Tensor, draws: Tensor) -> Tensor:
    """[rows, vocab] float32, [rows], [rows] in [0, 1) -> [rows] ids; temperature 0 is argmax.

    By one number a row and running sums, first of pieces and then within one: noise for a whole vocabulary, or its
    running sum, costs more than the pass of a small target.
    """
    best, greedy = logits.max(-1)
    weights = ((logits - best[:, None]) / temperatures.clamp(min=1e-4)[:, None]).exp_()
    pieces = _pieces(weights, 0.0)
    reached = pieces.sum(-1).cumsum(-1)  # [rows, pieces]
    aim = draws[:, None] * reached[:, -1:]
    piece = torch.searchsorted(reached, aim, right=True).clamp_(max=reached.shape[1] - 1)
    before = torch.where(piece > 0, reached.gather(1, (piece - 1).clamp(min=0)), 0.0)
    within = pieces.gather(1, piece[:, :, None].expand(-1, -1, PIECE))[:, 0].cumsum(-1)  # [rows, PIECE]
    place = torch.searchsorted(within, aim - before, right=True)
    # Rounding may lead past the last weight of a piece: then it is the last one that has any.
    place = torch.minimum(place, (within < within[:, -1:]).sum(-1, keepdim=True))
    return torch.where(temperatures > 0, (piece * PIECE + place)[:, 0], greedy)


def likeliest(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """[rows, vocab] float32 -> ids and probabilities [rows, min(count, vocab)], likeliest first.

    The first is the lowest id among ties, as the target picks; top-k alone promises no order among them.
    """
    count = min(count, logits.shape[1])
    best, first = logits.max(-1, keepdim=True)
    pieces = _pieces(logits, -torch.inf)
    if count <= pieces.shape[1]:  # the likeliest are in the pieces whose own likeliest are
        chosen = pieces.amax(-1).topk(count, sorted=False).indices  # [rows, count]
        few = pieces.gather(1, chosen[:, :, None].expand(-1, -1, PIECE)).flatten(1)
        values, places = few.topk(count)
        ids = chosen.gather(1, places // PIECE) * PIECE + places % PIECE
    else:
        values, ids = logits.topk(count)
    ids = torch.where(ids == first, ids[:, :1], ids)  # the two change places
    ids[:, :1] = first
    return ids, (values - best).exp_() / (logits - best).exp_().sum(-1, keepdim=True)


def _pieces(rows: Tensor, rest: float) -> Tensor:
    """[rows, vocab] -> [rows, pieces, PIECE], the last one filled up with `rest`; a view if there is none."""
    over = -rows.shape[1] % PIECE
    if over:
        rows = torch.nn.functional.pad(rows, (0, over), value=rest)
    return rows.view(len(rows), -1, PIECE)
