"""The worker's side of Attach against a real gRPC server: one writer, malformed frames, coming back, failing loudly."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import grpc
import grpc.aio
import pytest

from forerun.core.messages import Emit, Start, Stop
from forerun.core.params import SeqId
from forerun.rpc.lane import Lane
from forerun.rpc.options import server_options
from forerun.rpc.worker import EngineThread, Worker
from forerun.v1 import attach_pb2, attach_pb2_grpc, common_pb2, generation_pb2_grpc, target_pb2

HELLO = attach_pb2.Hello(role=attach_pb2.ROLE_TARGET, worker="w", incarnation="w1", capacity=4)


class FakeCoordinator(attach_pb2_grpc.AttachmentServicer):  # type: ignore[misc]
    """Keeps what a worker says; sends what a test puts in `commands`."""

    def __init__(self, heartbeat_ms: int) -> None:
        self.heartbeat_ms = heartbeat_ms
        self.said: asyncio.Queue[tuple[str, Any]] = asyncio.Queue()
        self.frames = 0
        self.commands: asyncio.Queue[attach_pb2.CoordinatorFrame | None] = asyncio.Queue()
        self.streams = 0

    async def Attach(self, request_iterator: Any, context: Any) -> None:
        self.streams += 1
        await context.write(
            attach_pb2.CoordinatorFrame(welcome=attach_pb2.Welcome(coordinator="c", heartbeat_ms=self.heartbeat_ms))
        )
        reading = asyncio.ensure_future(self._read(request_iterator))
        try:
            while (command := await self.commands.get()) is not None:
                await context.write(command)
        finally:
            reading.cancel()

    async def _read(self, frames: AsyncIterator[attach_pb2.WorkerFrame]) -> None:
        async for frame in frames:
            self.frames += 1
            for field, value in frame.ListFields():
                for message in value if field.name in ("target", "draft") else [value]:
                    self.said.put_nowait((field.name, message))

    async def next(self, kind: str) -> Any:
        while (said := await self.said.get())[0] != kind:
            pass
        return said[1]


class FakeEngine:
    """Emits `tokens` one by one for every Start; `step` may be told to fail."""

    progress = 0

    def __init__(self, emit: Callable[[Any, Any], None], tokens: int = 0, fail: bool = False) -> None:
        self._emit = emit
        self._tokens = tokens
        self._fail = fail
        self._left: dict[Any, int] = {}
        self.dropped: list[Any] = []
        self.handled: list[Any] = []

    @property
    def sequence_count(self) -> int:
        return len(self._left)

    def handle(self, link: Any, command: Any, arrived: float | None = None) -> None:
        self.handled.append(command)
        if isinstance(command, Start):
            self._left[link, command.seq] = self._tokens

    def drop_link(self, link: Any) -> None:
        self.dropped.append(link)
        self._left = {key: left for key, left in self._left.items() if key[0] != link}

    def hold_until(self) -> float | None:
        return None

    def held_in_vain(self) -> None:
        raise AssertionError("nothing is held")

    def step(self) -> bool:
        if self._fail and self._left:
            raise RuntimeError("the engine broke")
        for (link, seq), left in list(self._left.items()):
            if left == 0:
                del self._left[link, seq]
                continue
            self.progress += 1
            done = self._tokens - left
            self._emit(link, Emit(seq, 1 + done, (done,), 0, 0, 1, 0))
            self._left[link, seq] = left - 1
        return bool(self._left)


class Patient(FakeEngine):
    """Passes may be held back for a moment, until one was in vain."""

    vain = 0
    _until: float | None = None

    def hold_until(self) -> float | None:
        if not self._left or self.vain:
            return None
        if self._until is None:
            self._until = time.monotonic() + 0.005
        return self._until if time.monotonic() < self._until else None

    def held_in_vain(self) -> None:
        self.vain += 1


@asynccontextmanager
async def attached(
    heartbeat_ms: int = 1000, kind: type[FakeEngine] = FakeEngine, **engine: Any
) -> AsyncIterator[tuple[FakeCoordinator, FakeEngine, Any]]:
    server = grpc.aio.server(options=server_options())
    coordinator = FakeCoordinator(heartbeat_ms)
    attach_pb2_grpc.add_AttachmentServicer_to_server(coordinator, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    worker = Worker(HELLO, [f"127.0.0.1:{port}"])
    made = kind(worker.emit, **engine)
    running = asyncio.ensure_future(worker.run(made))
    await worker.attached.wait()
    try:
        yield coordinator, made, running
    finally:
        worker.stop()
        await asyncio.wait({running})
        await server.stop(None)


def start(name: str) -> attach_pb2.CoordinatorFrame:
    sampling = common_pb2.Sampling(temperature=0.0, top_p=1.0)
    params = target_pb2.TargetParams(sampling=sampling, max_tokens=10)
    message = target_pb2.Start(seq=common_pb2.Seq(request_id=name), prompt_len=1, tokens=[1], params=params)
    return attach_pb2.CoordinatorFrame(target=[target_pb2.TargetCommand(start=message)])


async def test_the_engine_hears_that_it_waited_in_vain() -> None:
    """Also if the wait is over when it is asked again: else every pass would wait for a draft that is gone."""
    async with attached(kind=Patient, tokens=3) as (coordinator, engine, _):
        coordinator.commands.put_nowait(start("a"))
        told = 0
        while told < 3:
            told += len((await coordinator.next("target")).emit.tokens)
        assert isinstance(engine, Patient)
        assert engine.vain == 1


async def test_events_and_heartbeats_share_one_writer() -> None:
    """A heartbeat every millisecond beside a flood of events: nothing is lost and the stream holds."""
    count = 3000
    async with attached(heartbeat_ms=1, tokens=count) as (coordinator, _, _):
        await coordinator.commands.put(start("r"))
        seen: list[int] = []
        while len(seen) < count:
            emit = (await coordinator.next("target")).emit
            assert emit.base_len == 1 + len(seen)
            seen.extend(emit.tokens)
        assert seen == list(range(count))
        for _ in range(20):
            await coordinator.next("heartbeat")
        assert coordinator.streams == 1


async def test_a_malformed_command_refuses_its_sequence_and_nothing_else() -> None:
    async with attached(tokens=1) as (coordinator, engine, _):
        bad = start("bad")
        bad.target[0].start.params.sampling.top_p = 7.0
        beside = start("beside").target[0]
        bad.target.append(beside)
        await coordinator.commands.put(bad)
        refused = (await coordinator.next("target")).refused
        assert refused.seq.request_id == "bad"
        assert "top_p" in refused.reason
        await coordinator.commands.put(attach_pb2.CoordinatorFrame())
        await coordinator.commands.put(start("good"))
        heard = [(await coordinator.next("target")).emit.seq.request_id for _ in range(2)]
        assert heard == ["beside", "good"]
        assert [command.seq for command in engine.handled] == [SeqId("beside"), SeqId("good")]
        assert coordinator.streams == 1


class Chorus(FakeEngine):
    """Says nothing before all sixteen are there."""

    def step(self) -> bool:
        return super().step() if len(self._left) == 16 or self.progress else False


async def test_what_a_pass_says_is_one_frame() -> None:
    """All or nothing: the writer wakes at the first event, and the engine takes its time between two."""
    async with attached(tokens=1, kind=Chorus, heartbeat_ms=600_000) as (coordinator, _, _):
        await coordinator.next("heartbeat")
        before = coordinator.frames
        await coordinator.commands.put(
            attach_pb2.CoordinatorFrame(target=[start(f"r{number}").target[0] for number in range(16)])
        )
        heard = [(await coordinator.next("target")).emit.seq.request_id for _ in range(16)]
        assert heard == [f"r{number}" for number in range(16)]
        assert coordinator.frames == before + 1


class Insatiable(FakeEngine):
    """Every command it handles brings another one."""

    steps = 0

    def handle(self, link: Any, command: Any, arrived: float | None = None) -> None:
        self.again()

    def step(self) -> bool:
        self.steps += 1
        if self.steps == 3:
            self.finish()
        return True


def test_commands_without_end_do_not_keep_passes_from_running() -> None:
    failures: list[BaseException] = []
    engine = Insatiable(lambda link, event: None)
    thread = EngineThread(engine, failures.append, Lane("engine"), lambda: None)
    engine.again = lambda: thread.put("link", Stop(SeqId("r")))  # type: ignore[attr-defined]
    engine.finish = lambda: thread._inbox.put(None)  # type: ignore[attr-defined]
    engine.again()  # type: ignore[attr-defined]
    thread._run()
    assert engine.steps == 3
    assert not failures


async def test_comes_back_when_the_stream_ends() -> None:
    async with attached(tokens=1) as (coordinator, engine, _):
        await coordinator.commands.put(start("one"))
        await coordinator.next("target")  # the first hello came before it
        await coordinator.commands.put(None)
        again = await coordinator.next("hello")
        assert again.incarnation == "w1"
        await coordinator.commands.put(start("two"))
        assert (await coordinator.next("target")).emit.seq.request_id == "two"
        assert coordinator.streams == 2
        assert len(engine.dropped) == 1


async def test_a_broken_engine_ends_the_worker_loudly() -> None:
    async with attached(tokens=1, fail=True) as (coordinator, _, running):
        await coordinator.commands.put(start("r"))
        await asyncio.wait({running})
        with pytest.raises(RuntimeError, match="the engine broke"):
            running.result()


async def test_stop_is_understood() -> None:
    async with attached() as (coordinator, engine, _):
        message = target_pb2.Stop(seq=common_pb2.Seq(request_id="r", attempt=4))
        await coordinator.commands.put(attach_pb2.CoordinatorFrame(target=[target_pb2.TargetCommand(stop=message)]))
        await coordinator.commands.put(start("r"))
        for _ in range(2):  # a heartbeat later the engine has seen both
            await coordinator.next("heartbeat")
        assert engine.handled[0] == Stop(SeqId("r", 4))


class Refusing(attach_pb2_grpc.AttachmentServicer):  # type: ignore[misc]
    """Turns every worker away, and counts them."""

    def __init__(self) -> None:
        self.came: asyncio.Queue[None] = asyncio.Queue()

    async def Attach(self, request_iterator: Any, context: Any) -> None:
        self.came.put_nowait(None)
        await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "this target's model is revision 'a', not 'b'")


class Said(logging.Handler):
    """What the worker logs."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: asyncio.Queue[str] = asyncio.Queue()

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.put_nowait(record.getMessage())


@asynccontextmanager
async def turned_away(register: Callable[[grpc.aio.Server], None]) -> AsyncIterator[tuple[str, Said]]:
    """A worker that dials a server which does not take it: the address, and what it logs."""
    server = grpc.aio.server(options=server_options())
    register(server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    worker, said, log = Worker(HELLO, [address]), Said(), logging.getLogger("forerun.rpc.worker")
    log.addHandler(said)
    running = asyncio.ensure_future(worker.run(FakeEngine(worker.emit)))
    try:
        yield address, said
    finally:
        log.removeHandler(said)
        worker.stop()
        await running
        await server.stop(None)


async def test_a_refusal_that_lasts_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forerun.rpc.worker.REFUSED_S", 0.0)
    refusing = Refusing()
    register = partial(attach_pb2_grpc.add_AttachmentServicer_to_server, refusing)
    async with turned_away(register) as (address, said):
        for _ in range(3):
            await refusing.came.get()
        line = await said.lines.get()
        assert line.startswith(f"coordinator {address}: FAILED_PRECONDITION this target's model is revision 'a'")
        assert said.lines.empty()


async def test_the_public_port_is_told_from_the_attach_port() -> None:
    register = partial(generation_pb2_grpc.add_GenerationServicer_to_server, generation_pb2_grpc.GenerationServicer())
    async with turned_away(register) as (address, said):
        assert (await said.lines.get()).startswith(f"coordinator {address}: that is the public port; use the attach")
