"""The coordinator's side of one request when workers lie, fail or go: give up, go on elsewhere, within bounds."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import numpy as np
import pytest
from cluster import Cluster, asks

from coordinator.links import Pool, RelayedHint, WorkerLink
from coordinator.router import Router, RouterConfig
from forerun.core.errors import Aborted, AlreadyExists, Exhausted, Unavailable, WorkerFailed
from forerun.core.messages import Close, Emit, Gap, Refused, Start, Stop, Sync
from forerun.core.params import Finish, Source
from forerun.rpc import codec
from forerun.rpc.fakes import TubeOutbox
from forerun.runtime.sim import SimModel, SimSpec
from forerun.v1 import attach_pb2, draft_pb2, target_pb2
from target_worker.engine import TargetConfig, TargetEngine

END = frozenset({11})
serial = itertools.count()


class Peer:
    """A worker that is only a link: what was sent to it, and frames of its own by hand."""

    def __init__(self, router: Router, role: int = attach_pb2.ROLE_TARGET, numerics_id: str = "same") -> None:
        self.sent: list[Any] = []
        outbox: Any = TubeOutbox(self.sent.append)
        hello = attach_pb2.Hello(
            role=role,
            worker=f"p{next(serial)}",
            capacity=9,
            vocab_size=100,
            numerics_id=numerics_id,
            sources=[1],
            context_limit=64,
        )
        self.link = WorkerLink(hello, outbox)
        router.attached(self.link)

    def last(self, kind: type) -> Any:
        return next(item for item in reversed(self.sent) if isinstance(item, kind))

    @property
    def starts(self) -> int:
        return sum(isinstance(item, Start) for item in self.sent)


@pytest.fixture
def router() -> Router:
    return Router(Pool(), RouterConfig(max_requests=3, target_wait_s=0.05))


async def settle() -> None:
    """Lets the router's tasks run; no time passes."""
    for _ in range(5):
        await asyncio.sleep(0)


def emit(peer: Peer, base_len: int, *tokens: int, **more: Any) -> Emit:
    fields = {"accepted": 0, "drafted": 0, "passes": 1, "want": 8, **more}
    return Emit(peer.last(Start).seq, base_len, tokens, **fields)


async def begin(router: Router, max_tokens: int = 5) -> Any:
    session = router.admit(f"r{next(serial)}", [1, 2, 3], asks(max_tokens, sources=[Source.MODEL], ends=END), "")
    await router.place(session)
    return session


IMPOSSIBLE = {
    "more than was asked": lambda peer: emit(peer, 3, 1, 2, 3, 4, 5, 6),
    "outside the vocabulary": lambda peer: emit(peer, 3, 100),
    "nothing": lambda peer: emit(peer, 3),
    "an end that is none": lambda peer: emit(peer, 3, 9, finish=Finish.END_TOKEN),
    "a length that is not reached": lambda peer: emit(peer, 3, 9, finish=Finish.LENGTH),
    "no pass": lambda peer: emit(peer, 3, 9, passes=0),
    "counts beyond all bounds": lambda peer: emit(peer, 3, 9, drafted=2**32 - 1),
    "more accepted than drafted": lambda peer: emit(peer, 3, 1, 2, accepted=1),
    "beyond the ledger": lambda peer: emit(peer, 4, 1),
    "into the prompt": lambda peer: emit(peer, 2, 9),
}


@pytest.mark.parametrize("case", IMPOSSIBLE)
async def test_a_target_that_says_the_impossible_is_left_for_another(router: Router, case: str) -> None:
    liar, honest = Peer(router), Peer(router)
    session = await begin(router)
    assert session.target is liar.link
    session.on_emit(liar.link, IMPOSSIBLE[case](liar))
    await settle()
    assert session.target is honest.link
    assert isinstance(liar.sent[-1], Stop)
    assert session.ledger.completion == []
    session.on_emit(liar.link, emit(liar, 3, 7))  # it is not listened to any more
    assert session.ledger.completion == []
    session.on_emit(honest.link, emit(honest, 3, 8))
    assert session.ledger.completion == [8]


async def test_a_contradiction_of_what_is_committed_is_a_conflict(router: Router) -> None:
    first, second = Peer(router), Peer(router)
    session = await begin(router)
    session.on_emit(first.link, emit(first, 3, 8, 9))
    session.on_emit(first.link, emit(first, 3, 8, 7))
    await settle()
    assert session.ledger.completion == [8, 9]
    assert second.last(Start).tokens == (1, 2, 3, 8, 9)


async def test_a_repeated_emit_changes_nothing(router: Router) -> None:
    peer = Peer(router)
    session = await begin(router)
    for _ in range(2):
        session.on_emit(peer.link, emit(peer, 3, 8, 9))
    assert session.ledger.completion == [8, 9]


async def test_a_request_that_loses_target_after_target_is_given_up(router: Router) -> None:
    session = None
    for number in range(RouterConfig().most_targets):
        peer = Peer(router)
        session = session or await begin(router)
        await settle()
        assert session.targets_used == number + 1
        router.lost(peer.link)
        await settle()
    Peer(router)
    await settle()
    assert isinstance(session.failure, Unavailable)
    with pytest.raises(Unavailable, match="4 targets were lost"):
        await session.completion_beyond(0)


async def test_the_next_target_computes_the_same_bits_if_there_is_one(router: Router) -> None:
    first = Peer(router)
    session = await begin(router)
    other, same = Peer(router, numerics_id="other"), Peer(router)
    same.link.sequences = 5  # busier, and still better
    router.lost(first.link)
    await settle()
    assert (session.target, session.not_exact) == (same.link, False)
    router.lost(same.link)
    await settle()
    assert (session.target, session.not_exact) == (other.link, True)


async def test_refusals_of_a_target(router: Router) -> None:
    first, second = Peer(router), Peer(router)
    session = await begin(router)
    session.on_refused(first.link, Refused(first.last(Start).seq, "full", retryable=True))
    await settle()
    assert session.target is second.link
    session.on_refused(second.link, Refused(second.last(Start).seq, "cannot"))
    with pytest.raises(WorkerFailed, match="cannot"):
        await session.completion_beyond(0)


async def test_abort_while_no_target_is_there() -> None:
    router = Router(Pool(), RouterConfig(target_wait_s=60.0))
    session = router.admit("r", [1], asks(5), "")
    placing = asyncio.ensure_future(router.place(session))
    await settle()
    assert router.abort("r")
    with pytest.raises(Aborted):
        await placing
    router.end(session)
    assert router.session_count == 0


async def test_admission_is_bounded_and_ids_are_unique(router: Router) -> None:
    sessions = [router.admit(f"a{number}", [1], asks(5), "") for number in range(3)]
    with pytest.raises(Exhausted, match="3 requests"):
        router.admit("b", [1], asks(5), "")
    router.end(sessions[0])
    with pytest.raises(AlreadyExists, match="a1"):
        router.admit("a1", [1], asks(5), "")
    with pytest.raises(Unavailable, match=r"within 0\.05 s"):
        await router.place(sessions[1])


async def test_draft_gaps_refusals_and_losses(router: Router) -> None:
    target, draft = Peer(router), Peer(router, attach_pb2.ROLE_DRAFT)
    session = await begin(router)
    opened = draft.last(Sync)
    assert (opened.base_len, opened.tokens, opened.params is not None) == (0, (1, 2, 3), True)
    session.on_emit(target.link, emit(target, 3, 8, want=5))
    assert (draft.last(Sync).base_len, draft.last(Sync).tokens, draft.last(Sync).want) == (3, (8,), 5)
    session.on_gap(draft.link, Gap(opened.seq, 2))
    assert (draft.last(Sync).base_len, draft.last(Sync).tokens) == (2, (3, 8))
    session.on_hint(draft.link, opened.seq, b"unread")
    assert target.last(RelayedHint) == RelayedHint(target.last(Start).seq, b"unread")
    session.on_refused(draft.link, Refused(opened.seq, "too long"))
    assert session.draft is None
    session.on_emit(target.link, emit(target, 4, 9))
    assert session.draft is None, "not offered to a draft that refused it"
    another = Peer(router, attach_pb2.ROLE_DRAFT)
    session.on_emit(target.link, emit(target, 5, 10))
    assert another.last(Sync).tokens == (1, 2, 3, 8, 9, 10)
    session.on_emit(target.link, emit(target, 6, 11, finish=Finish.END_TOKEN))
    assert isinstance(another.sent[-1], Close)
    assert (target.link.sequences, another.link.sequences) == (0, 0)


async def test_merged_emits_that_a_stop_cut_off_count_at_most_one_pass_a_token(router: Router) -> None:
    peer = Peer(router)
    session = await begin(router)
    session.on_emit(peer.link, emit(peer, 3, 1, 2, 3, accepted=1, drafted=6, passes=2))
    assert (session.counts(3).passes, session.counts(3).accepted) == (2, 1)
    assert (session.counts(1).passes, session.counts(1).accepted) == (1, 1)


class Poisoned(SimModel):
    """Gives no numbers for a sequence that holds token 13."""

    def _rows(self, prefixes: list[list[int]]) -> Any:
        rows = super()._rows(prefixes)
        rows[[13 in prefix for prefix in prefixes]] = np.nan
        return rows


async def test_one_sequence_s_trouble_is_its_own() -> None:
    spec = SimSpec(pass_s=0.0, vocab=100)
    cluster = Cluster()
    worker = cluster.attach_target(lambda tell: TargetEngine(Poisoned(spec, False), 100, TargetConfig(), tell))
    bad = cluster.router.admit("bad", [13, 2], asks(30), "")
    good = cluster.router.admit("good", [1, 2], asks(30), "")
    for session in (bad, good):
        await cluster.router.place(session)
    for _ in range(200):
        cluster.tick()
    assert isinstance(bad.failure, WorkerFailed)
    assert "not numbers" in str(bad.failure)
    assert good.finish is Finish.LENGTH or 13 in good.ledger.tokens
    assert worker.engine.sequence_count == 0


async def test_links_end_when_a_step_has_no_end_and_live_while_it_goes_on() -> None:
    router = Router(Pool(), RouterConfig())
    link = Peer(router).link
    stuck = asyncio.ensure_future(link.stalled(0.05))
    link.beat(attach_pb2.Heartbeat(progress=1, idle=False))
    await settle()
    assert not stuck.done()
    link.beat(attach_pb2.Heartbeat(progress=1, idle=False))  # the same step, later
    await asyncio.wait_for(stuck, 5.0)
    idle = asyncio.ensure_future(link.stalled(30.0))
    link.beat(attach_pb2.Heartbeat(progress=1, idle=True))
    await settle()
    assert link._alive.is_set() is False, "idle is a sign of life: it was seen and cleared"
    assert not idle.done()
    idle.cancel()


async def test_a_worker_that_says_hello_again_ends_its_old_link(router: Router) -> None:
    old = Peer(router)
    again = WorkerLink(old.link.hello, old.link.outbox)
    router.attached(again)
    assert old.link.replaced.is_set()
    assert not again.replaced.is_set()


async def test_a_draft_that_rests_is_told_all_at_once_when_it_is_wanted_again(router: Router) -> None:
    target, draft = Peer(router), Peer(router, attach_pb2.ROLE_DRAFT)
    session = router.admit("resting", [1, 2, 3], asks(20, sources=[Source.MODEL]), "")
    await router.place(session)
    await settle()

    def emit(base_len: int, want: int) -> None:
        seq = target.last(Start).seq
        session.on_emit(target.link, Emit(seq, base_len, (base_len,), 0, 0, 1, want))

    def told() -> list[tuple[int, tuple[int, ...], int]]:
        return [(sync.base_len, sync.tokens, sync.want) for sync in draft.sent if isinstance(sync, Sync)]

    emit(3, want=4)
    before = len(told())
    emit(4, want=0)
    assert told()[before:] == [(4, (4,), 0)], "that it may rest it is told at once"
    emit(5, want=0)
    emit(6, want=0)
    assert len(told()) == before + 1
    emit(7, want=2)
    assert told()[-1] == (5, (5, 6, 7), 2)
    emit(8, want=2)
    assert told()[-1] == (8, (8,), 2)


async def test_a_malformed_event_takes_nothing_from_the_others_of_its_frame(router: Router) -> None:
    peer = Peer(router)
    session = await begin(router)
    good, bad = codec.put_target_event(emit(peer, 3, 7)), target_pb2.TargetEvent()
    unreadable = draft_pb2.DraftEvent()
    router.take(peer.link, attach_pb2.WorkerFrame(target=[bad, good, bad], draft=[unreadable]))
    assert session.ledger.tokens == [1, 2, 3, 7]
