"""The worker's side of Attach: dial every coordinator, say hello, pump frames, come back when cut off.

One engine, many links. The engine runs in a thread of its own and sees commands as values; a frame
that makes no sense refuses its sequence and nothing else.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

import grpc.aio

from forerun.core.errors import ForerunError, MalformedMessage
from forerun.core.messages import Command, Emit, Event, Hinted, Refused
from forerun.core.sequence import Hint
from forerun.core.tree import ROOT
from forerun.rpc import codec
from forerun.rpc.frames import packed
from forerun.rpc.lane import Lane
from forerun.rpc.options import client_options
from forerun.rpc.outbox import Outbox, Parcel
from forerun.v1 import attach_pb2, attach_pb2_grpc, common_pb2

log = logging.getLogger(__name__)

IDLE_S = 0.5
RETRY_S = (0.1, 2.0)
REFUSED_S = 30.0
"""Pause after a refusal that will not change by itself."""

REFUSALS = {
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.UNIMPLEMENTED,
}
RESOLVE_S = 5.0
WELCOME_S = 10.0
SWITCH_S = 5e-4
"""Most that the engine's Python keeps the stream waiting: what it said is on its way while it plans the next step."""

STOP_S = 10.0
"""An engine that has not finished its step by then is left behind, and the process says so."""


Outgoing = Event | attach_pb2.WorkerFrame
Part = TypeVar("Part")


class Engine(Protocol):
    """What target and draft engines have in common."""

    def handle(self, link: Any, command: Any, arrived: float | None = None) -> None: ...

    def drop_link(self, link: Any) -> None: ...

    def step(self) -> bool: ...

    def hold_until(self) -> float | None: ...

    def held_in_vain(self) -> None: ...

    @property
    def progress(self) -> int: ...

    @property
    def sequence_count(self) -> int: ...


@dataclass(frozen=True, slots=True)
class _Dropped:
    """Put in the inbox when a link is gone."""


class EngineThread:
    """Drains the inbox, then steps, for ever. An error in the engine ends the process, loudly."""

    def __init__(
        self, engine: Engine, failed: Callable[[BaseException], None], lane: Lane, tell: Callable[[], None]
    ) -> None:
        """tell: called when commands were handled or a step was taken, to pass on what the engine said meanwhile."""
        self._lane = lane
        self._tell = tell
        self._engine = engine
        self._failed = failed
        self.stepping = False
        self._inbox: queue.SimpleQueue[tuple[str, Command | _Dropped, float] | None] = queue.SimpleQueue()
        self._ended: Future[None] | None = None

    def start(self) -> None:
        self._ended = self._lane.run(self._run)

    def put(self, link: str, command: Command | _Dropped) -> None:
        self._inbox.put((link, command, time.monotonic()))

    def stop(self) -> None:
        """Returns when the engine has finished the step it is in. Raises TimeoutError if it does not."""
        self._inbox.put(None)
        if self._ended is None:
            return
        try:
            self._ended.result(STOP_S)
        except TimeoutError:
            raise TimeoutError(f"the engine has not finished its step within {STOP_S:g} s") from None

    def _run(self) -> None:
        try:
            worked = False
            while self._drain(0.0 if worked else IDLE_S) and self._hold():
                self.stepping = True
                worked = self._engine.step()
                self.stepping = False
                self._tell()
        except BaseException as error:
            self._failed(error)

    def _drain(self, wait_s: float) -> bool:
        """Handle what is there, waiting at most `wait_s` for the first; what comes meanwhile waits for the next time,
        or who sends fast enough would keep passes from running. False: stop.
        """
        try:
            item = self._inbox.get(timeout=wait_s) if wait_s > 0 else self._inbox.get_nowait()
            for left in range(self._inbox.qsize(), -1, -1):
                if item is None:
                    return False
                link, command, arrived = item
                if isinstance(command, _Dropped):
                    self._engine.drop_link(link)
                else:
                    self._engine.handle(link, command, arrived)
                if left:
                    item = self._inbox.get_nowait()
            return True
        except queue.Empty:
            return True
        finally:
            self._tell()

    def _hold(self) -> bool:
        """Hold the next pass back as long as the engine's patience says. False: stop."""
        deadline = self._engine.hold_until()
        while deadline is not None:
            left = deadline - time.monotonic()
            if left > 0 and not self._drain(left):
                return False
            if time.monotonic() >= deadline:
                self._engine.held_in_vain()
            deadline = self._engine.hold_until()
        return True


class Worker:
    """Attaches one engine to coordinators."""

    def __init__(self, hello: attach_pb2.Hello, coordinators: Sequence[str]) -> None:
        self._hello = hello
        self._coordinators = coordinators
        self._outboxes: dict[str, Outbox[Outgoing]] = {}
        self._said: dict[str, list[Parcel[Outgoing]]] = {}  # by the engine, since `tell`; its thread only
        self._failure: BaseException | None = None
        self._stopping = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._serial = 0
        self.attached = asyncio.Event()

    def emit(self, link: Any, event: Event) -> None:
        """The engine's way out; from its thread. What one pass says leaves together, with `tell`."""
        self._said.setdefault(link, []).append(_parcel(event))

    def tell(self) -> None:
        """Send what the engine said; from its thread. Events of a link that is gone are dropped."""
        for link, parcels in self._said.items():
            outbox = self._outboxes.get(link)
            if outbox is not None:
                outbox.put_all(parcels)
        self._said.clear()

    async def run(self, engine: Engine, lane: Lane | None = None) -> None:
        """Serve until `stop`. Raises what the engine raised, if it failed. lane: where the engine was made."""
        sys.setswitchinterval(SWITCH_S)
        thread = EngineThread(engine, self._engine_failed, lane or Lane("engine"), self.tell)
        thread.start()
        links: dict[str, asyncio.Task[None]] = {}
        try:
            while not self._stopping.is_set():
                addresses = await self._addresses()
                for address in addresses:
                    if address not in links or links[address].done():
                        links[address] = asyncio.create_task(self._keep_attached(address, engine, thread))
                for address in set(links) - set(addresses):  # the name leads there no more
                    links.pop(address).cancel()
                try:
                    await asyncio.wait_for(self._stopping.wait(), RESOLVE_S)
                except TimeoutError:
                    continue
        finally:
            for task in links.values():
                task.cancel()
            await asyncio.gather(*links.values(), return_exceptions=True)
            if self._failure is None:
                await asyncio.to_thread(thread.stop)
        if self._failure is not None:
            raise self._failure

    def stop(self) -> None:
        self._stopping.set()

    def _engine_failed(self, error: BaseException) -> None:
        self._failure = error
        self._loop.call_soon_threadsafe(self._stopping.set)

    async def _addresses(self) -> list[str]:
        """`host:port` as it is; `dns:host:port` as every address the name has now."""
        found: list[str] = []
        for coordinator in self._coordinators:
            if not coordinator.startswith("dns:"):
                found.append(coordinator)
                continue
            host, _, port = coordinator.removeprefix("dns:").rpartition(":")
            try:
                infos = await self._loop.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
            except OSError as error:
                log.warning("cannot resolve %s: %s", host, error)
                continue
            found.extend(
                f"[{info[4][0]}]:{port}" if ":" in str(info[4][0]) else f"{info[4][0]}:{port}" for info in infos
            )
        return list(dict.fromkeys(found))

    async def _keep_attached(self, address: str, engine: Engine, thread: EngineThread) -> None:
        delay, said = RETRY_S[0], ""
        while not self._stopping.is_set():
            began = self._loop.time()
            try:
                await self._attach(address, engine, thread)
            except grpc.aio.AioRpcError as error:
                lasting = error.code() in REFUSALS
                if self._loop.time() - began > RETRY_S[1] or said != _reason(error):
                    log.log(logging.WARNING if lasting else logging.INFO, "coordinator %s: %s", address, _reason(error))
                said = _reason(error)
                if lasting:
                    await asyncio.sleep(REFUSED_S)
                    continue
            except (asyncio.InvalidStateError, TimeoutError, ForerunError) as error:  # ended while it was written to
                log.info("coordinator %s: %s: %s", address, type(error).__name__, error)
            except Exception:
                log.exception("coordinator %s", address)
            delay = RETRY_S[0] if self._loop.time() - began > RETRY_S[1] else min(2 * delay, RETRY_S[1])
            await asyncio.sleep(delay)

    async def _attach(self, address: str, engine: Engine, thread: EngineThread) -> None:
        """One stream, from hello to its end."""
        async with grpc.aio.insecure_channel(address, options=client_options()) as channel:
            call = attach_pb2_grpc.AttachmentStub(channel).Attach()
            await call.write(attach_pb2.WorkerFrame(hello=self._hello))
            first = await asyncio.wait_for(call.read(), WELCOME_S)
            if first is grpc.aio.EOF or not first.HasField("welcome"):
                raise MalformedMessage(f"{address} did not answer Hello with Welcome")
            self._serial += 1
            link = f"{address}#{self._serial}"
            outbox = self._outboxes[link] = Outbox[Outgoing](self._loop)
            self.attached.set()
            log.info("attached to %s (%s) as %s", address, first.welcome.coordinator, self._hello.worker)
            beating = asyncio.create_task(_beat(outbox, engine, thread, first.welcome.heartbeat_ms / 1000))
            writing = asyncio.create_task(_write(call, outbox, self._hello.role))
            reading = asyncio.create_task(self._read(call, link, thread))
            parts = (beating, writing, reading)
            try:
                done, _ = await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
                for part in done:
                    part.result()
            finally:
                del self._outboxes[link]
                thread.put(link, _Dropped())
                for part in parts:
                    part.cancel()
                await asyncio.gather(*parts, return_exceptions=True)
                call.cancel()

    async def _read(self, call: Any, link: str, thread: EngineThread) -> None:
        while (frame := await call.read()) is not grpc.aio.EOF:
            self._take(link, frame, thread)

    def _take(self, link: str, frame: attach_pb2.CoordinatorFrame, thread: EngineThread) -> None:
        for target in frame.target:
            self._put(thread, link, target.start.seq, codec.target_command_of, target)
        for draft in frame.draft:
            self._put(thread, link, draft.sync.seq, codec.draft_command_of, draft)

    def _put(
        self, thread: EngineThread, link: str, seq: common_pb2.Seq, read: Callable[[Part], Command], message: Part
    ) -> None:
        """A malformed hint is dropped; a Start or Sync refuses its sequence `seq`."""
        try:
            thread.put(link, read(message))
        except MalformedMessage as error:
            log.warning("malformed command on %s: %s", link, error)
            outbox = self._outboxes.get(link)
            if seq.request_id and outbox is not None:
                outbox.put(Refused(codec.seq_of(seq), f"malformed message: {error}"))


def _reason(error: grpc.aio.AioRpcError) -> str:
    if error.code() is grpc.StatusCode.UNIMPLEMENTED:
        return "that is the public port; use the attach port, the next one unless --attach-port said otherwise"
    return f"{error.code().name} {error.details()}"


async def _write(call: Any, outbox: Outbox[Outgoing], role: int) -> None:
    """The one writer of a stream: gRPC fails a write that begins before another has ended."""
    while True:
        for frame in worker_frames(await outbox.take(), role):
            await call.write(frame)


async def _beat(outbox: Outbox[Outgoing], engine: Engine, thread: EngineThread, every_s: float) -> None:
    """Progress that stands still while the engine is in a step is how a stuck one shows."""
    while True:
        beat = attach_pb2.Heartbeat(progress=engine.progress, sequences=engine.sequence_count, idle=not thread.stepping)
        outbox.put(attach_pb2.WorkerFrame(heartbeat=beat), "heartbeat")
        await asyncio.sleep(every_s)


def worker_frames(items: Iterable[Outgoing], role: int) -> Iterator[attach_pb2.WorkerFrame]:
    """Heartbeats as they are, events together."""
    events: list[Event] = []
    for item in items:
        if isinstance(item, attach_pb2.WorkerFrame):
            yield item
        else:
            events.append(item)
    yield from packed(attach_pb2.WorkerFrame, events, partial(_part, role))


def _part(role: int, event: Event) -> tuple[str, Any]:
    """Gap and Refused exist for both roles; a Hinted only for a draft, an Emit only for a target."""
    if role == attach_pb2.ROLE_TARGET and not isinstance(event, Hinted):
        return "target", codec.put_target_event(event)
    assert not isinstance(event, Emit), "a draft emits nothing"
    return "draft", codec.put_draft_event(event)


def _parcel(event: Event) -> Parcel[Outgoing]:
    """Unsent Emits and Hints of a sequence merge; hints go first when nobody reads."""
    match event:
        case Emit():
            return Parcel(event, ("emit", event.seq), _merge_emits)
        case Hinted():
            return Parcel(event, ("hint", event.seq, event.hint.base_len, event.hint.tail), _merge_hints, True)
        case _:
            return Parcel(event)


def _merge_emits(first: Outgoing, later: Outgoing) -> Outgoing:
    assert isinstance(first, Emit) and isinstance(later, Emit)
    return first.then(later)


def _merge_hints(first: Outgoing, later: Outgoing) -> Outgoing:
    """Union below the same prefix."""
    assert isinstance(first, Hinted) and isinstance(later, Hinted)
    merged = first.hint.tree.excerpt(range(len(first.hint.tree)))
    merged.graft(later.hint.tree, ROOT)
    return Hinted(first.seq, Hint(first.hint.base_len, first.hint.tail, merged), later.traceparent)
