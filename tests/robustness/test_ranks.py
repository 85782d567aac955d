"""A target of two ranks as a service: one is killed or stopped in mid-answer, and the client sees a pause, no more."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from models import tiny_model

from forerun.client import Client, build_request
from forerun.up import Running, UpOptions, started
from forerun.v1 import generation_pb2

pytestmark = [pytest.mark.services, pytest.mark.asyncio(loop_scope="module")]

TOKENS, STRIKE = 240, 40
PROMPT = list(range(20, 60))
BACK_S = 15.0


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def services(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Running]:
    folder = tiny_model(tmp_path_factory.mktemp("model"), layers=4, context=4096)
    options = UpOptions(target=folder, draft=("ngram",), port=0, dtype="float32", threads=1, tp=2, quiet=True)
    async with started(options) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def client(services: Running) -> AsyncIterator[Client]:
    async with Client(services.address) as client:
        yield client


def asking(**knobs: object) -> generation_pb2.GenerateRequest:
    return build_request(token_ids=PROMPT, max_tokens=TOKENS, seed=3, **knobs)  # type: ignore[arg-type]


def log_of(services: Running) -> str:
    return (services.logs / "target.log").read_text()


def rank_pid(services: Running) -> int:
    """Of rank 1, as the target tells when the group is ready."""
    return int(re.findall(r"2 ranks are ready after .* \(processes (\d+)\)", log_of(services))[-1])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
async def test_an_answer_outlives_a_rank(
    services: Running, client: Client, number: signal.Signals, temperature: float
) -> None:
    expected = list((await client.generate(asking(temperature=temperature))).token_ids)
    assert len(expected) == TOKENS
    lost = rank_pid(services)
    ids: list[int] = []
    struck = 0.0
    longest = last = 0.0
    async for event in client.stream(asking(temperature=temperature)):
        if not event.HasField("chunk"):
            continue
        ids.extend(event.chunk.token_ids)
        now = time.monotonic()
        if struck:
            longest = max(longest, now - last)
        elif len(ids) >= STRIKE:
            os.kill(lost, number)
            struck = time.monotonic()
        last = now
    assert struck
    assert ids == expected
    assert longest < BACK_S
    assert rank_pid(services) != lost
    assert "the tensor-parallel group is back" in log_of(services)
    again = list((await client.generate(asking(temperature=temperature))).token_ids)
    assert again == expected


async def test_a_rank_lost_between_answers_costs_a_pause_only(services: Running, client: Client) -> None:
    expected = list((await client.generate(asking(temperature=0.0))).token_ids)
    os.kill(rank_pid(services), signal.SIGKILL)
    began = time.monotonic()
    assert list((await client.generate(asking(temperature=0.0))).token_ids) == expected
    assert time.monotonic() - began < BACK_S + 5
