"""Admission, placement and the table from sequences to sessions."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from coordinator.links import Pool, WorkerLink
from coordinator.session import Session
from forerun.core.errors import Aborted, AlreadyExists, Exhausted, ForerunError, MalformedMessage, Unavailable
from forerun.core.messages import Emit, Gap, Refused, TargetParams
from forerun.rpc import codec
from forerun.v1 import attach_pb2, draft_pb2, target_pb2

log = logging.getLogger(__name__)

Part = TypeVar("Part")

MOST_HINT_BYTES = 1 << 18
"""A hint beyond this is no use to anybody and is not relayed."""

FIRST_WANT = 32
"""Nodes a draft may grow before the target's first Emit says how many pay."""


@dataclass(frozen=True, slots=True)
class RouterConfig:
    max_requests: int = 256  # at once; more are refused with RESOURCE_EXHAUSTED
    target_wait_s: float = 10.0  # how long a request waits for a target to attach
    most_targets: int = 4  # a request that lost as many is given up: it may be what kills them


class Router:
    """Sessions by request id, over the attached workers."""

    def __init__(self, pool: Pool, config: RouterConfig) -> None:
        self.pool = pool
        self._config = config
        self._sessions: dict[str, Session] = {}
        self._attempts = itertools.count(1)  # never used twice, so a late event finds nobody
        self._placing: set[asyncio.Task[None]] = set()

    @property
    def session_count(self) -> int:
        return len(self._sessions)

    def admit(self, request_id: str, prompt: list[int], params: TargetParams, traceparent: str) -> Session:
        """Raises AlreadyExists, Exhausted."""
        if request_id in self._sessions:
            raise AlreadyExists(f"request_id {request_id!r} is running; use another id, or abort that one")
        if len(self._sessions) >= self._config.max_requests:
            raise Exhausted(f"{self._config.max_requests} requests are running already; try again later")
        session = Session(
            request_id,
            prompt,
            params,
            traceparent,
            lambda: next(self._attempts),
            self._replace_target,
            self._offer_draft,
        )
        self._sessions[request_id] = session
        return session

    async def place(self, session: Session) -> None:
        """Find a target, and a draft if hints may help. Raises Unavailable, or what ended the session meanwhile."""
        if session.targets_used >= self._config.most_targets:
            raise Unavailable(f"{session.targets_used} targets were lost while they served this request")
        target = await self._found_target(session)
        if session.over:
            return
        session.begin_on(target)
        self._offer_draft(session)

    async def any_target(self, session: Session) -> None:
        """Wait until some target is attached. Raises Unavailable, or what ended the session meanwhile."""
        await self._found_target(session)

    async def _found_target(self, session: Session) -> WorkerLink:
        """The best target for it, waited for no longer than the session lives."""
        wanted = session.target_hello.numerics_id if session.target_hello else ""
        finding = asyncio.ensure_future(self.pool.target(session.refused_by, self._config.target_wait_s, wanted))
        ended = asyncio.ensure_future(session.ended.wait())
        try:
            await asyncio.wait((finding, ended), return_when=asyncio.FIRST_COMPLETED)
        finally:
            ended.cancel()
            finding.cancel()
        if session.failure is not None:
            raise session.failure
        target = finding.result() if finding.done() and not finding.cancelled() else None
        if target is None:
            raise Unavailable(f"no target worker attached within {self._config.target_wait_s:g} s")
        return target

    def end(self, session: Session) -> None:
        """Forget it, and free what it holds."""
        session.close()
        if self._sessions.get(session.request_id) is session:
            del self._sessions[session.request_id]

    def abort(self, request_id: str) -> bool:
        session = self._sessions.get(request_id)
        if session is None:
            return False
        session.fail(Aborted(f"request {request_id!r} was ended by Abort"))
        return True

    def _offer_draft(self, session: Session) -> None:
        if session.draft is not None or not session.wants_draft:
            return
        draft = self.pool.draft(session.draft_sources, session.refused_by)
        if draft is not None:
            session.draft_with(draft, FIRST_WANT)

    def _replace_target(self, session: Session) -> None:
        """A target was lost or gave up: go on elsewhere, from the ledger."""

        async def replace() -> None:
            try:
                await self.place(session)
            except ForerunError as error:
                session.fail(error)

        task = asyncio.get_running_loop().create_task(replace())
        self._placing.add(task)
        task.add_done_callback(self._placing.discard)

    # --- frames --------------------------------------------------------------------------------

    def attached(self, link: WorkerLink) -> None:
        """A worker said hello; if it did before, that stream is over, whatever its state."""
        for other in (*self.pool.targets, *self.pool.drafts):
            if other.hello.worker == link.hello.worker:
                other.replaced.set()
        self.pool.add(link)
        log.info("attached: %s, model %s", link.name, link.hello.model)

    def lost(self, link: WorkerLink) -> None:
        self.pool.remove(link)
        log.info("gone: %s", link.name)
        for session in list(self._sessions.values()):
            session.on_lost(link)

    def take(self, link: WorkerLink, frame: attach_pb2.WorkerFrame) -> None:
        """One frame of a worker. A malformed event is dropped; it ends nothing, and the others count."""
        for target in frame.target:
            self._heard(link, self._target_event, target)
        for draft in frame.draft:
            self._heard(link, self._draft_event, draft)

    def _heard(self, link: WorkerLink, take: Callable[[WorkerLink, Part], None], message: Part) -> None:
        try:
            take(link, message)
        except MalformedMessage as error:
            log.warning("malformed event from %s: %s", link.name, error)

    def _target_event(self, link: WorkerLink, event: target_pb2.TargetEvent) -> None:
        self._event(link, codec.target_event_of(event))

    def _draft_event(self, link: WorkerLink, event: draft_pb2.DraftEvent) -> None:
        if event.WhichOneof("kind") != "hint":
            self._event(link, codec.draft_answer_of(event))
            return
        envelope = event.hint
        session = self._sessions.get(envelope.seq.request_id)
        if session is not None and len(envelope.hint) <= MOST_HINT_BYTES:
            session.on_hint(link, codec.seq_of(envelope.seq), envelope.hint)

    def _event(self, link: WorkerLink, event: Emit | Gap | Refused) -> None:
        session = self._sessions.get(event.seq.request_id)
        if session is None:
            return
        match event:
            case Emit():
                session.on_emit(link, event)
            case Gap():
                session.on_gap(link, event)
            case Refused():
                log.warning("%s refused %s: %s", link.name, event.seq.request_id, event.reason)
                session.on_refused(link, event)
