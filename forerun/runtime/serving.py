"""What both worker processes do around their engine: load a model, attach it, stop on a signal."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from forerun.core.errors import ModelRefused
from forerun.core.params import Source
from forerun.rpc.worker import Engine, Worker
from forerun.runtime.models import load_causal_lm, numerics_id, resolve, revision
from forerun.runtime.passes import Model
from forerun.runtime.sim import PREFIX, SimModel, SimSpec
from forerun.telemetry.tracing import Tracing
from forerun.text import TextModel
from forerun.v1 import attach_pb2

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """Which model a worker computes, and how."""

    model: str  # folder, hub id, demo, or sim:...
    dtype: str = "bfloat16"
    threads: int = 1
    layers: int | None = None  # early exit: only the first ones


@dataclass(frozen=True, slots=True)
class Loaded:
    model: Model
    vocab_size: int  # without the padding of the tables
    revision: str
    numerics_id: str
    eos_token_ids: tuple[int, ...]


def load(options: LoadOptions, draft: bool) -> Loaded:
    """Raises ModelRefused, saying what cannot be served and why."""
    folder = resolve(options.model)
    text = TextModel.load(folder)
    if folder.startswith(PREFIX):
        simulated = SimModel(SimSpec.parse(folder), draft)
        return Loaded(simulated, text.vocab_size, folder, folder, text.eos_token_ids)
    import torch

    from forerun.runtime.forward import TransformersModel

    torch.set_num_threads(options.threads)
    began = time.monotonic()
    try:
        weights = load_causal_lm(folder, options.dtype, options.layers)
    except (AttributeError, KeyError, OSError, RuntimeError, TypeError, ValueError) as error:
        raise ModelRefused(f"{folder} cannot be loaded: {type(error).__name__}: {error}") from error
    model = TransformersModel(weights, text.context_limit, exact=not draft)
    log.info("loaded %s in %.1f s, %s, %d threads", folder, time.monotonic() - began, options.dtype, options.threads)
    bits = numerics_id(folder, options.dtype, "cpu", f"tp=1,threads={options.threads}", options.layers)
    return Loaded(model, min(text.vocab_size, model.vocab_size), revision(folder), bits, text.eos_token_ids)


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
        context_limit=loaded.model.context_limit,
        vocab_size=loaded.vocab_size,
        sources=[source.name_on_wire for source in sources],
    )


async def attach(
    greeting: attach_pb2.Hello,
    coordinators: Sequence[str],
    make_engine: Callable[[Callable[[Any, Any], None]], Engine],
    tracing: Tracing,
) -> None:
    """Serve until SIGTERM or SIGINT."""
    worker = Worker(greeting, coordinators)
    engine = make_engine(worker.emit)
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, worker.stop)
    try:
        await worker.run(engine)
    finally:
        await asyncio.to_thread(tracing.shutdown)
