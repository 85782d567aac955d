"""The settings under comparison, each as a Run, and the loop that gives all of them the same noise."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from forerun.client import Client
from forerun.commands import failure
from forerun.commands.answer import receive
from forerun.commands.generate import prompt_request
from forerun.commands.measure import Prompt, Record, Sample, blocks, rotated
from forerun.core.errors import ForerunError

WARM_UP = Prompt("warm-up", "", "Say hello.", chat=True)
WARM_UP_TOKENS = 8

Told = Callable[[str], None]
"""Called with a run's name for each of its answers."""


@dataclass(frozen=True, slots=True)
class Decoding:
    """What all runs have in common."""

    max_tokens: int
    temperature: float
    seed: int
    ignore_eos: bool

    def seed_of(self, prompt: Prompt) -> int:
        """Each prompt has its own, whatever the order and the slice of the file. 64 bits."""
        return (self.seed + prompt.index) % (1 << 64)


@dataclass(frozen=True, slots=True)
class Asked:
    """The prompts, and the runs that use hints."""

    file: str
    skip: int  # of the file's prompts, those before these
    every: int  # one of so many of the others
    prompts: Sequence[Prompt]
    sources: Mapping[str, Sequence[str]]  # by run; none named: all attached

    def as_json(self) -> dict[str, Any]:
        which = {"prompts": self.file, "skip": self.skip, "every": self.every, "prompt_count": len(self.prompts)}
        return {**which, "sources": self.sources}


class Run(Protocol):
    """One setting: answers prompts, up to `streams` of them at a time, and returns them in their order."""

    @property
    def name(self) -> str: ...

    async def answers(self, prompts: Sequence[Prompt], streams: int, max_tokens: int, told: Told) -> list[Sample]: ...


@dataclass(frozen=True, slots=True)
class ServiceRun:
    """The service, with speculation from some sources (none named: all attached) or without."""

    name: str
    client: Client
    decoding: Decoding
    chat_template: bool
    speculation: bool
    sources: Sequence[str] = ()
    digests: bool = False  # ask for them
    streams_most: int | None = None
    stagger_s: float = 0.0  # each stream starts so much later than the one before
    on_tokens: Callable[[int], None] = lambda tokens: None

    async def answer(self, prompt: Prompt, max_tokens: int) -> Sample:
        knobs: dict[str, Any] = {"sources": self.sources} if self.speculation else {"speculation": False}
        request = prompt_request(
            prompt.text,
            chat=prompt.chat and self.chat_template,
            max_tokens=max_tokens,
            temperature=self.decoding.temperature,
            seed=self.decoding.seed_of(prompt),
            ignore_eos=self.decoding.ignore_eos or None,
            logits_digest=self.digests or None,
            **knobs,
        )
        with failure.explained(self.client):
            return (await receive(self.client, request, on_tokens=self.on_tokens)).as_sample(prompt)

    async def answers(self, prompts: Sequence[Prompt], streams: int, max_tokens: int, told: Told) -> list[Sample]:
        most = min(streams, self.streams_most or streams)

        async def one(prompt: Prompt) -> Sample:
            sample = await named(self.name, prompt, self.answer(prompt, max_tokens))
            told(self.name)
            return sample

        return await closed_loop(one, prompts, most, self.stagger_s)


async def warm_up(runs: Sequence[Run], max_tokens: int) -> None:
    """A short answer of each run, not counted: the first one pays for caches and estimates."""
    for run in runs:
        await run.answers([WARM_UP], 1, min(max_tokens, WARM_UP_TOKENS), lambda name: None)


async def interleave(
    runs: Sequence[Run],
    prompts: Sequence[Prompt],
    streams: int,
    max_tokens: int,
    told: Told = lambda name: None,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Record]:
    """Every run answers every prompt, by turns, and is alone while it does.

    With one stream the turns change after each prompt, with several after each block of prompts; who is
    first rotates, so that drift, caches and noise hit all runs alike.
    """
    records = {run.name: Record(run.name) for run in runs}
    for turn, block in enumerate(blocks(prompts, streams)):
        for run in rotated(runs, turn):
            began = clock()
            samples = await run.answers(block, streams, max_tokens, told)
            records[run.name].seconds += clock() - began
            records[run.name].samples += samples
    return records


async def closed_loop(
    answer: Callable[[Prompt], Awaitable[Sample]],
    prompts: Sequence[Prompt],
    streams: int,
    stagger_s: float = 0.0,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> list[Sample]:
    """Each stream asks its next prompt once it has its answer. Stream k starts `k * stagger_s` after the first."""
    waiting = iter(enumerate(prompts))
    samples: dict[int, Sample] = {}

    async def stream(number: int) -> None:
        if number and stagger_s:
            await sleep(number * stagger_s)
        for index, prompt in waiting:
            samples[index] = await answer(prompt)

    try:
        async with asyncio.TaskGroup() as group:
            for number in range(min(streams, len(prompts))):
                group.create_task(stream(number))
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [samples[index] for index in range(len(prompts))]


async def named(run: str, prompt: Prompt, answer: Awaitable[Sample]) -> Sample:
    """The answer; its failure names question and run."""
    try:
        return await answer
    except ForerunError as error:
        raise type(error)(f"question {prompt.question_id}, run {run}: {error}") from error
