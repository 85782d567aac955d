"""The public API. Checks, admits, streams; maps errors to statuses, here and nowhere else."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import grpc
import grpc.aio
from opentelemetry.trace import Span, Status, StatusCode

from coordinator.answer import events
from coordinator.request import MOST_STOPS, Accepted, Limits, check
from coordinator.router import Router
from forerun import __version__
from forerun.core import errors
from forerun.core.hits import Hit
from forerun.core.params import MOST_DRAFT_TOKENS, Source
from forerun.rpc.options import MAX_MESSAGE_BYTES
from forerun.telemetry.metrics import CoordinatorMetrics
from forerun.telemetry.tracing import Tracing, trace_id_of, traceparent_in, traceparent_of
from forerun.text import TextModel
from forerun.v1 import generation_pb2, generation_pb2_grpc

STATUS = {
    errors.InvalidRequest: grpc.StatusCode.INVALID_ARGUMENT,
    errors.AlreadyExists: grpc.StatusCode.ALREADY_EXISTS,
    errors.Unavailable: grpc.StatusCode.UNAVAILABLE,
    errors.Exhausted: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.Aborted: grpc.StatusCode.CANCELLED,
}

Context = grpc.aio.ServicerContext[Any, Any]


@dataclass(frozen=True, slots=True)
class Served:
    """What this coordinator serves."""

    names: Sequence[str]  # that a request's `model` may say, the first is reported
    text: TextModel


class Generation(generation_pb2_grpc.GenerationServicer):
    def __init__(self, served: Served, router: Router, tracing: Tracing, metrics: CoordinatorMetrics) -> None:
        self._served = served
        self._router = router
        self._tracing = tracing
        self._metrics = metrics

    # --- the four calls ------------------------------------------------------------------------

    async def GenerateStream(
        self, request: generation_pb2.GenerateRequest, context: Context
    ) -> AsyncGenerator[generation_pb2.GenerateEvent, None]:
        try:
            async with aclosing(self._answer(request, context)) as answer:
                async for event in answer:
                    yield event
        except errors.ForerunError as error:
            await _fail(context, error)

    async def Generate(
        self, request: generation_pb2.GenerateRequest, context: Context
    ) -> generation_pb2.GenerateResponse:
        response = generation_pb2.GenerateResponse()
        texts: list[str] = []
        try:
            async with aclosing(self._answer(request, context)) as answer:
                async for event in answer:
                    match event.WhichOneof("kind"):
                        case "started":
                            response.started.CopyFrom(event.started)
                            response.seed = event.started.seed
                        case "chunk":
                            texts.append(event.chunk.text)
                            response.token_ids.extend(event.chunk.token_ids)
                            response.logits_digests.extend(event.chunk.logits_digests)
                            response.windows.extend(event.chunk.windows)
                        case "finished":
                            response.finish_reason = event.finished.finish_reason
                            response.stop_cause.CopyFrom(event.finished.stop_cause)
                            response.usage.CopyFrom(event.finished.usage)
                            response.not_exact = event.finished.not_exact
        except errors.ForerunError as error:
            await _fail(context, error)
        response.text = "".join(texts)
        return response

    async def GetModelInfo(
        self, request: generation_pb2.GetModelInfoRequest, context: Context
    ) -> generation_pb2.GetModelInfoResponse:
        limits, pool = self._limits(), self._router.pool
        target = pool.targets[0].hello if pool.targets else None
        return generation_pb2.GetModelInfoResponse(
            model=self._served.names[0],
            model_revision=target.revision if target else "",
            numerics_id=target.numerics_id if target else "",
            vocab_size=limits.vocab_size,
            context_limit=limits.context_limit,
            lookahead=limits.lookahead,
            sources=[source.label for source in limits.sources],
            chat_template=self._served.text.has_chat_template,
            eos_token_ids=limits.eos_token_ids,
            targets=len(pool.targets),
            drafts=len(pool.drafts),
            max_message_bytes=MAX_MESSAGE_BYTES,
            max_stop_strings=MOST_STOPS,
            version=__version__,
            most_draft_tokens=MOST_DRAFT_TOKENS,
            kv_tokens=min((link.hello.kv_tokens for link in pool.targets), default=0),
        )

    async def Abort(self, request: generation_pb2.AbortRequest, context: Context) -> generation_pb2.AbortResponse:
        return generation_pb2.AbortResponse(found=self._router.abort(request.request_id))

    # --- one request ---------------------------------------------------------------------------

    async def _answer(
        self, request: generation_pb2.GenerateRequest, context: Context
    ) -> AsyncGenerator[generation_pb2.GenerateEvent, None]:
        """Started, chunks, Finished. However it ends, nothing of it stays in the workers."""
        arrived_ns = time.time_ns()
        try:
            accepted = await self._check(request)
        except errors.ForerunError as error:
            self._metrics.ended(_outcome(error))
            raise
        metadata = dict(context.invocation_metadata() or ())
        span = self._tracing.start(
            f"generate {self._served.names[0]}",
            traceparent_in(metadata),
            arrived_ns,
            {
                "gen_ai.operation.name": "generate",
                "gen_ai.request.model": self._served.names[0],
                "forerun.request_id": accepted.request_id,
                "gen_ai.usage.input_tokens": len(accepted.prompt),
                "gen_ai.request.temperature": accepted.params.sampling.temperature,
            },
        )
        answered = False
        try:
            async with aclosing(self._traced(request, accepted, span, arrived_ns)) as answer:
                async for event in answer:
                    answered = event.HasField("finished")
                    yield event
        except BaseException as error:
            if not answered:
                self._metrics.ended(_outcome(error))
            span.set_status(Status(StatusCode.ERROR, f"{type(error).__name__}: {error}"))
            raise
        finally:
            span.end()

    async def _traced(
        self, request: generation_pb2.GenerateRequest, accepted: Accepted, span: Span, arrived_ns: int
    ) -> AsyncGenerator[generation_pb2.GenerateEvent, None]:
        traceparent = traceparent_of(span)
        session = self._router.admit(accepted.request_id, accepted.prompt, accepted.params, traceparent)
        try:
            if not self._router.pool.targets:
                # Checked against the files so far, so that what is wrong was said at once; the target may allow less.
                await self._router.any_target(session)
                session.params = (accepted := await self._check(request, accepted)).params
            limits = self._limits()
            if accepted.params.max_tokens:
                await self._router.place(session)
            placed_ns = time.time_ns()
            self._tracing.record(traceparent, "queue", arrived_ns, placed_ns, {})
            yield generation_pb2.GenerateEvent(started=self._started(accepted, session.target_hello, span))
            async with aclosing(events(session, accepted, self._served.text, limits.context_limit)) as answer:
                told_ns = 0
                async for event in answer:
                    now_ns = time.time_ns()
                    count = len(event.chunk.token_ids)
                    if count and not told_ns:
                        self._tracing.record(traceparent, "prefill", placed_ns, now_ns, {})
                        self._metrics.first_token((now_ns - arrived_ns) / 1e9)
                        self._metrics.tokens(count - 1, 0.0)
                    elif count:
                        self._metrics.tokens(count, (now_ns - told_ns) / 1e9)
                    told_ns = now_ns if count else told_ns
                    if event.HasField("finished"):
                        _describe(span, event.finished)
                        usage = event.finished.usage
                        self._metrics.finished(
                            usage.prompt,
                            usage.completion,
                            usage.passes,
                            usage.drafted,
                            usage.accepted,
                            {hit.name.lower(): getattr(usage.hits, hit.name.lower()) for hit in Hit},
                        )
                        self._metrics.ended("ok")
                    yield event
        finally:
            self._router.end(session)

    async def _check(self, request: generation_pb2.GenerateRequest, before: Accepted | None = None) -> Accepted:
        """In a thread: tokenising a long prompt takes a while, and the streams of others go on meanwhile.

        `before`: what the same request was accepted as; it keeps its id.
        """
        accepted = await asyncio.to_thread(check, request, self._served.text, self._served.names, self._limits())
        return accepted if before is None else replace(accepted, request_id=before.request_id)

    def _started(self, accepted: Accepted, hello: Any, span: Span) -> generation_pb2.Started:
        return generation_pb2.Started(
            request_id=accepted.request_id,
            attempt=accepted.attempt,
            seed=accepted.params.sampling.seed,
            trace_id=trace_id_of(span) if self._tracing.on else "",
            model=self._served.names[0],
            model_revision=hello.revision if hello else "",
            numerics_id=hello.numerics_id if hello else "",
            prompt_tokens=len(accepted.prompt),
        )

    def _limits(self) -> Limits:
        """Of the attached target; before one is, of the model's files."""
        text, pool = self._served.text, self._router.pool
        drafts = [Source(number) for link in pool.drafts for number in link.hello.sources]
        own = [Source(number) for link in pool.targets for number in link.hello.sources]
        sources = tuple(dict.fromkeys((*drafts, *own)))
        hellos = [link.hello for link in pool.targets]
        return Limits(
            context_limit=min([text.context_limit, *(hello.context_limit for hello in hellos)]),
            vocab_size=min([text.vocab_size, *(hello.vocab_size for hello in hellos)]),
            eos_token_ids=text.eos_token_ids,
            lookahead=max((hello.lookahead for hello in hellos), default=0),
            sources=sources,
        )


def _describe(span: Span, finished: generation_pb2.Finished) -> None:
    usage = finished.usage
    span.set_attributes(
        {
            "gen_ai.usage.output_tokens": usage.completion,
            "gen_ai.response.finish_reasons": [generation_pb2.FinishReason.Name(finished.finish_reason)],
            "forerun.drafted": usage.drafted,
            "forerun.accepted": usage.accepted,
            "forerun.passes": usage.passes,
        }
    )


def _outcome(error: BaseException) -> str:
    """How a request ended, as a metric names it: the status in lower case."""
    if isinstance(error, errors.ForerunError):
        return STATUS.get(type(error), grpc.StatusCode.INTERNAL).name.lower()
    left = isinstance(error, asyncio.CancelledError | GeneratorExit)
    return "cancelled" if left else "internal"


async def _fail(context: Context, error: errors.ForerunError) -> NoReturn:
    await context.abort(STATUS.get(type(error), grpc.StatusCode.INTERNAL), str(error))
    raise AssertionError("abort raises")
