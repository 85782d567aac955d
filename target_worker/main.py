"""The target worker process: load, prove, attach, decode. Started as `forerun target-worker`."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from forerun.core.params import Source
from forerun.runtime.serving import LoadOptions, attach, load, own_name
from forerun.telemetry.tracing import Tracing
from forerun.v1 import attach_pb2
from target_worker.engine import TargetConfig, TargetEngine

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TargetOptions:
    load: LoadOptions
    coordinators: Sequence[str]
    lookahead: int = 8
    max_sequences: int = 16
    ngram: bool = True  # offer prompt and output lookup


async def serve(options: TargetOptions) -> None:
    """Runs until SIGTERM or SIGINT. Raises ModelRefused."""
    loaded = load(options.load, draft=False)
    worker, incarnation = own_name("target")
    hello = attach_pb2.Hello(
        role=attach_pb2.ROLE_TARGET,
        worker=worker,
        incarnation=incarnation,
        model=options.load.model,
        revision=loaded.revision,
        numerics_id=loaded.numerics_id,
        capacity=options.max_sequences,
        context_limit=loaded.model.context_limit,
        vocab_size=loaded.vocab_size,
        sources=[int(Source.NGRAM)] if options.ngram else [],  # type: ignore[list-item]
        lookahead=options.lookahead,
        eos_token_ids=loaded.eos_token_ids,
    )
    tracing = Tracing.from_environment("forerun-target")
    config = TargetConfig(max_sequences=options.max_sequences, ngram=options.ngram)
    await attach(
        hello,
        options.coordinators,
        lambda emit: TargetEngine(loaded.model, loaded.vocab_size, config, emit, tracing.record),
        tracing,
    )
