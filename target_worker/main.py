"""The target worker process: load, prove, attach, decode. Started as `forerun target-worker`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from forerun.core.cost import PassCost
from forerun.core.params import Source
from forerun.rpc.lane import Lane
from forerun.runtime.calibrate import measure
from forerun.runtime.memory import keep_workspace
from forerun.runtime.serving import Loaded, LoadOptions, attach, hello, load
from forerun.telemetry.tracing import Tracing
from target_worker.engine import TargetConfig, TargetEngine

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TargetOptions:
    load: LoadOptions
    coordinators: Sequence[str]
    lookahead: int = 8
    max_sequences: int = 16
    ngram: bool = True  # offer prompt and output lookup
    chains: bool = False


async def serve(options: TargetOptions) -> None:
    """Runs until SIGTERM or SIGINT. Raises ModelRefused."""
    config = TargetConfig(max_sequences=options.max_sequences, ngram=options.ngram, chains=options.chains)
    keep_workspace()
    lane = Lane("engine")
    loaded, cost = await asyncio.wrap_future(lane.run(lambda: _prepared(options, config)))
    log.info("a pass by its rows: %s", cost.describe())
    log.info("%s", loaded.memory())
    sources = [Source.NGRAM] if options.ngram else []
    greeting = hello("target", options.load, loaded, options.max_sequences, sources)
    greeting.lookahead = options.lookahead
    greeting.eos_token_ids.extend(loaded.eos_token_ids)
    tracing = Tracing.from_environment("forerun-target")
    await attach(
        greeting,
        options.coordinators,
        lambda emit: TargetEngine(loaded.model, loaded.vocab_size, config, emit, tracing.record, cost=cost),
        tracing,
        lane,
    )


def _prepared(options: TargetOptions, config: TargetConfig) -> tuple[Loaded, PassCost]:
    loaded = load(options.load, draft=False, sequences=options.max_sequences)
    return loaded, measure(loaded.model, config.row_budget)
