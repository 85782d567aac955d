"""What both worker processes do around their engine: load a model, attach it, stop on a signal."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from forerun.core.errors import ModelRefused
from forerun.core.pages import TILE
from forerun.core.params import Source
from forerun.rpc.lane import Lane
from forerun.rpc.worker import Engine, Worker
from forerun.runtime.distill.draft import is_draft, read_draft, shipped_draft
from forerun.runtime.memory import MemoryUse, check_room, give_back, kv_budget, kv_pages, resident_bytes, settle
from forerun.runtime.models import described, load_causal_lm, numerics_id, resolve, revision
from forerun.runtime.passes import Model
from forerun.runtime.sim import PREFIX, SimModel, SimSpec
from forerun.telemetry.tracing import Tracing
from forerun.text import TextModel
from forerun.v1 import attach_pb2

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from forerun.runtime.distill.student import Student
    from forerun.runtime.forward import TransformersModel

log = logging.getLogger(__name__)

SIM_TOKEN_BYTES = 1024
"""What a token of a simulated model's KV counts as, against --kv-memory."""


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """Which model a worker computes, and how."""

    model: str  # folder, hub id, demo, or sim:...; of a draft also distilled: what ships for its target
    dtype: str = "bfloat16"
    threads: int = 1
    layers: int | None = None  # early exit: only the first ones
    kv_memory: int | None = None  # bytes; None: a share of what is free
    tp: int = 1  # ranks that compute it together
    device: str = "auto"  # cpu, cuda, or cuda if there is one
    target: str | None = None  # of a distilled draft; None: what it was made for, by the name it had then


@dataclass(frozen=True, slots=True)
class Loaded:
    model: Model
    vocab_size: int  # without the padding of the tables
    revision: str
    numerics_id: str
    eos_token_ids: tuple[int, ...]
    memory: Callable[[], MemoryUse]  # asked once the largest pass has run
    distilled: bool = False  # a draft that `forerun distill` made

    @property
    def context_limit(self) -> int:
        """Tokens of one sequence: what the model takes, and what KV can hold of one."""
        return min(self.model.context_limit, self.model.pages.count * TILE - 1)


def load(options: LoadOptions, *, draft: bool, sequences: int) -> Loaded:
    """sequences: how many are served at once. Raises ModelRefused, saying what cannot be served and why."""
    _check(options)
    folder = _folder_of(options, draft)
    target = _target_of(folder, options, draft)
    text = TextModel.load(target or folder)
    if folder.startswith(PREFIX):
        spec = SimSpec.parse(folder)
        budget = 1 << 40 if options.kv_memory is None else options.kv_memory
        pages = kv_pages(TILE * SIM_TOKEN_BYTES, sequences, spec.context, budget)
        simulated = SimModel(spec, draft, pages=pages)
        kv = pages * TILE * SIM_TOKEN_BYTES
        use = MemoryUse(resident_bytes(), 0, kv, pages * TILE, 0, sequences=sequences, asked=options.kv_memory)
        return Loaded(simulated, text.vocab_size, folder, folder, text.eos_token_ids, lambda: use)
    if text.context_limit < 2:
        raise ModelRefused(f"{folder} states a context of {text.context_limit} tokens; at least 2 are needed")
    import torch

    import forerun.runtime.forward  # noqa: F401  what is imported is no part of the model

    torch.set_num_threads(options.threads)
    began, baseline = time.monotonic(), resident_bytes()
    try:
        model = _build(folder, target, options, text.context_limit, draft, sequences)
    except (ArithmeticError, AttributeError, KeyError, OSError, RuntimeError, TypeError, ValueError) as error:
        raise ModelRefused(f"{folder} cannot be loaded: {type(error).__name__}: {error}") from error
    give_back()
    log.info("loaded %s in %.1f s, %s, %d threads", folder, time.monotonic() - began, options.dtype, options.threads)
    parallelism = f"tp={options.tp},threads={options.threads},{model.numerics}"
    bits = numerics_id(folder, options.dtype, _device(options), parallelism, options.layers)
    vocab_size = min(text.vocab_size, model.vocab_size)

    def memory() -> MemoryUse:
        return replace(model.memory(baseline, resident_bytes()), sequences=sequences, asked=options.kv_memory)

    return Loaded(model, vocab_size, revision(folder), bits, text.eos_token_ids, memory, target is not None)


def _check(options: LoadOptions) -> None:
    """Before anything is fetched or loaded. Raises ModelRefused for what this machine or model cannot take."""
    cores = len(os.sched_getaffinity(0))
    if options.threads > cores:
        raise ModelRefused(f"--threads {options.threads} is more than this process has cores: at most {cores}")
    if options.model.startswith(PREFIX):
        for name, wrong in (("--tp", options.tp > 1), ("--device cuda", options.device == "cuda")):
            if wrong:
                raise ModelRefused(f"a simulated model computes nothing: leave {name} out")
    elif options.device == "cuda":
        import torch

        if not torch.cuda.is_available():
            raise ModelRefused(f"--device cuda: torch {torch.__version__} finds no GPU here; auto and cpu need none")


def _device(options: LoadOptions) -> str:
    import torch

    if options.device != "auto":
        return options.device
    return "cuda" if torch.cuda.is_available() else "cpu"


def _folder_of(options: LoadOptions, draft: bool) -> str:
    if draft and options.model == Source.DISTILLED.label:
        if options.target is None:
            raise ModelRefused("--model distilled is the draft that ships for a target: name that with --target")
        return shipped_draft(resolve(options.target))
    return resolve(options.model)


def _target_of(folder: str, options: LoadOptions, draft: bool) -> str | None:
    """Folder of the target that `forerun distill` made this draft for; None: it is a model of its own."""
    if folder.startswith(PREFIX) or not is_draft(folder):
        if options.target is not None:
            raise ModelRefused(f"--target is for drafts that `forerun distill` made, and {options.model!r} is none")
        return None
    if not draft:
        raise ModelRefused(f"{folder} is a draft that `forerun distill` made; serve its target, and it as --draft")
    if options.tp > 1 or options.layers is not None:
        raise ModelRefused(f"{folder} is a draft that `forerun distill` made; it takes neither --tp nor --layers")
    made = read_draft(folder)
    if options.target is not None:
        return resolve(options.target)
    try:
        return resolve(made.target)
    except ModelRefused as error:
        raise ModelRefused(
            f"{folder} shares its embedding with its target, {made.target!r}, which is not to be had by that name; "
            "name its folder with --target"
        ) from error


def _build(
    folder: str, target: str | None, options: LoadOptions, context_limit: int, draft: bool, sequences: int
) -> TransformersModel:
    """target: of a distilled draft."""
    from forerun.runtime.forward import KVShape, TransformersModel

    device = _device(options)

    if options.tp == 1:
        weights: PreTrainedModel | Student
        if target is None:
            weights = load_causal_lm(folder, options.dtype, options.layers)
        else:
            from forerun.runtime.distill.student import load_student

            weights = load_student(folder, target, options.dtype)
        weights = weights.to(device)  # type: ignore[arg-type]
        budget = kv_budget([device]) if options.kv_memory is None else options.kv_memory
        page_bytes = KVShape.of(weights).page_bytes
        pages = kv_pages(page_bytes, sequences, context_limit, budget)
        if device == "cpu":
            check_room(pages * page_bytes)
        return TransformersModel(weights, context_limit, pages, exact=not draft)
    from forerun.runtime.parallel import ParallelModel
    from forerun.runtime.ranks import GroupSpec
    from forerun.runtime.shards import check_divides, heads_are_split, plan_of

    _, outline = described(folder, options.dtype, options.layers)
    plan = plan_of(outline)
    check_divides(outline, plan, options.tp)  # before any process is started for it
    spec = GroupSpec(
        folder, options.dtype, options.tp, context_limit, 2, options.layers, threads=options.threads, device=device
    )
    devices = [spec.device_of(rank) for rank in range(options.tp)]
    page_bytes = KVShape.of(outline).page_bytes // (options.tp if heads_are_split(plan) else 1)
    weight_bytes = sum(weight.nbytes for weight in outline.parameters()) // options.tp
    whole = options.kv_memory
    budget = kv_budget(devices, weight_bytes) if whole is None else whole // options.tp
    pages = kv_pages(page_bytes, sequences, context_limit, budget)
    if device == "cpu":
        check_room(options.tp * (pages * page_bytes + weight_bytes))
    return ParallelModel(replace(spec, pages=pages), exact=not draft)


def hello(
    role: str, options: LoadOptions, loaded: Loaded, capacity: int, sources: Sequence[Source]
) -> attach_pb2.Hello:
    """What a worker says of itself first. `role` is target or draft; the incarnation names this very start."""
    worker = f"{role}-{socket.gethostname()}-{os.getpid()}"
    return attach_pb2.Hello(
        role=f"ROLE_{role.upper()}",
        worker=worker,
        incarnation=f"{worker}-{time.time_ns()}",
        model=options.model,
        revision=loaded.revision,
        numerics_id=loaded.numerics_id,
        capacity=capacity,
        context_limit=loaded.context_limit,
        kv_tokens=loaded.model.pages.count * TILE,
        vocab_size=loaded.vocab_size,
        sources=[source.name_on_wire for source in sources],
    )


async def attach(
    greeting: attach_pb2.Hello,
    coordinators: Sequence[str],
    make_engine: Callable[[Callable[[Any, Any], None]], Engine],
    tracing: Tracing,
    lane: Lane,
) -> None:
    """Serve until SIGTERM or SIGINT. lane: where the model was loaded."""
    settle()
    worker = Worker(greeting, coordinators)
    engine = make_engine(worker.emit)
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, worker.stop)
    try:
        await worker.run(engine, lane)
    finally:
        await asyncio.to_thread(tracing.shutdown)
