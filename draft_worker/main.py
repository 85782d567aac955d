"""The draft worker process: load a small model, attach, grow trees. Started as `forerun draft-worker`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from draft_worker.engine import DraftConfig, DraftEngine
from forerun.core.cost import PassCost
from forerun.core.params import Source
from forerun.rpc.lane import Lane
from forerun.runtime.calibrate import measure
from forerun.runtime.memory import keep_workspace
from forerun.runtime.serving import Loaded, LoadOptions, attach, hello, load
from forerun.telemetry.tracing import Tracing

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DraftOptions:
    load: LoadOptions
    coordinators: Sequence[str]
    max_sequences: int = 64
    width: int = 12


MEASURED_ROWS = 64
"""Of a step: more than that are a prompt's, whose cost decides nothing."""


async def serve(options: DraftOptions) -> None:
    """Runs until SIGTERM or SIGINT. Raises ModelRefused."""
    keep_workspace()
    lane = Lane("engine")
    loaded, cost = await asyncio.wrap_future(lane.run(lambda: _prepared(options)))
    log.info("a step by its rows: %s", cost.describe())
    source = source_of(options.load, loaded)
    tracing = Tracing.from_environment("forerun-draft")
    config = DraftConfig(source=source, max_sequences=options.max_sequences, width=options.width)
    await attach(
        hello("draft", options.load, loaded, options.max_sequences, [source]),
        options.coordinators,
        lambda emit: DraftEngine(loaded.model, loaded.vocab_size, config, emit, tracing.record, cost=cost),
        tracing,
        lane,
    )


def source_of(options: LoadOptions, loaded: Loaded) -> Source:
    """What its hints are labelled."""
    if loaded.distilled:
        return Source.DISTILLED
    return Source.MODEL if options.layers is None else Source.EARLY_EXIT


def _prepared(options: DraftOptions) -> tuple[Loaded, PassCost]:
    loaded = load(options.load, draft=True, sequences=options.max_sequences)
    return loaded, measure(loaded.model, MEASURED_ROWS)
