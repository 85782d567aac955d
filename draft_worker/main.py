"""The draft worker process: load a small model, attach, grow trees. Started as `forerun draft-worker`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from draft_worker.engine import DraftConfig, DraftEngine
from forerun.core.params import Source
from forerun.rpc.lane import Lane
from forerun.runtime.serving import LoadOptions, attach, hello, load
from forerun.telemetry.tracing import Tracing


@dataclass(frozen=True, slots=True)
class DraftOptions:
    load: LoadOptions
    coordinators: Sequence[str]
    max_sequences: int = 64
    width: int = 3


async def serve(options: DraftOptions) -> None:
    """Runs until SIGTERM or SIGINT. Raises ModelRefused."""
    lane = Lane("engine")
    loaded = await asyncio.wrap_future(
        lane.run(lambda: load(options.load, draft=True, sequences=options.max_sequences))
    )
    source = Source.EARLY_EXIT if options.load.layers else Source.MODEL
    tracing = Tracing.from_environment("forerun-draft")
    config = DraftConfig(source=source, max_sequences=options.max_sequences, width=options.width)
    await attach(
        hello("draft", options.load, loaded, options.max_sequences, [source]),
        options.coordinators,
        lambda emit: DraftEngine(loaded.model, loaded.vocab_size, config, emit, tracing.record),
        tracing,
        lane,
    )
