"""Training on what the target thought: every step is a function of the plan and its number, and so is what comes out.

A checkpoint holds weights, moments and the step; the rows of a step follow from (seed, step), so a run that was broken
off goes on to the very bits of one that was not. How good the draft is, is asked of rows it never sees.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from forerun.core.errors import InvalidRequest
from forerun.runtime.distill.student import Student
from forerun.runtime.distill.wide import step as forward
from forerun.runtime.distill.writing import Conversations, Kind

CHECKPOINT = "checkpoint.safetensors"
WARM_UP = 100
"""Steps to the full learning rate, or a tenth of all if that is less."""

PIECE = 128
"""Positions whose logits are looked at together: what they take stays in the cache."""

LEAST = 1e-6
"""What the student is taken to give all other tokens at least."""

JUDGED_ROWS = 32
"""Held-out rows looked at during training."""

REHEARSALS = 3
"""Steps timed to turn minutes into a number of steps; they change nothing."""


@dataclass(frozen=True, slots=True)
class TrainPlan:
    """What decides the weights, beside the data and the student to begin with."""

    steps: int | None  # None: what `minutes` have room for
    minutes: float | None
    rows: int  # conversations of a step
    seed: int
    learning_rate: float = 5e-4  # at its height
    autocast: bool = False  # products in bfloat16; weights, moments and the loss stay float32


@dataclass(frozen=True, slots=True)
class Point:
    """How good the student was after `step` steps, on held-out rows."""

    step: int
    acceptance: float  # share of positions at which its argmax is the target's
    overlap: float  # mean of sum(min(p, q)), 1 - TV, over the target's kept tokens: never too high


class Slots:
    """From the target's ids to rows of the reduced head."""

    def __init__(self, student: Student) -> None:
        vocab = int(student.config.get_text_config(decoder=True).vocab_size)
        self._slots = torch.full((vocab,), -1, dtype=torch.int64)
        self._slots[student.ids.cpu()] = torch.arange(len(student.ids))

    def of(self, ids: NDArray[np.int64]) -> Tensor:
        """-1 for what the head lacks."""
        return self._slots[torch.from_numpy(ids.astype(np.int64))]


class _Distance(torch.autograd.Function):
    """`distance` and its gradient in one look at the logits, a piece at a time.

    By single operations it is ten looks at positions x head numbers, which took a quarter of a training step.
    """

    @staticmethod
    def forward(ctx: Any, few: Tensor, slots: Tensor, shares: Tensor) -> Tensor:
        gradient = torch.empty_like(few)
        total = few.new_zeros((), dtype=torch.float64)
        for first in range(0, len(few), PIECE):
            piece = slice(first, first + PIECE)
            inside = slots[piece] >= 0
            own = slots[piece].clamp(min=0)
            p = shares[piece] * inside
            q = few[piece].to(torch.promote_types(few.dtype, torch.float32), copy=True)
            best = q.amax(-1, keepdim=True)
            sums = q.sub_(best).exp_().sum(-1, keepdim=True)
            q.div_(sums)
            q_kept = q.gather(1, own) * inside
            log_q = few[piece].gather(1, own).to(q.dtype) - best - sums.log()
            kept_p, kept_q = p.sum(-1, keepdim=True), q_kept.sum(-1, keepdim=True)
            rest_p, rest_q = (1 - kept_p).clamp(min=0), 1 - kept_q
            total -= ((p * log_q).sum() + (rest_p * rest_q.clamp(min=LEAST).log()).sum()).double()
            # d log q_i / dz_j = [i = j] - q_j, and the rest is one less all that is kept
            odds = torch.where(rest_q > LEAST, rest_p / rest_q.clamp(min=LEAST), 0.0)
            q.mul_(kept_p - odds * kept_q).scatter_add_(1, own, (odds * q_kept - p) * inside)
            gradient[piece] = q.div_(len(few))
        ctx.save_for_backward(gradient)
        return (total / len(few)).to(torch.promote_types(few.dtype, torch.float32))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient.mul_(grads[0].to(gradient.dtype)), None, None


def distance(few: Tensor, slots: Tensor, shares: Tensor) -> Tensor:
    """Cross-entropy of the student to the target over the target's likeliest tokens, and all others as one.

    few: [positions, head] logits; slots: [positions, kept], -1 outside the head; shares: their probabilities.
    """
    return cast(Tensor, _Distance.apply(few, slots, shares))  # type: ignore[no-untyped-call]


def judge(
    student: Student, held: Conversations, slots: Slots, autocast: bool, rows_at_once: int
) -> tuple[float, float]:
    """(acceptance, overlap) at the answers of held-out rows. Raises InvalidRequest if they have none."""
    right = overlap = positions = 0.0
    for first in range(0, min(len(held), JUDGED_ROWS), rows_at_once):
        part = held.rows(np.arange(first, min(first + rows_at_once, len(held), JUDGED_ROWS)))
        with torch.inference_mode():
            few, asked = _logits(student, part, part.kinds == Kind.ANSWER, autocast)
            few, own = few.float(), slots.of(part.top_ids[asked]).to(few.device)
            shares = torch.from_numpy(part.top_shares[asked]).to(few.device).float()
            q = few.softmax(-1).gather(1, own.clamp(min=0)) * (own >= 0)
            right += float((few.argmax(-1) == own[:, 0]).sum())
            overlap += float(torch.minimum(q, shares).sum())
            positions += len(own)
    if not positions:
        raise InvalidRequest("the held-out conversations hold no answers; longer ones or more tokens are needed")
    return right / positions, overlap / positions


def train(
    student: Student,
    data: Conversations,
    held: Conversations,
    plan: TrainPlan,
    folder: Path,
    told: Callable[[int, int, list[Point]], None] = lambda step, steps, history: None,
    clock: Callable[[], float] = time.perf_counter,
) -> list[Point]:
    """Changes `student`; goes on from the checkpoint in `folder` if there is one. Returns how good it was when.

    told: hears (step, steps, history) after every step, and once before.
    """
    slots, own = Slots(student), student.own()
    optimiser = torch.optim.AdamW(own.values(), lr=0.0, betas=(0.9, 0.95), weight_decay=0.01)
    identity = _identity(student, data, plan)
    path = folder / CHECKPOINT
    if path.exists():
        done, steps, history = _restore(path, student, optimiser, identity)
    else:
        folder.mkdir(parents=True, exist_ok=True)
        done, history = 0, [Point(0, *judge(student, held, slots, plan.autocast, plan.rows))]
        steps = plan.steps or _steps_in(plan, student, data, slots, clock)
        _save(path, student, optimiser, identity, done, steps, history)
    every = max(1, steps // 20)
    told(done, steps, history)
    while done < steps:
        for group in optimiser.param_groups:
            group["lr"] = plan.learning_rate * schedule(done, steps)
        _backward(student, data.rows(rows_of(done, len(data), plan)), slots, plan.autocast)
        torch.nn.utils.clip_grad_norm_(own.values(), 1.0)
        optimiser.step()
        optimiser.zero_grad()
        done += 1
        if done % every == 0 or done == steps:
            history = [*history, Point(done, *judge(student, held, slots, plan.autocast, plan.rows))]
            _save(path, student, optimiser, identity, done, steps, history)
        told(done, steps, history)
    return history


def schedule(step: int, steps: int) -> float:
    """Share of the learning rate: up in a line, down in half a cosine."""
    warm_up = min(WARM_UP, max(1, steps // 10))
    if step < warm_up:
        return (step + 1) / warm_up
    return 0.5 * (1 + math.cos(math.pi * (step - warm_up) / max(1, steps - warm_up)))


def rows_of(step: int, count: int, plan: TrainPlan) -> NDArray[np.int64]:
    """Of `count` rows those of a step: all once in an order of chance, then all in another one."""
    places = range(step * plan.rows, (step + 1) * plan.rows)
    return np.array([_order(plan.seed, place // count, count)[place % count] for place in places])


@lru_cache(maxsize=4)
def _order(seed: int, epoch: int, count: int) -> NDArray[np.int64]:
    return np.random.default_rng((seed, epoch)).permutation(count)


def _logits(
    student: Student, rows: Conversations, wanted: NDArray[np.bool_], autocast: bool
) -> tuple[Tensor, tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Logits over the head from which the tokens at `wanted` would be drawn; and where those are."""
    device = student.ids.device
    row, column = np.nonzero(wanted)
    before = torch.from_numpy(row).to(device), torch.from_numpy(column - 1).to(device)
    head = student.model.get_output_embeddings()
    assert isinstance(head, torch.nn.Module)
    # The head sees those positions alone: logits of all, and choosing among them, take a fifth of a step.
    chosen = head.register_forward_pre_hook(lambda module, given: (given[0][before],))
    try:
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=autocast):
            few = forward(student.model, torch.from_numpy(rows.tokens[:, :-1].astype(np.int64)).to(device))
    finally:
        chosen.remove()
    return few, (row, column)


def _backward(student: Student, rows: Conversations, slots: Slots, autocast: bool) -> None:
    few, asked = _logits(student, rows, rows.kinds != Kind.TEMPLATE, autocast)
    shares = torch.from_numpy(rows.top_shares[asked]).to(few.device).float()
    distance(few, slots.of(rows.top_ids[asked]).to(few.device), shares).backward()


def _steps_in(plan: TrainPlan, student: Student, data: Conversations, slots: Slots, clock: Callable[[], float]) -> int:
    """How many steps `minutes` have room for, as steps take now."""
    times = []
    for _ in range(REHEARSALS):
        began = clock()
        _backward(student, data.rows(rows_of(0, len(data), plan)), slots, plan.autocast)
        for weight in student.own().values():
            weight.grad = None
        times.append(clock() - began)
    return max(1, int((plan.minutes or 0.0) * 60 / max(min(times), 1e-9)))


# --- checkpoints -------------------------------------------------------------------------------------


def _identity(student: Student, data: Conversations, plan: TrainPlan) -> dict[str, Any]:
    """What a checkpoint goes with."""
    shape = hashlib.sha256(student.ids.cpu().numpy().tobytes())
    for weight in student.own().values():
        shape.update(weight.detach().cpu().numpy().tobytes())
    tokens = hashlib.sha256(np.ascontiguousarray(data.tokens).tobytes()).hexdigest()
    found: dict[str, Any] = json.loads(json.dumps(asdict(plan)))
    return found | {"student": shape.hexdigest(), "data": tokens}


def _save(
    path: Path,
    student: Student,
    optimiser: torch.optim.AdamW,
    identity: dict[str, Any],
    done: int,
    steps: int,
    history: list[Point],
) -> None:
    tensors: dict[str, Tensor] = {}
    for name, weight in student.own().items():
        tensors[f"weight {name}"] = weight.detach()
        for moment, value in optimiser.state.get(weight, {}).items():
            tensors[f"{moment} {name}"] = value
    told = {"identity": identity, "done": done, "steps": steps, "history": [asdict(point) for point in history]}
    partial = path.with_suffix(".partial")
    save_file({name: value.contiguous() for name, value in tensors.items()}, partial, {"training": json.dumps(told)})
    partial.rename(path)


def _restore(
    path: Path, student: Student, optimiser: torch.optim.AdamW, identity: dict[str, Any]
) -> tuple[int, int, list[Point]]:
    with safe_open(path, framework="pt") as file:
        told: dict[str, Any] = json.loads(file.metadata()["training"])
        for name, wanted in identity.items():
            if told["identity"].get(name) != wanted:
                raise InvalidRequest(
                    f"{path} is of a training with another {name} ({told['identity'].get(name)!r}, now {wanted!r}); "
                    "ask for what it was begun with, begin afresh with --no-resume, or name another folder"
                )
        names = set(file.keys())
        with torch.no_grad():
            for name, weight in student.own().items():
                weight.copy_(file.get_tensor(f"weight {name}"))
                if f"exp_avg {name}" in names:
                    optimiser.state[weight] = {
                        moment: file.get_tensor(f"{moment} {name}").to("cpu" if moment == "step" else weight.device)
                        for moment in ("step", "exp_avg", "exp_avg_sq")
                    }
    return int(told["done"]), int(told["steps"]), [Point(**point) for point in told["history"]]
