"""One streamed answer, put together and timed by the client's clock."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import grpc.aio

from forerun.client import Client
from forerun.commands import failure
from forerun.commands.measure import Prompt, Sample, Timeline, percentiles, ratio
from forerun.core.errors import MalformedMessage
from forerun.core.hits import Hit
from forerun.v1 import generation_pb2


@dataclass(frozen=True, slots=True)
class Answer:
    """What a stream said, from Started to Finished."""

    started: generation_pb2.Started
    finished: generation_pb2.Finished
    text: str
    token_ids: tuple[int, ...]
    timeline: Timeline
    digests: tuple[int, ...] = ()  # of the logits behind each token, if asked for
    windows: tuple[int, ...] = ()  # nodes checked in each pass, if digests were asked for

    @property
    def tokens_per_s(self) -> float | None:
        """Prefill included."""
        return ratio(len(self.token_ids), self.timeline.seconds)

    @property
    def tokens_per_pass(self) -> float | None:
        return ratio(len(self.token_ids), self.finished.usage.passes)

    @property
    def finish_reason(self) -> str:
        name: str = generation_pb2.FinishReason.Name(self.finished.finish_reason)
        return name.removeprefix("FINISH_REASON_").lower()

    @property
    def stop_cause(self) -> dict[str, Any] | None:
        kind = self.finished.stop_cause.WhichOneof("kind")
        return {kind: getattr(self.finished.stop_cause, kind)} if kind else None

    def as_sample(self, prompt: Prompt) -> Sample:
        usage = self.finished.usage
        return Sample(
            prompt,
            self.token_ids,
            self.timeline,
            usage.passes,
            usage.drafted,
            usage.accepted,
            prompt_tokens=usage.prompt,
            cached=usage.cached,
            digests=self.digests,
            windows=self.windows,
            branched=usage.branched,
            preempted=usage.preempted,
            targets=usage.targets,
            hits=tuple(getattr(usage.hits, hit.name.lower()) for hit in Hit),
            not_exact=self.finished.not_exact,
        )

    def as_json(self) -> dict[str, Any]:
        usage, started, timeline = self.finished.usage, self.started, self.timeline
        return {
            "text": self.text,
            "token_ids": list(self.token_ids),
            "finish_reason": self.finish_reason,
            "stop_cause": self.stop_cause,
            "not_exact": self.finished.not_exact,
            "seed": started.seed,
            "usage": {
                **{field.name: getattr(usage, field.name) for field in usage.DESCRIPTOR.fields},
                "hits": {field.name: getattr(usage.hits, field.name) for field in usage.hits.DESCRIPTOR.fields},
            },
            "timings": {
                "ttft_ms": None if timeline.ttft is None else timeline.ttft * 1000,
                "total_ms": timeline.seconds * 1000,
                "tokens_per_s": self.tokens_per_s,
                "tokens_per_pass": self.tokens_per_pass,
                "itl_ms": percentiles(timeline.itl),
            },
            "started": {field.name: getattr(started, field.name) for field in started.DESCRIPTOR.fields},
        }


async def receive(
    client: Client,
    request: generation_pb2.GenerateRequest,
    *,
    on_text: Callable[[str], None] = lambda text: None,
    on_tokens: Callable[[int], None] = lambda tokens: None,
    traceparent: str | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Answer:
    """Stream one answer; `on_text` is called with each piece as it arrives, `on_tokens` with their number.

    Raises:
        MalformedMessage: the events are not Started, chunks without a gap, Finished; or digests that were asked for
            do not come one per token.
        CallFailed: the service is gone in mid-answer.
    """
    started: generation_pb2.Started | None = None
    finished: generation_pb2.Finished | None = None
    texts: list[str] = []
    token_ids: list[int] = []
    digests: list[int] = []
    windows: list[int] = []
    arrivals: list[tuple[float, int]] = []
    sent = clock()
    async with aclosing(_events(client, request, traceparent)) as events:
        async for event in events:
            kind = event.WhichOneof("kind")
            if kind == "started":
                started = event.started
            elif kind == "finished":
                finished = event.finished
            elif kind == "chunk":
                chunk = event.chunk
                if chunk.position != len(token_ids):
                    raise MalformedMessage(f"chunk at position {chunk.position} after {len(token_ids)} tokens")
                count = len(chunk.token_ids)
                if len(chunk.logits_digests) != (count if request.output.logits_digest else 0):
                    raise MalformedMessage(f"a chunk of {count} tokens has {len(chunk.logits_digests)} digests")
                if count:
                    arrivals.append((clock(), count))
                    on_tokens(count)
                token_ids.extend(chunk.token_ids)
                digests.extend(chunk.logits_digests)
                windows.extend(chunk.windows)
                texts.append(chunk.text)
                on_text(chunk.text)
    if started is None or finished is None:
        raise MalformedMessage(f"the stream ended without {'Finished' if started else 'Started'}")
    timeline = Timeline(sent, tuple(arrivals), clock())
    return Answer(started, finished, "".join(texts), tuple(token_ids), timeline, tuple(digests), tuple(windows))


async def _events(
    client: Client, request: generation_pb2.GenerateRequest, traceparent: str | None
) -> AsyncGenerator[generation_pb2.GenerateEvent, None]:
    """Those of one answer."""
    began, tokens = False, 0
    async with aclosing(client.stream(request, traceparent=traceparent)) as events:
        try:
            async for event in events:
                began, tokens = True, tokens + len(event.chunk.token_ids)
                yield event
        except grpc.aio.AioRpcError as error:
            if began and error.code() is grpc.StatusCode.UNAVAILABLE:
                count = f"{tokens} {'token' if tokens == 1 else 'tokens'}" if tokens else "no token"
                raise failure.CallFailed(
                    f"the service at {client.addr} stopped in mid-answer; {count} had come "
                    f"(UNAVAILABLE: {error.details()})"
                ) from error
            raise
