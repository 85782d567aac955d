"""What a finished draft is worth: judged as it is served, by the picks of target and draft on held-out text.

The picks are those of `core/pick.py`, on the same noise; the cost is that of real passes of one row.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from forerun.core.errors import InvalidRequest
from forerun.core.pages import KV, TILE
from forerun.core.params import Sampling
from forerun.core.pick import Picker
from forerun.runtime.distill.student import Student
from forerun.runtime.distill.wide import step as forward
from forerun.runtime.distill.writing import Conversations, Kind
from forerun.runtime.forward import TransformersModel
from forerun.runtime.passes import Run

POSITIONS = 1500
"""Looked at, spread over all held-out answers."""

PASSES = 16
"""Timed of each model."""


@dataclass(frozen=True, slots=True)
class Agreement:
    """Shares of positions at which the draft's guess is the target's pick; at rejections, its runner-up."""

    positions: int
    accepted: float
    runner_up: float  # share of the rejections


@dataclass(frozen=True, slots=True)
class Evaluation:
    """On answers of held-out conversations. Coupled: temperature 1, the same noise on both sides."""

    greedy: Agreement
    greedy_by_temperature: dict[str, Agreement]  # by that of the text
    coupled: Agreement
    overlap: float  # mean of sum(min(p, q)), 1 - TV, at temperature 1
    coverage: float  # share of positions whose greedy token is in the head
    draft_ms: float  # a pass of one row
    target_ms: float

    @property
    def cost(self) -> float:
        """A draft step in target passes."""
        return self.draft_ms / self.target_ms


@dataclass(frozen=True, slots=True)
class _Seen:
    temperature: float
    overlap: float
    covered: bool
    greedy: tuple[bool, bool]  # the guess is right; the runner-up is
    coupled: tuple[bool, bool]


def evaluate(
    student: Student, target: nn.Module, held: Conversations, vocab_size: int, seed: int, costs: tuple[float, float]
) -> Evaluation:
    """Both models attend widely. costs: milliseconds of a pass of draft and target."""
    seen = list(_look(student, target, held, vocab_size, seed))
    if not seen:
        raise InvalidRequest("the held-out conversations hold no answers; longer ones or more tokens are needed")
    temperatures = sorted({place.temperature for place in seen})
    return Evaluation(
        _agreement([place.greedy for place in seen]),
        {f"{warmth:g}": _agreement([s.greedy for s in seen if s.temperature == warmth]) for warmth in temperatures},
        _agreement([place.coupled for place in seen]),
        statistics.fmean(place.overlap for place in seen),
        statistics.fmean(place.covered for place in seen),
        *costs,
    )


def pass_ms(model: TransformersModel, clock: Callable[[], float] = time.perf_counter) -> float:
    """Median time of a pass of one row, after a page of text."""
    start = min(TILE, model.context_limit - PASSES - 1)
    text = tuple(at * 31 % model.vocab_size for at in range(start + PASSES))
    path = KV(model.pages).extend(len(text))
    model.forward([Run(path, text[:start], 0, 1)])
    times = []
    for at in range(start, start + PASSES):
        began = clock()
        model.forward([Run(path, (text[at],), at, 1)])
        times.append(clock() - began)
    return statistics.median(times) * 1e3


@torch.inference_mode()
def _look(student: Student, target: nn.Module, held: Conversations, vocab_size: int, seed: int) -> Iterator[_Seen]:
    """One row of text at a time; of all its positions every so manieth."""
    device = next(target.parameters()).device
    ids = student.ids.cpu().numpy()
    inside = np.zeros(vocab_size, dtype=bool)
    inside[ids[ids < vocab_size]] = True
    greedy, coupled = (Picker(Sampling(temperature=warmth, seed=seed), vocab_size) for warmth in (0.0, 1.0))
    every = max(1, int((held.kinds == Kind.ANSWER).sum()) // POSITIONS)
    for row in range(len(held)):
        columns = np.flatnonzero(held.kinds[row] == Kind.ANSWER)[row % every :: every]
        if not len(columns):
            continue
        tokens = torch.from_numpy(held.tokens[row : row + 1, :-1].astype(np.int64)).to(device)
        theirs, own = (_rows(model, tokens, columns) for model in (target, student))
        for at, (p, q) in zip(columns.tolist(), zip(theirs, own, strict=True), strict=True):
            pick = greedy.pick(p, at)
            yield _Seen(
                float(held.temperatures[row]),
                float(np.minimum(_law(p[:vocab_size]), _law(q[:vocab_size])).sum()),
                bool(inside[pick]),
                _compare(greedy, p, q, at),
                _compare(coupled, p, q, at),
            )


def _rows(model: nn.Module, tokens: torch.Tensor, columns: NDArray[np.int64]) -> NDArray[np.float32]:
    """[len(columns), vocab] from which the tokens at `columns` would be picked."""
    logits: NDArray[np.float32] = forward(model, tokens)[0, torch.from_numpy(columns - 1)].float().cpu().numpy()
    return logits


def _law(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    weights: NDArray[np.float64] = np.exp(logits.astype(np.float64) - logits.max())
    weights /= weights.sum()
    return weights


def _compare(picker: Picker, p: NDArray[np.float32], q: NDArray[np.float32], position: int) -> tuple[bool, bool]:
    pick, guess = picker.pick(p, position), picker.guess(q, position)
    return pick == guess.first, pick == guess.second


def _agreement(pairs: list[tuple[bool, bool]]) -> Agreement:
    rejected = [second for first, second in pairs if not first]
    return Agreement(len(pairs), 1 - len(rejected) / len(pairs), statistics.fmean(rejected) if rejected else 0.0)
