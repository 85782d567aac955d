"""The three roles in one process, stepped by hand: no threads, no sockets, no sleeping.

Every message still goes through its wire form. A tick is one target pass, a few draft steps and one
delivery in every direction, so a draft's hints land while "the pass" runs, as they do for real.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from coordinator.links import Pool, WorkerLink, coordinator_frames
from coordinator.router import Router, RouterConfig
from coordinator.session import Session
from forerun.core.cost import PassCost
from forerun.core.messages import Close, Hinted, Sync, TargetParams
from forerun.core.params import Sampling, Source
from forerun.core.sequence import TAIL, Hint
from forerun.core.tree import ROOT, TokenTree
from forerun.rpc import codec
from forerun.rpc.fakes import Faults, Tube, TubeOutbox
from forerun.rpc.worker import worker_frames
from forerun.v1 import attach_pb2

MOST_TICKS = 20_000


class Attached:
    """A worker and its two tubes."""

    def __init__(self, cluster: Cluster, role: int, engine: Any, sources: Sequence[Source], steps: int) -> None:
        self.engine = engine
        self.steps = steps
        self.role = role
        self._cluster = cluster
        rng = random.Random(cluster.seed + next(cluster.serial))
        self.to_worker: Tube[bytes] = Tube(cluster.faults, _is_hint_command, rng, cluster.clock)
        self.to_coordinator: Tube[bytes] = Tube(cluster.faults, _is_hint_event, rng, cluster.clock)
        hello = attach_pb2.Hello(
            role=role,
            worker=f"w{next(cluster.serial)}",
            incarnation=f"i{next(cluster.serial)}",
            capacity=1000,
            vocab_size=1 << 20,
            context_limit=1,  # whatever the engine says
            numerics_id="same",
            sources=[int(source) for source in sources],
        )
        outbox: Any = TubeOutbox(self._send)
        self.link = WorkerLink(hello, outbox)
        cluster.router.attached(self.link)

    def receive(self) -> None:
        for data in self.to_worker.tick():
            for command in commands_of(data):
                self.engine.handle("link", command)

    def _send(self, item: Any) -> None:
        for frame in coordinator_frames([item]):
            self.to_worker.put(frame.SerializeToString())

    def emit(self, _link: Any, event: Any) -> None:
        for frame in worker_frames([event], self.role):
            self.to_coordinator.put(frame.SerializeToString())

    def deliver(self) -> None:
        for data in self.to_coordinator.tick():
            self._cluster.router.take(self.link, attach_pb2.WorkerFrame.FromString(data))

    def kill(self) -> None:
        """As SIGKILL: nothing more is said, and the coordinator sees the stream end."""
        self.to_worker.cut()
        self.to_coordinator.cut()
        self._cluster.workers.remove(self)
        self._cluster.router.lost(self.link)


def commands_of(data: bytes) -> list[Any]:
    """Of one frame of the coordinator."""
    frame = attach_pb2.CoordinatorFrame.FromString(data)
    return [*map(codec.target_command_of, frame.target), *map(codec.draft_command_of, frame.draft)]


def _is_hint_command(data: bytes) -> bool:
    return any(command.HasField("hint") for command in attach_pb2.CoordinatorFrame.FromString(data).target)


def _is_hint_event(data: bytes) -> bool:
    return any(event.HasField("hint") for event in attach_pb2.WorkerFrame.FromString(data).draft)


@dataclass
class Cluster:
    """Coordinator, targets and drafts. `attach_*` first, then `answer`."""

    faults: Faults = field(default_factory=Faults)
    seed: int = 0
    clock: Callable[[], int] | None = None  # what delays are counted in; None: ticks
    workers: list[Attached] = field(default_factory=list)
    sessions: list[Session] = field(default_factory=list)  # of the `answer` that runs
    serial: Any = field(default_factory=itertools.count)
    router: Router = field(default_factory=lambda: Router(Pool(), RouterConfig()))

    def attach_target(self, make_engine: Any) -> Attached:
        return self._attach(attach_pb2.ROLE_TARGET, make_engine, [Source.NGRAM], 1)

    def attach_draft(self, make_engine: Any, source: Source = Source.MODEL, steps: int = 3) -> Attached:
        return self._attach(attach_pb2.ROLE_DRAFT, make_engine, [source], steps)

    def _attach(self, role: int, make_engine: Any, sources: Sequence[Source], steps: int) -> Attached:
        worker = Attached(self, role, None, sources, steps)
        worker.engine = make_engine(worker.emit)
        self.workers.append(worker)
        return worker

    def tick(self) -> None:
        """Targets plan before anything new arrives; drafts grow meanwhile; then all is delivered."""
        for worker in sorted(self.workers, key=lambda worker: worker.role):
            worker.receive()
            for _ in range(worker.steps):
                worker.engine.step()
        for worker in list(self.workers):
            worker.deliver()

    async def answer(self, *asked: tuple[Sequence[int], TargetParams], after_tick: Any = None) -> list[Session]:
        """Serve the requests side by side until all are over."""
        sessions = []
        for prompt, params in asked:
            session = self.router.admit(f"r{next(self.serial)}", list(prompt), params, "")
            await self.router.place(session)
            sessions.append(session)
        self.sessions = sessions
        for tick in range(MOST_TICKS):
            self.tick()
            await asyncio.sleep(0)  # lets the router's own tasks run; no time passes
            if after_tick is not None:
                after_tick(tick)
            if all(session.over for session in sessions):
                break
        else:
            raise AssertionError(f"not over after {MOST_TICKS} ticks")
        for session in sessions:
            if session.failure is not None:
                raise session.failure
            self.router.end(session)
        self.tick()
        return sessions


def asks(
    max_tokens: int,
    *,
    sources: Sequence[Source] = (Source.MODEL, Source.NGRAM),
    lookahead: int = 4,
    ends: frozenset[int] = frozenset(),
    min_tokens: int = 0,
    **sampling: Any,
) -> TargetParams:
    """Parameters of a request; temperature 0 unless said."""
    chosen = Sampling(**{"temperature": 0.0, **sampling})
    return TargetParams(chosen, max_tokens, min_tokens, ends, tuple(sources), lookahead)


def level() -> dict[str, Any]:
    """Arguments of a target engine whose passes all take as long: what is checked does not depend on this machine."""
    return {"cost": PassCost([(1, 1.0), (256, 1.0)]), "clock": map(float, itertools.count()).__next__}


class ScriptedDraft:
    """A draft that knows the answers and is wrong where it is told to be."""

    def __init__(self, emit: Any, answers: dict[tuple[int, ...], list[int]], wrong: Any, depth: int = 12) -> None:
        self._emit = emit
        self._answers = answers  # prompt -> the target's own completion
        self._wrong = wrong  # absolute position -> bool
        self._depth = depth
        self._prefixes: dict[Any, list[int]] = {}
        self._stale: set[Any] = set()

    def handle(self, link: Any, command: Any, arrived: float | None = None) -> None:
        match command:
            case Sync():
                held = self._prefixes.get(command.seq, [])
                assert command.base_len <= len(held), "a scripted draft is never behind"
                self._prefixes[command.seq] = held[: command.base_len] + list(command.tokens)
                self._stale.add(command.seq)
            case Close():
                self._prefixes.pop(command.seq, None)
                self._stale.discard(command.seq)

    def step(self) -> bool:
        for seq in list(self._stale):
            prefix = self._prefixes[seq]
            full = next(list(p) + a for p, a in self._answers.items() if prefix[: len(p)] == list(p))
            tree, node = TokenTree(prefix[-1]), ROOT
            for position in range(len(prefix), min(len(full), len(prefix) + self._depth)):
                token = full[position] if not self._wrong(position) else (full[position] + 1) % 50
                node = tree.add(node, token, 0.95, Source.MODEL)
            if tree.node_count:
                self._emit("link", Hinted(seq, Hint(len(prefix), tuple(prefix[-TAIL:]), tree)))
        self._stale.clear()
        return True
