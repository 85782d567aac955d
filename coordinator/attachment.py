"""The internal service: workers dial in, say hello, and hold their lease by being heard."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio

from coordinator.links import MOST_WAITING, Outgoing, WorkerLink, frame_of
from coordinator.router import Router
from forerun.rpc.outbox import Outbox
from forerun.v1 import attach_pb2, attach_pb2_grpc

HEARTBEAT_MS = 1_000
SILENT_BEATS = 5
"""A worker that says nothing for as many heartbeats is given up."""


class Attachment(attach_pb2_grpc.AttachmentServicer):
    def __init__(self, name: str, router: Router) -> None:
        self._name = name
        self._router = router

    async def Attach(
        self, request_iterator: AsyncIterator[attach_pb2.WorkerFrame], context: grpc.aio.ServicerContext[Any, Any]
    ) -> None:
        first = await anext(aiter(request_iterator), None)
        problem = _problem(first)
        if first is None or problem:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, problem or "the stream ended before Hello")
        loop = asyncio.get_running_loop()
        link = WorkerLink(first.hello, Outbox[Outgoing](loop, MOST_WAITING))
        await context.write(
            attach_pb2.CoordinatorFrame(welcome=attach_pb2.Welcome(coordinator=self._name, heartbeat_ms=HEARTBEAT_MS))
        )
        self._router.attached(link)
        silent = loop.create_task(_watch(link))
        parts = [
            loop.create_task(self._read(link, request_iterator)),
            loop.create_task(_write(link, context)),
            silent,
        ]
        try:
            done, _ = await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
            for part in done:
                part.result()
            if silent in done:
                limit = SILENT_BEATS * HEARTBEAT_MS / 1000
                await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, f"nothing was heard for {limit:g} s")
        finally:
            self._router.lost(link)
            for part in parts:
                part.cancel()
            await asyncio.gather(*parts, return_exceptions=True)

    async def _read(self, link: WorkerLink, frames: AsyncIterator[attach_pb2.WorkerFrame]) -> None:
        async for frame in frames:
            link.heard.set()
            self._router.take(link, frame)


async def _write(link: WorkerLink, context: grpc.aio.ServicerContext[Any, Any]) -> None:
    while True:
        for item in await link.outbox.take():
            await context.write(frame_of(item))


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
    return ""
