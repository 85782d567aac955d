"""`forerun bench`: the same prompts with and without speculation, side by side."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from forerun.client import Client
from forerun.commands import failure, measure, report
from forerun.commands.reference import LOOKUP_TOKENS, Reference, ReferenceRun
from forerun.commands.runs import Decoding, Run, ServiceRun, interleave, warm_up
from forerun.core.errors import InvalidRequest
from forerun.v1 import generation_pb2

PLAIN_WIDTH = 150
"""Columns of the table where there is no terminal to ask."""


class Compare(StrEnum):
    """What --compare takes."""

    TRANSFORMERS = "transformers"


class Dtype(StrEnum):
    """What --dtype takes."""

    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    FLOAT32 = "float32"


@dataclass(frozen=True, slots=True)
class Plan:
    """One benchmark, its options parsed."""

    prompts: Sequence[measure.Prompt]
    sources: dict[str, list[str]]  # by run
    streams: int
    decoding: Decoding
    check_exact: bool
    compare: bool
    model: str | None  # for the comparison; None: what the service serves
    dtype: str
    threads: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the services said of themselves, and what each run did."""

    info: generation_pb2.GetModelInfoResponse
    records: dict[str, measure.Record]
    plan: Plan

    def summaries(self) -> list[dict[str, Any]]:
        return [measure.summarise(record, self.records[measure.PLAIN]) for record in self.records.values()]

    def exactness(self) -> measure.Exactness:
        return measure.exactness(self.records[measure.PLAIN], [self.records[name] for name in self.plan.sources])


def bench(
    prompts: Annotated[
        Path,
        typer.Option(
            help="JSON lines: `turns` (the first is the user's message, through the chat template) or `prompt` (raw"
            " text); `question_id` and `category` if known.",
            show_default=False,
        ),
    ],
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first prompts.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of an answer.")] = 128,
    temperature: Annotated[float, typer.Option(min=0, help="0 is greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(min=0, help="The seed of every request.")] = 0,
    streams: Annotated[int, typer.Option(min=1, help="Requests in flight, closed loop.")] = 1,
    sources: Annotated[
        list[str] | None,
        typer.Option(help="Hint sources as a,b. Repeated, or separated by ;, they are a run each. Default: all."),
    ] = None,
    compare: Annotated[
        Compare | None, typer.Option(help="Also the usual library in this process, plain and with prompt lookup.")
    ] = None,
    check_exact: Annotated[
        bool, typer.Option("--check-exact", help="Exit status 1 if an answer differs from plain's.")
    ] = False,
    json_out: Annotated[Path | None, typer.Option("--json", help="Write all figures to this file.")] = None,
    addr: Annotated[str | None, typer.Option(help="A running coordinator. Default: start services of our own.")] = None,
    target: Annotated[str, typer.Option(help="The model of our own services.")] = "demo",
    draft: Annotated[str, typer.Option(help="The hint sources of our own services.")] = "early_exit,ngram",
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Every answer has --max-tokens tokens.")] = False,
    model: Annotated[
        str | None, typer.Option(help="Folder or hub id for --compare. Default: the one that is served.")
    ] = None,
    dtype: Annotated[Dtype, typer.Option(help="For --compare.")] = Dtype.BFLOAT16,
    threads: Annotated[int | None, typer.Option(min=1, help="For --compare. Default: all cores.")] = None,
) -> None:
    """Answer the prompts plainly, speculatively and as compared, by turns, and print a table.

    The runs take turns prompt by prompt (with several streams: by blocks of 4 prompts a stream), and who is
    first rotates, so that noise hits all alike; the run whose turn it is has the machine to itself. TTFT and ITL are
    the client's: TTFT from sending to the first token; a chunk of m tokens that came dt after the one before
    counts m tokens at dt/m each. tokens/s is all tokens over the time of a run's turns, prefill included.
    transformers answers one prompt at a time, whatever --streams. A short answer of each run warms it up.
    """

    async def main() -> bool:
        plan = Plan(
            prompts=_read(prompts)[:limit],
            sources=measure.parse_sources(sources or []),
            streams=streams,
            decoding=Decoding(max_tokens, temperature, seed, ignore_eos),
            check_exact=check_exact,
            compare=compare is not None,
            model=model,
            dtype=dtype.value,
            threads=threads or len(os.sched_getaffinity(0)),
        )
        if json_out is not None and not json_out.absolute().parent.is_dir():
            raise InvalidRequest(f"--json {json_out}: there is no folder {json_out.absolute().parent}")
        async with _services(addr, target, draft) as address, Client(address) as client:
            outcome = await execute(client, plan)
        width = None if sys.stdout.isatty() else PLAIN_WIDTH
        Console(width=width).print(report.table(outcome.summaries()))
        if json_out is not None:
            json_out.write_text(json.dumps(as_json(outcome, prompts, addr), indent=2) + "\n")
        return not check_exact or _tell_exactness(outcome.exactness())

    if not failure.run(main()):
        raise typer.Exit(failure.FAILED)


async def execute(client: Client, plan: Plan) -> Outcome:
    """Answer all prompts in all runs, with a progress bar on stderr."""
    with failure.explained(client):
        info = await client.model_info()

    def service(name: str, speculation: bool, sources: Sequence[str]) -> ServiceRun:
        return ServiceRun(name, client, plan.decoding, info.chat_template, speculation, sources)

    runs: list[Run] = [service(measure.PLAIN, False, ())]
    runs += [service(name, True, sources) for name, sources in plan.sources.items()]
    reference = Reference(plan.decoding)
    try:
        if plan.compare:
            model = plan.model or info.model
            await reference.load(model, plan.dtype, plan.threads, info.eos_token_ids)
            runs.append(ReferenceRun("transformers", reference, lookup=False))
            runs.append(ReferenceRun("transformers-prompt-lookup", reference, lookup=True))
        with _progress() as progress:
            task = progress.add_task("warm-up", total=len(runs) * len(plan.prompts))
            await warm_up(runs, plan.decoding.max_tokens)
            records = await interleave(
                runs,
                plan.prompts,
                plan.streams,
                plan.decoding.max_tokens,
                lambda name: progress.update(task, advance=1, description=name),
            )
    finally:
        reference.close()
    return Outcome(info, records, plan)


def as_json(outcome: Outcome, prompts: Path, addr: str | None) -> dict[str, Any]:
    """{machine, settings, runs, exact}; `exact` only if it was checked."""
    plan, info = outcome.plan, outcome.info
    settings = {
        "prompts": str(prompts),
        "prompt_count": len(plan.prompts),
        **asdict(plan.decoding),
        "streams": plan.streams,
        "sources": plan.sources,
        "addr": addr,
        "model": info.model,
        "model_revision": info.model_revision,
        "numerics_id": info.numerics_id,
        "lookahead": info.lookahead,
        "served_sources": list(info.sources),
        "compare": None,
    }
    if plan.compare:
        settings["compare"] = {
            "model": plan.model or info.model,
            "dtype": plan.dtype,
            "threads": plan.threads,
            "prompt_lookup_num_tokens": LOOKUP_TOKENS,
        }
    result = {"machine": report.machine(), "settings": settings, "runs": outcome.summaries()}
    if plan.check_exact:
        result["exact"] = outcome.exactness().as_json()
    return result


def _read(path: Path) -> list[measure.Prompt]:
    try:
        return measure.parse_prompts(path.read_text(encoding="utf-8").split("\n"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"--prompts {path}: {error}") from error


def _tell_exactness(exact: measure.Exactness) -> bool:
    print(f"exact: {exact.identical} of {exact.checked} answers are identical to plain's")
    for name, questions in exact.differing.items():
        print(f"forerun: run {name} differs from plain in question {', '.join(map(str, questions))}", file=sys.stderr)
    return not exact.differing


@asynccontextmanager
async def _services(addr: str | None, target: str, draft: str) -> AsyncIterator[str]:
    if addr is not None:
        yield addr
        return
    from forerun.up import running

    async with running(target=target, draft=draft) as started:
        yield started


def _progress() -> Progress:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=Console(stderr=True))
