"""The internal service: workers dial in, say hello, and hold their lease by being heard."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio

from coordinator.links import MOST_WAITING, Outgoing, WorkerLink, coordinator_frames
from coordinator.router import Router
from forerun.core.params import MOST_DRAFT_TOKENS, Source
from forerun.rpc.outbox import Outbox
from forerun.v1 import attach_pb2, attach_pb2_grpc

log = logging.getLogger(__name__)

HEARTBEAT_MS = 1_000
SILENT_BEATS = 5
"""A worker that says nothing for as many heartbeats is given up."""

HELLO_S = 10.0
_SOURCES = frozenset(int(source) for source in Source)


class Attachment(attach_pb2_grpc.AttachmentServicer):
    """`revision`: of the served model, if its weights are here; else the first target's is taken."""

    def __init__(self, name: str, router: Router, revision: str, stall_s: float = 30.0) -> None:
        self._name = name
        self._router = router
        self._revision = revision
        self._stall_s = stall_s

    async def Attach(
        self, request_iterator: AsyncIterator[attach_pb2.WorkerFrame], context: grpc.aio.ServicerContext[Any, Any]
    ) -> None:
        try:
            first = await asyncio.wait_for(anext(aiter(request_iterator), None), HELLO_S)
        except TimeoutError:
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, f"no Hello within {HELLO_S:g} s")
        problem = _problem(first)
        if first is None or problem:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, problem or "the stream ended before Hello")
        if first.hello.role == attach_pb2.ROLE_TARGET:
            serving = {link.hello.revision for link in self._router.pool.targets}
            expected = self._revision or next(iter(serving), first.hello.revision)
            if first.hello.revision != expected:
                why = f"this target's model is revision {first.hello.revision!r}, served here is {expected!r}"
                log.warning("turned away: %s: %s", first.hello.worker, why)
                await context.abort(grpc.StatusCode.FAILED_PRECONDITION, why)
        known = [number for number in first.hello.sources if int(number) in _SOURCES]
        del first.hello.sources[:]  # of a newer build: its hints are hints all the same
        first.hello.sources.extend(known)
        loop = asyncio.get_running_loop()
        link = WorkerLink(first.hello, Outbox[Outgoing](loop, MOST_WAITING))
        await context.write(
            attach_pb2.CoordinatorFrame(welcome=attach_pb2.Welcome(coordinator=self._name, heartbeat_ms=HEARTBEAT_MS))
        )
        self._router.attached(link)
        silent = loop.create_task(_watch(link))
        stalled = loop.create_task(link.stalled(self._stall_s))
        parts = [
            loop.create_task(self._read(link, request_iterator)),
            loop.create_task(_write(link, context)),
            loop.create_task(link.replaced.wait()),
            silent,
            stalled,
        ]
        try:
            done, _ = await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
            for part in done:
                part.result()
            if silent in done:
                limit = SILENT_BEATS * HEARTBEAT_MS / 1000
                await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, f"nothing was heard for {limit:g} s")
            if stalled in done:
                await context.abort(
                    grpc.StatusCode.DEADLINE_EXCEEDED, f"one step of its engine took over {self._stall_s:g} s"
                )
        finally:
            self._router.lost(link)
            for part in parts:
                part.cancel()
            await asyncio.gather(*parts, return_exceptions=True)

    async def _read(self, link: WorkerLink, frames: AsyncIterator[attach_pb2.WorkerFrame]) -> None:
        async for frame in frames:
            link.heard.set()
            if frame.HasField("heartbeat"):
                link.beat(frame.heartbeat)
            self._router.take(link, frame)


async def _write(link: WorkerLink, context: grpc.aio.ServicerContext[Any, Any]) -> None:
    while True:
        for frame in coordinator_frames(await link.outbox.take()):
            await context.write(frame)


async def _watch(link: WorkerLink) -> None:
    """Ends when the worker has been silent for too long."""
    limit = SILENT_BEATS * HEARTBEAT_MS / 1000
    while True:
        link.heard.clear()
        try:
            await asyncio.wait_for(link.heard.wait(), limit)
        except TimeoutError:
            return


def _problem(frame: attach_pb2.WorkerFrame | None) -> str:
    """What is wrong with a first frame; empty if nothing."""
    if frame is None or not frame.HasField("hello"):
        return "the first frame of a worker is Hello"
    hello = frame.hello
    if hello.role not in (attach_pb2.ROLE_TARGET, attach_pb2.ROLE_DRAFT):
        return f"hello.role must be ROLE_TARGET or ROLE_DRAFT, not {hello.role}"
    if not hello.worker or not hello.incarnation or hello.capacity < 1:
        return "hello needs worker, incarnation and a capacity of at least 1"
    if hello.role == attach_pb2.ROLE_TARGET and (
        hello.context_limit < 2 or hello.vocab_size < 2 or hello.lookahead > MOST_DRAFT_TOKENS
    ):
        return (
            f"hello of a target needs context_limit and vocab_size of at least 2 and lookahead of at most "
            f"{MOST_DRAFT_TOKENS}, not {hello.context_limit}, {hello.vocab_size} and {hello.lookahead}"
        )
    return ""
