"""From a target to a draft: write data, take layers and head, train, save, judge, describe.

Every stage goes on from what is in the folder, so the same command again continues. Owns the order and the folder;
what a stage does is in its own file.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from transformers import PreTrainedModel

from forerun.core.errors import InvalidRequest, ModelRefused
from forerun.core.pages import TILE
from forerun.runtime.demo_model import LICENCE
from forerun.runtime.distill import DRAFT
from forerun.runtime.distill.card import CARD, PLOT, Making, card, history_of, licence_of, plot
from forerun.runtime.distill.corpus import DataPlan, frequent, read_shards, shard, write_shards
from forerun.runtime.distill.draft import Draft
from forerun.runtime.distill.evaluation import PASSES, Evaluation, evaluate, pass_ms
from forerun.runtime.distill.openings import OWN, Openings
from forerun.runtime.distill.student import (
    Student,
    begin_from,
    check_start,
    choose_layers,
    load_student,
    save_student,
    student_of,
)
from forerun.runtime.distill.training import CHECKPOINT, Point, TrainPlan, train
from forerun.runtime.distill.turns import Turns
from forerun.runtime.distill.wide import WIDE
from forerun.runtime.distill.writing import Conversations
from forerun.runtime.folders import SINGLE
from forerun.runtime.forward import TransformersModel
from forerun.runtime.models import load_causal_lm, read_config, resolve, revision
from forerun.runtime.packed import pack_linears
from forerun.text import TextModel

LEAST_ROWS = 2
"""One row of a shard is held out, one is left to train on."""


@dataclass(frozen=True, slots=True)
class DistillOptions:
    """What `forerun distill` was asked."""

    target: str
    out: Path
    data: tuple[Path, ...] = ()  # the first is written to, those after it only read; none: within `out`
    openings: Path | None = None  # how questions begin; None: as in openings.txt
    start: Path | None = None  # a draft of this target to go on from
    layers: str = "3"
    head: int = 4096
    tokens: int = 2_000_000
    temperatures: tuple[float, ...] = (0.0, 0.7, 1.0)
    batch: int = 64  # conversations written at once
    length: int = 384  # tokens of each
    rows: int = 16  # conversations of a training step
    steps: int | None = None
    minutes: float | None = None
    passes: int = 4  # over the data, if neither steps nor minutes are said
    learning_rate: float = 5e-4
    seed: int = 0
    dtype: str = "bfloat16"
    threads: int = 1
    device: str = "auto"
    resume: bool = True

    def check(self) -> None:
        """Raises InvalidRequest for what would fail later."""
        if self.steps is not None and self.minutes is not None:
            raise InvalidRequest("either --steps or --minutes can be said, not both")
        if self.batch < LEAST_ROWS:
            raise InvalidRequest(
                f"a batch needs at least {LEAST_ROWS} conversations, not {self.batch}: one is held out"
            )
        if not self.temperatures or not all(0.0 <= warmth <= 2.0 for warmth in self.temperatures):
            raise InvalidRequest(f"temperatures are numbers of 0 to 2, at least one, not {list(self.temperatures)}")
        if not 0.0 < self.learning_rate <= 0.1:
            raise InvalidRequest(f"a learning rate is above 0 and at most 0.1, not {self.learning_rate:g}")
        folders = [folder.resolve() for folder in self.data]
        if len(set(folders)) < len(folders):
            raise InvalidRequest(f"a folder of data is named twice among {', '.join(map(str, self.data))}")
        if self.start is not None and self.start.resolve() == self.out.resolve():
            raise InvalidRequest(f"{self.out} is the draft to go on from and would be overwritten; name another --out")
        if self.target.startswith("sim:"):
            raise InvalidRequest(f"{self.target!r} is simulated: it has no layers to make a draft of")


@dataclass(frozen=True, slots=True)
class _Setting:
    """What every stage knows."""

    asked: DistillOptions
    folder: str  # of the target
    text: TextModel
    turns: Turns
    openings: Openings
    device: str
    console: Console

    @property
    def data(self) -> Path:
        """Where data are written."""
        return self.asked.data[0] if self.asked.data else self.asked.out / "data"

    @property
    def training(self) -> Path:
        return self.asked.out / "training"

    def load_target(self) -> PreTrainedModel:
        target = load_causal_lm(self.folder, self.asked.dtype, attention=WIDE)
        target.to(self.device)  # type: ignore[arg-type]
        return target


def make_draft(asked: DistillOptions, console: Console) -> Evaluation:
    """Leave a draft in `asked.out`. Raises InvalidRequest or ModelRefused, saying what would be right."""
    asked.check()
    seconds: dict[str, float] = {}
    torch.set_num_threads(asked.threads)
    setting = _setting(asked, console)
    total = int(read_config(setting.folder).get_text_config(decoder=True).num_hidden_layers)
    layers = choose_layers(asked.layers, total)
    if asked.start is not None:
        check_start(str(asked.start), setting.folder, layers)  # before hours of data are written
    with _timed(seconds, "data"):
        folders = _write_data(setting)
    data, held = read_shards(*folders)
    with _timed(seconds, "training"):
        student, history = _train(setting, layers, data, held)
    name = Path(setting.folder).name if Path(asked.target).expanduser().is_dir() else asked.target
    draft = Draft(name, revision(setting.folder), layers, len(student.ids))
    save_student(student, asked.out, draft)
    with _timed(seconds, "evaluation"):
        result = _evaluate(setting, held)
    save_student(student, asked.out, replace(draft, evaluation=asdict(result) | {"cost": result.cost}))
    made = Making(
        target=name,
        target_revision=draft.target_revision,
        licence=licence_of(Path(setting.folder)) or (LICENCE if asked.target == "demo" else None),
        layers=layers,
        total_layers=total,
        head=draft.head,
        vocab_size=setting.text.vocab_size,
        bytes_on_disk=(asked.out / SINGLE).stat().st_size,
        tokens=data.tokens.size + held.tokens.size,
        held_out=len(held),
        conversations=len(data),
        temperatures=sorted({*data.temperatures.tolist()}),
        steps=history[-1].step,
        rows=asked.rows,
        seed=asked.seed,
        seconds=seconds,
        machine=f"{setting.device}, {platform.machine()}, {asked.threads} threads",
        dtype=asked.dtype,
        openings=len(setting.openings.lines),
        before=history_of(asked.start) if asked.start else None,
    )
    (asked.out / CARD).write_text(card(made, result), encoding="utf-8")
    (asked.out / PLOT).write_text(plot(history, f"a draft of {name}: {made.tokens} tokens"), encoding="utf-8")
    return result


def _setting(asked: DistillOptions, console: Console) -> _Setting:
    folder = resolve(asked.target)
    if asked.out.exists() and Path(folder).samefile(asked.out):
        raise InvalidRequest(f"{asked.out} is the target itself; name another folder with --out")
    if (
        (asked.out / "config.json").exists()
        and not (asked.out / DRAFT).exists()
        and not (asked.out / "training").exists()
    ):
        raise InvalidRequest(f"{asked.out} holds a model that is no draft; name another folder with --out")
    text = TextModel.load(folder)
    if asked.length > text.context_limit:
        raise InvalidRequest(f"conversations of {asked.length} tokens do not fit a context of {text.context_limit}")
    if not 2 <= asked.head <= text.vocab_size:
        raise InvalidRequest(f"a head has 2 to {text.vocab_size} ids here, not {asked.head}")
    turns = Turns.of(text)
    least = len(turns.opening) + len(turns.to_answer) + 2
    if asked.length < least:
        raise InvalidRequest(
            f"conversations need at least {least} tokens within this chat template, not {asked.length}"
        )
    device = asked.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise ModelRefused("--device cuda was asked for, and torch finds no GPU")
    return _Setting(asked, folder, text, turns, Openings.read(asked.openings or OWN, text), device, console)


def _write_data(setting: _Setting) -> list[tuple[Path, int]]:
    """Folders of data, and how many shards each holds now."""
    asked = setting.asked
    plan = DataPlan(
        revision(setting.folder),
        asked.dtype,
        asked.seed,
        asked.temperatures,
        asked.batch,
        asked.length,
        setting.openings.digest,
    )
    count = plan.shards(asked.tokens)
    others = [(folder, plan.goes_with(folder)) for folder in asked.data[1:]]
    plan.fits(setting.data)  # before a model is loaded
    folders = [(setting.data, count), *others]
    if all(shard(setting.data, number).exists() for number in range(count)):
        return folders
    target = setting.load_target()
    if setting.device == "cpu":
        pack_linears(target)
    with _progress(setting.console) as progress:
        task = progress.add_task("tokens written", total=count * plan.shard_tokens)
        vocab_size = min(setting.text.vocab_size, int(target.config.get_text_config(decoder=True).vocab_size))
        write_shards(
            target,
            setting.turns,
            vocab_size,
            plan,
            count,
            setting.data,
            lambda new: progress.advance(task, new),
            setting.openings,
        )
    return folders


def _train(
    setting: _Setting, layers: tuple[int, ...], data: Conversations, held: Conversations
) -> tuple[Student, list[Point]]:
    asked = setting.asked
    ids = frequent(data, setting.text.vocab_size, asked.head, setting.text.eos_token_ids)
    student = student_of(setting.load_target(), layers, ids.tolist(), WIDE)
    if asked.start is not None:
        begin_from(student, str(asked.start), setting.folder, layers)
    steps = asked.steps
    if steps is None and asked.minutes is None:
        steps = max(1, asked.passes * len(data) // asked.rows)
    fast = asked.dtype == "bfloat16" and (setting.device == "cuda" or torch.ops.mkldnn._is_mkldnn_bf16_supported())
    plan = TrainPlan(steps, asked.minutes, asked.rows, asked.seed, asked.learning_rate, fast)
    if not asked.resume:
        (setting.training / CHECKPOINT).unlink(missing_ok=True)
    with _progress(setting.console) as progress:
        task = progress.add_task("training", total=None)

        def told(done: int, steps: int, history: list[Point]) -> None:
            accepted = f"training, held-out acceptance {history[-1].acceptance:.3f}"
            progress.update(task, completed=done, total=steps, description=accepted)

        return student, train(student, data, held, plan, setting.training, told)


def _evaluate(setting: _Setting, held: Conversations) -> Evaluation:
    """Of the draft as it lies in the folder."""
    asked, device = setting.asked, setting.device
    out = str(asked.out)
    setting.console.print("Judging the draft on held-out conversations")
    costs = _costs(setting)
    student = load_student(out, setting.folder, asked.dtype, attention=WIDE).to(device)
    return evaluate(student, setting.load_target(), held, setting.text.vocab_size, asked.seed, costs)


def _costs(setting: _Setting) -> tuple[float, float]:
    """Milliseconds of a pass of one row, of draft and target, as they are served."""
    asked = setting.asked
    lowest = torch.finfo(getattr(torch, asked.dtype)).min  # the proof at start wants finite logits
    limit = min(setting.text.context_limit, TILE + PASSES + 2)
    draft = load_student(str(asked.out), setting.folder, asked.dtype, outside=lowest).to(setting.device)
    costs = [pass_ms(TransformersModel(draft, limit, 2, exact=False))]
    target: Any = load_causal_lm(setting.folder, asked.dtype).to(setting.device)  # type: ignore[arg-type]
    costs.append(pass_ms(TransformersModel(target, limit, 2, exact=False)))
    return costs[0], costs[1]


def _progress(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(show_speed=True))
    return Progress(*columns, MofNCompleteColumn(), TimeRemainingColumn(), console=console)


@contextmanager
def _timed(seconds: dict[str, float], what: str) -> Iterator[None]:
    began = time.perf_counter()
    yield
    seconds[what] = time.perf_counter() - began
