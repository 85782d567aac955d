"""Digests, windows and counts on their way from Emits to the client: one digest per token, whatever happened."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import pytest

from coordinator.answer import events
from coordinator.links import Pool, WorkerLink
from coordinator.request import Accepted, Limits, check
from coordinator.router import Router, RouterConfig
from coordinator.service import Generation, Served
from coordinator.session import Session
from forerun.client import build_request
from forerun.core.messages import Emit, Start, Stop
from forerun.core.params import Finish
from forerun.rpc.fakes import TubeOutbox
from forerun.telemetry.metrics import CoordinatorMetrics
from forerun.telemetry.tracing import Tracing
from forerun.text import TextModel
from forerun.v1 import attach_pb2
from forerun.v1 import generation_pb2 as pb

TEXT = TextModel.load("sim:vocab=100,context=64")
PROMPT = [1, 2, 3]
serial = itertools.count()


class Peer:
    """A target by hand: what was sent to it, and Emits as it is told."""

    def __init__(self, router: Router, kv_tokens: int = 0) -> None:
        self.sent: list[Any] = []
        self.on_start: Any = lambda start: None
        name = f"p{next(serial)}"
        hello = attach_pb2.Hello(
            role=attach_pb2.ROLE_TARGET,
            worker=name,
            incarnation=f"{name}-1",
            capacity=9,
            vocab_size=100,
            context_limit=64,
            numerics_id="same",
            kv_tokens=kv_tokens,
        )
        outbox: Any = TubeOutbox(self.take)
        self.link = WorkerLink(hello, outbox)
        self.router = router
        router.attached(self.link)

    def take(self, item: Any) -> None:
        self.sent.append(item)
        if isinstance(item, Start):
            self.on_start(item)

    def emit(self, session: Session, base_len: int, *tokens: int, **more: Any) -> None:
        """Plain passes, one per token; the digest of token t is 10 t."""
        seq = next(item.seq for item in reversed(self.sent) if isinstance(item, Start))
        passes = more.get("passes", len(tokens))
        plain = {"accepted": 0, "drafted": 0, "passes": passes, "want": 0, "windows": (0,) * passes}
        if session.params.logits_digest:
            plain["digests"] = tuple(10 * token for token in tokens)
        session.on_emit(self.link, Emit(seq, base_len, tokens, **{**plain, **more}))


@pytest.fixture
def router() -> Router:
    return Router(Pool(), RouterConfig(target_wait_s=0.05))


async def begin(router: Router, **knobs: Any) -> tuple[Session, Accepted]:
    asked = {"token_ids": PROMPT, "temperature": 0.0, "max_tokens": 8, "logits_digest": True, **knobs}
    accepted = check(build_request(**asked), TEXT, ["m"], Limits(64, 100, (), 4, ()))
    session = router.admit(f"r{next(serial)}", accepted.prompt, accepted.params, "")
    await router.place(session)
    return session, accepted


async def told(session: Session, accepted: Accepted) -> tuple[list[pb.Chunk], pb.Finished]:
    found = [event async for event in events(session, accepted, TEXT, 64)]
    return [event.chunk for event in found[:-1]], found[-1].finished


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_digests_and_windows_go_with_their_tokens(router: Router) -> None:
    peer = Peer(router)
    session, accepted = await begin(router, max_tokens=6)
    peer.emit(session, 3, 7, 8, 9, accepted=1, drafted=5, passes=2, windows=(4, 1), branched=1, preempted=1, cached=2)
    reading = asyncio.ensure_future(told(session, accepted))
    await settle()
    peer.emit(session, 6, 4, 5, 6, accepted=2, drafted=2, passes=1, windows=(2,), preempted=2, finish=Finish.LENGTH)
    chunks, finished = await reading
    assert [list(chunk.token_ids) for chunk in chunks] == [[7, 8, 9], [4, 5, 6]]
    assert [list(chunk.logits_digests) for chunk in chunks] == [[70, 80, 90], [40, 50, 60]]
    assert [list(chunk.windows) for chunk in chunks] == [[4, 1], [2]]
    usage = finished.usage
    assert (usage.preempted, usage.branched, usage.targets, usage.cached) == (3, 1, 1, 2)
    assert (usage.drafted, usage.accepted, usage.passes) == (7, 3, 3)


async def test_nothing_is_sent_that_was_not_asked_for(router: Router) -> None:
    peer = Peer(router)
    session, accepted = await begin(router, max_tokens=2, logits_digest=None)
    peer.emit(session, 3, 7, 8, finish=Finish.LENGTH)
    (chunk,), _ = await told(session, accepted)
    assert (list(chunk.logits_digests), list(chunk.windows)) == ([], [])


async def test_a_continuation_neither_loses_nor_shifts_digests(router: Router) -> None:
    first, second = Peer(router), Peer(router)
    session, accepted = await begin(router, max_tokens=5)
    first.emit(session, 3, 7, 8)
    router.lost(first.link)
    await settle()
    assert session.target is second.link
    second.emit(session, 5, 9, 4, 5, finish=Finish.LENGTH)
    chunks, finished = await told(session, accepted)
    assert [digest for chunk in chunks for digest in chunk.logits_digests] == [70, 80, 90, 40, 50]
    assert finished.usage.targets == 2
    assert not finished.not_exact


async def test_a_worker_that_gave_no_token_does_not_count(router: Router) -> None:
    first, second = Peer(router), Peer(router)
    session, accepted = await begin(router, max_tokens=1)
    router.lost(first.link)
    await settle()
    second.emit(session, 3, 7, finish=Finish.LENGTH)
    _, finished = await told(session, accepted)
    assert finished.usage.targets == 1


async def test_what_is_said_twice_counts_once(router: Router) -> None:
    peer = Peer(router)
    session, _ = await begin(router, max_tokens=4)
    for _ in range(2):
        peer.emit(session, 3, 7, 8, preempted=1)
    peer.emit(session, 4, 8, 9, 4)  # one of them is known
    peer.emit(session, 6, 4)
    assert session.digests == [70, 80, 90, 40]
    assert session.counts(4).preempted == 1
    assert session.ledger.completion == [7, 8, 9, 4]


@pytest.mark.parametrize(
    "wrong",
    [
        {"digests": ()},
        {"digests": (70,)},
        {"digests": (70, 80, 90)},
        {"windows": (0,)},
        {"drafted": 3, "windows": (0, 2)},
        {"branched": 3},
    ],
)
async def test_a_target_whose_figures_cannot_be_is_left(router: Router, wrong: dict[str, Any]) -> None:
    liar, honest = Peer(router), Peer(router)
    session, _ = await begin(router)
    liar.emit(session, 3, 7, 8, **wrong)
    await settle()
    assert isinstance(liar.sent[-1], Stop)
    assert session.target is honest.link
    assert (session.ledger.completion, session.digests) == ([], [])


async def test_digests_that_nobody_asked_for_are_a_conflict(router: Router) -> None:
    peer = Peer(router)
    session, _ = await begin(router, logits_digest=None)
    peer.emit(session, 3, 7, digests=(70,))
    assert isinstance(peer.sent[-1], Stop)


async def test_a_stop_string_cuts_digests_and_windows_where_it_cuts_tokens(router: Router) -> None:
    peer = Peer(router)
    session, accepted = await begin(router, max_tokens=8, stop=["w8"])
    peer.emit(session, 3, 7, 8, 9, 4, accepted=0, drafted=10, windows=(1, 2, 3, 4))
    chunks, finished = await told(session, accepted)
    ids = [token for chunk in chunks for token in chunk.token_ids]
    assert ids == [7, 8]
    assert [digest for chunk in chunks for digest in chunk.logits_digests] == [70, 80]
    assert [window for chunk in chunks for window in chunk.windows] == [1, 2]
    assert finished.usage.completion == 2


class _Context:
    def invocation_metadata(self) -> tuple[Any, ...]:
        return ()


async def test_the_unary_answer_has_them_too_and_the_model_states_its_kv(router: Router) -> None:
    peer = Peer(router, kv_tokens=640)
    Peer(router, kv_tokens=512)
    service = Generation(Served(["m"], TEXT), router, Tracing.from_environment("test"), CoordinatorMetrics())

    def answer(start: Start) -> None:
        asyncio.get_running_loop().call_soon(
            lambda: peer.emit(router._sessions[start.seq.request_id], 3, 7, 8, finish=Finish.LENGTH)
        )

    peer.on_start = answer
    context: Any = _Context()
    request = build_request(token_ids=PROMPT, temperature=0.0, max_tokens=2, logits_digest=True)
    response = await service.Generate(request, context)
    assert list(response.token_ids) == [7, 8]
    assert list(response.logits_digests) == [70, 80]
    assert list(response.windows) == [0, 0]
    info = await service.GetModelInfo(pb.GetModelInfoRequest(), context)
    assert info.kv_tokens == 512, "what every target can hold"
