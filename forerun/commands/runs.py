"""The settings under comparison, each as a Run, and the loop that gives all of them the same noise."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
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


@dataclass(frozen=True, slots=True)
class Decoding:
    """What all runs have in common."""

    max_tokens: int
    temperature: float
    seed: int
    ignore_eos: bool


class Run(Protocol):
    """One setting: answers prompts, `streams_most` of them at a time (None: as many as there are)."""

    @property
    def name(self) -> str: ...

    @property
    def streams_most(self) -> int | None: ...

    async def answer(self, prompt: Prompt, max_tokens: int) -> Sample: ...


@dataclass(frozen=True, slots=True)
class ServiceRun:
    """The service, with speculation from some sources (none named: all attached) or without."""

    name: str
    client: Client
    decoding: Decoding
    chat_template: bool
    speculation: bool
    sources: Sequence[str] = ()
    streams_most: None = None

    async def answer(self, prompt: Prompt, max_tokens: int) -> Sample:
        knobs: dict[str, Any] = {"sources": self.sources} if self.speculation else {"speculation": False}
        request = prompt_request(
            prompt.text,
            chat=prompt.chat and self.chat_template,
            max_tokens=max_tokens,
            temperature=self.decoding.temperature,
            seed=self.decoding.seed,
            ignore_eos=self.decoding.ignore_eos or None,
            **knobs,
        )
        with failure.explained(self.client):
            return (await receive(self.client, request)).as_sample(prompt)


async def warm_up(runs: Sequence[Run], max_tokens: int) -> None:
    """A short answer of each run, not counted: the first one pays for caches and estimates."""
    for run in runs:
        await _answer(run, WARM_UP, min(max_tokens, WARM_UP_TOKENS))


async def interleave(
    runs: Sequence[Run],
    prompts: Sequence[Prompt],
    streams: int,
    max_tokens: int,
    on_answer: Callable[[str], None] = lambda name: None,
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
            samples = await _closed_loop(run, block, streams, max_tokens, on_answer)
            records[run.name].seconds += clock() - began
            records[run.name].samples += samples
    return records


async def _closed_loop(
    run: Run, prompts: Sequence[Prompt], streams: int, max_tokens: int, on_answer: Callable[[str], None]
) -> list[Sample]:
    """Each stream asks its next prompt once it has its answer."""
    waiting = iter(enumerate(prompts))
    samples: dict[int, Sample] = {}

    async def stream() -> None:
        for index, prompt in waiting:
            samples[index] = await _answer(run, prompt, max_tokens)
            on_answer(run.name)

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(streams, run.streams_most or streams, len(prompts))):
                group.create_task(stream())
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [samples[index] for index in range(len(prompts))]


async def _answer(run: Run, prompt: Prompt, max_tokens: int) -> Sample:
    try:
        return await run.answer(prompt, max_tokens)
    except ForerunError as error:
        raise type(error)(f"question {prompt.question_id}, run {run.name}: {error}") from error
