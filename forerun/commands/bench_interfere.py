"""`forerun bench --interfere`: what streams that decode feel of a long prompt that arrives among them.

A gap is the time between two chunks of one stream, whatever their sizes. Times are the client's.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from forerun.client import Client, build_request
from forerun.commands import failure, report
from forerun.commands.answer import receive
from forerun.commands.bench_prefix import random_ids
from forerun.commands.own import Services
from forerun.core.errors import ForerunError, InvalidRequest
from forerun.v1 import generation_pb2

SETTLE = 8
"""Chunks of every stream that are not counted: prefill and the first passes."""


class NotMeasured(ForerunError):
    """A stream ended before the long prompt was read."""


MOST_KNOWN = 128
"""Tokens of the long prompt that may be in KV by chance."""


@dataclass(frozen=True, slots=True)
class InterferePlan:
    streams: int = 4
    prompt_tokens: int = 4000
    before: int = 40  # chunks of every stream whose gaps are the quiet ones
    rounds: int = 3
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Interference:
    """One arrival. Seconds."""

    speculation: bool
    median_gap: float  # of all streams, before
    quiet_longest_gap: float  # of all streams, before: what the machine does by itself
    median_read_gap: float  # of all streams, from sending the long prompt to its first token
    longest_gap: float  # of any stream, in that time
    prefill: float  # time to first token of the long prompt

    @property
    def ratio(self) -> float:
        return self.longest_gap / self.median_gap

    def __str__(self) -> str:
        return (
            f"{'speculative' if self.speculation else 'plain'}: median gap {self.median_gap * 1000:.1f} ms before "
            f"(longest {self.quiet_longest_gap * 1000:.1f}), while the prompt was read ({self.prefill:.2f} s) median "
            f"{self.median_read_gap * 1000:.1f} ms, longest {self.longest_gap * 1000:.1f} ms, ratio {self.ratio:.2f}"
        )

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "ratio": self.ratio}


async def run(services: Services, plan: InterferePlan) -> report.Measured:
    """Plain, then speculative; the worst round of each is what counts."""
    found: list[Interference] = []
    async with services.open() as opened:
        for speculation in (False, True):
            arrivals = await measure_interference(opened.client, opened.info, plan, speculation=speculation)
            print(max(arrivals, key=lambda arrival: arrival.ratio), f"(worst of {plan.rounds})")
            found += arrivals
    settings = {**asdict(plan), **report.served(opened.info)}
    return report.Measured(settings, {"interference": [arrival.as_json() for arrival in found]})


async def measure_interference(
    client: Client, info: generation_pb2.GetModelInfoResponse, plan: InterferePlan, *, speculation: bool
) -> list[Interference]:
    """One per round, each with a long prompt of its own. Raises InvalidRequest, NotMeasured."""
    if plan.prompt_tokens >= info.context_limit:
        raise InvalidRequest(
            f"--prompt-tokens: a prompt of {plan.prompt_tokens} does not fit the context limit of {info.context_limit}"
        )
    rng = random.Random(f"{plan.seed} {speculation}")  # prompts of its own: known ones would not be read again
    return [await _arrival(client, info, plan, rng, speculation) for _ in range(plan.rounds)]


async def _arrival(
    client: Client,
    info: generation_pb2.GetModelInfoResponse,
    plan: InterferePlan,
    rng: random.Random,
    speculation: bool,
) -> Interference:
    prompts = [f"Tell a long story about the number {rng.randrange(10**6)}." for _ in range(plan.streams)]
    mode = None if speculation else False
    requests = [  # drawn: greedy stories soon repeat themselves, and then passes of all lookup finds are long alone
        build_request(text, temperature=1.0, seed=rng.randrange(2**32), ignore_eos=True, speculation=mode)
        for text in prompts
    ]
    long = build_request(
        token_ids=random_ids(rng, info, plan.prompt_tokens), temperature=0.0, max_tokens=1, speculation=False
    )
    with failure.explained(client):
        async with _streaming(client, requests) as streams:
            await streams.until(lambda: all(len(times) >= SETTLE + plan.before for times in streams.arrivals))
            settled = max(times[SETTLE - 1] for times in streams.arrivals)
            answer = await receive(client, long)
            sent, ttft = answer.timeline.sent, answer.timeline.ttft
            assert ttft is not None, "one token was asked for"
            if (known := answer.finished.usage.cached) > MOST_KNOWN:
                raise NotMeasured(f"{known} tokens of the long prompt were in KV already; give another --seed")
            read = sent + ttft
            await streams.until(lambda: all(times[-1] > read for times in streams.arrivals))
            arrivals = [tuple(times) for times in streams.arrivals]
    quiet = [gap for times in arrivals for gap in gaps_within(times, settled, sent)]
    busy = [gap for times in arrivals for gap in gaps_within(times, sent, read)]
    longest = max(longest_gap(times, sent, read) for times in arrivals)
    return Interference(
        speculation, statistics.median(quiet), max(quiet), statistics.median(busy or [longest]), longest, ttft
    )


def gaps_within(arrivals: Sequence[float], start: float, end: float) -> list[float]:
    """Gaps that begin and end in [start, end]."""
    return [later - earlier for earlier, later in pairwise(arrivals) if earlier >= start and later <= end]


def longest_gap(arrivals: Sequence[float], start: float, end: float) -> float:
    """The longest gap of which any part lies in (start, end)."""
    return max((later - earlier for earlier, later in pairwise(arrivals) if later > start and earlier < end), default=0)


class _Streams:
    """Arrival times of chunks, stream by stream."""

    def __init__(self, client: Client, requests: Sequence[generation_pb2.GenerateRequest]) -> None:
        self.arrivals: list[list[float]] = [[] for _ in requests]
        self._client = client
        self._changed = asyncio.Event()
        self.tasks = [asyncio.create_task(self._read(*entry)) for entry in zip(requests, self.arrivals, strict=True)]

    async def _read(self, request: generation_pb2.GenerateRequest, arrivals: list[float]) -> None:
        try:
            async with aclosing(self._client.stream(request)) as events:
                async for event in events:
                    if event.chunk.token_ids:
                        arrivals.append(time.perf_counter())
                        self._changed.set()
        finally:
            self._changed.set()

    async def until(self, reached: Callable[[], bool]) -> None:
        """Returns when it is. Raises what a stream raised, or NotMeasured if one ended."""
        while not reached():
            for task in self.tasks:
                if task.done():
                    task.result()
                    raise NotMeasured("a stream reached its end too early; its context limit is too short for this")
            self._changed.clear()
            await self._changed.wait()


@asynccontextmanager
async def _streaming(client: Client, requests: Sequence[generation_pb2.GenerateRequest]) -> AsyncIterator[_Streams]:
    streams = _Streams(client, requests)
    try:
        yield streams
    finally:
        for task in streams.tasks:
            task.cancel()
        await asyncio.gather(*streams.tasks, return_exceptions=True)
