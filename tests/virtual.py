"""The three roles in virtual time: passes, steps and messages take what is stated, and nothing else takes any.

The engines, sessions and wire forms are the real ones; only time is not. So what a policy of growing and planning is
worth can be told to the digit, in less time than it would take, on any machine.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from time import thread_time
from typing import Any

from cluster import Attached, Cluster, asks, commands_of

from coordinator.session import Session
from draft_worker.engine import DraftConfig, DraftEngine
from forerun.core.hits import added
from forerun.core.messages import TargetParams
from forerun.core.params import Source
from forerun.runtime.calibrate import measure
from forerun.runtime.sim import SimModel, SimSpec
from forerun.v1 import attach_pb2
from target_worker.engine import TargetConfig, TargetEngine

PASS_S = 0.020
TOKENS = 400


@dataclass
class _Turns:
    """When one worker acts."""

    own: float  # share of the real time of its turns to count
    base: float = 0.0  # its own time, ahead of the world's while it computes, without what is counted of this turn
    began: float | None = None  # real time at which its turn began
    due: float | None = None  # its next turn
    held: float | None = None  # until when its pass is held back
    inbox: list[tuple[float, Any]] = field(default_factory=list)

    @property
    def now(self) -> float:
        return self.base + (0.0 if self.began is None else self.own * (thread_time() - self.began))

    def sleep(self, seconds: float) -> None:
        self.base += seconds

    def begin(self, time: float) -> None:
        self.due, self.base, self.began = None, time, thread_time()

    def end(self) -> None:
        self.base, self.began = self.now, None


class VirtualCluster(Cluster):
    """As Cluster, but messages and computing take virtual seconds. hop_s: of a message between two processes."""

    def __init__(self, hop_s: float = 80e-6, turn_s: float = 300e-6, own: float = 0.0) -> None:
        """turn_s: what a pass or step costs besides the model's time. own: share of the engines' real time to count."""
        super().__init__()
        self._own = own
        self._hop_s, self._turn_s = hop_s, turn_s
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._turns: dict[int, _Turns] = {}

    def attach_sim(self, spec: SimSpec, *, draft: bool, **config: Any) -> Attached:
        turns = _Turns(self._own)
        model = SimModel(spec, draft, turns.sleep, clock=lambda: turns.base)

        cost = measure(model, 64 if draft else 256, lambda: turns.base)
        turns.base = 0.0

        def make(emit: Any) -> Any:
            rest = {"clock": lambda: turns.now, "cost": cost}
            if draft:
                return DraftEngine(model, spec.vocab, DraftConfig(**config), emit, **rest)
            return TargetEngine(model, spec.vocab, TargetConfig(**config), emit, **rest)

        role = attach_pb2.ROLE_DRAFT if draft else attach_pb2.ROLE_TARGET
        worker = self._attach(role, make, [Source.MODEL] if draft else [Source.NGRAM], 1)
        self._turns[id(worker)] = turns
        worker.to_coordinator.put = lambda data: self._at(turns.now + self._hop_s, lambda: self._said(worker, data))  # type: ignore[method-assign]
        worker.to_worker.put = lambda data: self._at(self.now + self._hop_s, lambda: self._heard(worker, data))  # type: ignore[method-assign]
        return worker

    def _at(self, time: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time, next(self._order), what))

    def _said(self, worker: Attached, data: bytes) -> None:
        self.router.take(worker.link, attach_pb2.WorkerFrame.FromString(data))

    def _heard(self, worker: Attached, data: bytes) -> None:
        self._turns[id(worker)].inbox += [(self.now, command) for command in commands_of(data)]
        self._turn_at(worker, self.now)

    def _turn_at(self, worker: Attached, time: float) -> None:
        turns = self._turns[id(worker)]
        time = max(time, turns.now)
        if turns.due is None or time < turns.due:
            turns.due = time
            self._at(time, lambda: self._turn(worker, time))

    def _turn(self, worker: Attached, time: float) -> None:
        turns = self._turns[id(worker)]
        if turns.due != time:
            return  # an earlier turn took its place
        turns.begin(time)
        for arrived, command in turns.inbox:
            worker.engine.handle("link", command, arrived)
        turns.inbox.clear()
        if turns.held is not None and turns.now >= turns.held:
            worker.engine.held_in_vain()
        turns.held = worker.engine.hold_until()
        if turns.held is not None:
            turns.end()
            self._turn_at(worker, turns.held)
            return
        worked = worker.engine.step()
        turns.end()
        if worked:
            turns.sleep(self._turn_s)
            self._turn_at(worker, turns.now)

    async def answer_all(self, *asked: tuple[list[int], TargetParams]) -> list[Session]:
        sessions = []
        for prompt, params in asked:
            session = self.router.admit(f"r{next(self.serial)}", prompt, params, "")
            await self.router.place(session)
            sessions.append(session)
        while self._events and not all(session.over for session in sessions):
            self.now, _, what = heapq.heappop(self._events)
            what()
        assert all(session.finish for session in sessions), [session.failure for session in sessions]
        return sessions


@dataclass(frozen=True)
class Seen:
    """What some answers took."""

    rate: float  # tokens per pass-time: plain decoding is 1
    tokens_per_pass: float
    hits: tuple[int, ...]
    depth: float  # positions guessed per pass


async def decode(
    accept: float,
    step: float,
    branch: float,
    *,
    streams: int = 1,
    answers: int = 4,
    hop_s: float = 80e-6,
    draft: bool = True,
    chains: bool = True,
) -> Seen:
    """step: of the draft, in passes."""
    spec = SimSpec(PASS_S, 0.0, step * PASS_S, accept, branch)
    rng = random.Random(1)
    tokens = passes = drafted = 0
    seconds, hits = 0.0, ()
    for _ in range(answers):
        cluster = VirtualCluster(hop_s)
        cluster.attach_sim(spec, draft=False, chains=chains, max_sequences=streams)
        if draft:
            cluster.attach_sim(spec, draft=True)
        asked = asks(TOKENS, sources=[Source.MODEL] if draft else [], lookahead=8)
        prompts = [[rng.randrange(spec.vocab) for _ in range(30)] for _ in range(streams)]
        for session in await cluster.answer_all(*((prompt, asked) for prompt in prompts)):
            counts = session.counts(TOKENS)
            tokens, passes, drafted = tokens + TOKENS, passes + counts.passes, drafted + counts.drafted
            hits = added(hits, counts.hits)
        seconds += cluster.now
    return Seen(tokens * PASS_S / seconds, tokens / passes, hits, drafted / passes)
