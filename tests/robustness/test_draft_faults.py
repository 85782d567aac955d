"""A draft that is killed, paused or slowed in mid answer: the text stays, decoding goes on, and drafting comes back.

Rates are tokens per second as the client sees them, between chunks. What happens when is counted in tokens.
"""

from __future__ import annotations

import asyncio
import math
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import pytest_asyncio

from forerun.client import Client, build_request
from forerun.up import DRAFT, Service, UpOptions, started
from forerun.v1 import generation_pb2

pytestmark = [pytest.mark.services, pytest.mark.asyncio(loop_scope="module")]

SIM = "sim:pass=20ms,step=2ms,row=0ms,accept=0.8,branch=0.7,vocab=500,context=4096"
PROMPT = [5, 6, 7]  # its answer is about as easy to guess before a fault as after it
MOST = 900
LEARNING, BEFORE, DURING, WINDOW, LATER = 60, 200, 100, 24, 150
"""Tokens until a draft is trusted, before the fault, at least during it, in a window that is looked at for the rate
after it, and after such a window was found."""

ALONE = 0.9
"""Of the rate of plain decoding, during a fault: a target waits for nobody."""

BACK, BACK_S, STAYS = 0.8, 1.0, 0.7
"""Of the rate before: in one window, how soon after the draft's return, and in the tokens that follow."""

RUNS_S, SLOWER = 0.002, 20
"""A slowed draft runs for so long at a time, and is stopped for SLOWER - 1 times as long."""


def asking(**knobs: Any) -> generation_pb2.GenerateRequest:
    return build_request(token_ids=PROMPT, temperature=0.0, seed=7, max_tokens=MOST, ignore_eos=True, **knobs)


@dataclass(slots=True)
class Answer:
    """One answer as it comes."""

    events: AsyncIterator[generation_pb2.GenerateEvent]
    tokens: list[int] = field(default_factory=list)
    marks: list[tuple[float, int]] = field(default_factory=list)  # with each chunk: when it came, and tokens so far

    async def chunk(self) -> bool:
        """Reads the next one; False: the answer is over."""
        async for event in self.events:
            if event.HasField("chunk"):
                assert event.chunk.position == len(self.tokens)
                self.tokens += event.chunk.token_ids
                self.marks.append((time.monotonic(), len(self.tokens)))
                return True
        return False

    async def take(self, count: int) -> None:
        """At least so many more tokens."""
        end = len(self.tokens) + count
        while len(self.tokens) < end:
            assert await self.chunk(), f"the answer ended at {len(self.tokens)} tokens; {end} are needed"

    @property
    def last(self) -> int:
        """The mark of the last chunk."""
        return len(self.marks) - 1

    def rate(self, first: int, last: int = -1) -> float:
        """Between two marks."""
        (began, had), (ended, have) = self.marks[first], self.marks[last]
        return (have - had) / (ended - began)


@dataclass(frozen=True, slots=True)
class Scene:
    client: Client
    draft: Service
    plain: list[int]
    plain_rate: float

    def signal(self, number: signal.Signals) -> None:
        assert self.draft.process is not None
        self.draft.process.send_signal(number)

    async def attached(self, drafts: int, answer: Answer) -> None:
        """Returns when so many are; looks after each chunk."""
        while (await self.client.model_info()).drafts != drafts:
            await answer.take(1)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def scene() -> AsyncIterator[Scene]:
    async with (
        started(UpOptions(target=SIM, draft=("model",), port=0, quiet=True)) as running,
        Client(running.address) as client,
    ):
        plain = Answer(client.stream(asking(speculation=False)))
        await plain.take(MOST)
        (draft,) = (service for service in running.services if service.name == DRAFT)
        yield Scene(client, draft, plain.tokens, plain.rate(0))


@asynccontextmanager
async def killed(scene: Scene, answer: Answer) -> AsyncIterator[None]:
    await scene.draft.kill()
    try:
        await scene.attached(0, answer)
        yield
    finally:
        await scene.draft.start()
    await scene.attached(1, answer)


@asynccontextmanager
async def paused(scene: Scene, answer: Answer) -> AsyncIterator[None]:
    scene.signal(signal.SIGSTOP)
    try:
        yield
    finally:
        scene.signal(signal.SIGCONT)


@asynccontextmanager
async def slowed(scene: Scene, answer: Answer) -> AsyncIterator[None]:
    slowing = asyncio.create_task(slow(scene))
    try:
        yield
    finally:
        slowing.cancel()
        await asyncio.wait([slowing])
        scene.signal(signal.SIGCONT)


async def slow(scene: Scene) -> None:
    """Lets the draft run in one part of SLOWER of the time, however late timers are."""
    while True:
        began = time.monotonic()
        scene.signal(signal.SIGCONT)
        await asyncio.sleep(RUNS_S)
        scene.signal(signal.SIGSTOP)
        await asyncio.sleep((SLOWER - 1) * (time.monotonic() - began))


async def seconds_until(rate: float, answer: Answer) -> float:
    """From now until WINDOW tokens in a row have come at this rate; infinite if they never do."""
    now, first = time.monotonic(), answer.last + 1
    while await answer.chunk():
        ended, have = answer.marks[-1]
        begun = [at for at in range(first, answer.last) if have - answer.marks[at][1] >= WINDOW]
        if begun and answer.rate(begun[-1]) >= rate:
            return ended - now
    return math.inf


Fault = Callable[[Scene, Answer], AbstractAsyncContextManager[None]]
"""From its beginning until the draft is back."""


@pytest.mark.parametrize("fault", [killed, paused, slowed])
async def test_only_the_rate_tells(scene: Scene, fault: Fault, record_property: Callable[[str, object], None]) -> None:
    async with aclosing(scene.client.stream(asking())) as events:
        answer = Answer(events)
        await answer.take(LEARNING)
        learned = answer.last
        await answer.take(BEFORE)
        begun, before = answer.last, answer.rate(learned)
        async with fault(scene, answer):
            await answer.take(DURING)
        during = answer.rate(begun)
        back_s = await seconds_until(BACK * before, answer)
        back = answer.last
        if back_s <= BACK_S:
            await answer.take(LATER)
    later = answer.rate(back) if answer.last > back else 0.0
    plain = scene.plain_rate
    measured = {"plain": plain, "before": before, "during": during, "back_s": back_s, "later": later}
    for name, value in measured.items():
        record_property(name, round(value, 2))
    print(fault.__name__, *(f"{name} {value:.2f}" for name, value in measured.items()), len(answer.tokens))

    assert before >= 1.5 * plain, "there was no draft to lose"
    assert answer.tokens == scene.plain[: len(answer.tokens)]
    assert during >= ALONE * plain, "the target waited for a draft that was not there"
    assert back_s <= BACK_S
    assert later >= STAYS * before
