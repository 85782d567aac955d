"""What `forerun bench` does unless told otherwise: plain, speculative and compared runs side by side, for speed."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from forerun.client import Client
from forerun.commands import measure, report
from forerun.commands.exact import Exactness, exactness
from forerun.commands.own import Services
from forerun.commands.reference import LOOKUP_TOKENS, Aid, BatchedReferenceRun, Reference, ReferenceRun
from forerun.commands.runs import Asked, Decoding, Run, ServiceRun, interleave, warm_up
from forerun.v1 import generation_pb2

SINGLE = "plain-single"


@dataclass(frozen=True, slots=True)
class Comparison:
    """How the usual library runs. `model`: folder or hub id; None: what the service serves."""

    model: str | None
    dtype: str
    threads: int
    draft: str | None = None  # folder of the draft that guesses for the service: then it guesses for the library too
    assisted_alone: bool = False

    @property
    def aids(self) -> list[Aid]:
        """One stream at a time."""
        if self.assisted_alone:
            return [Aid.DRAFT]
        return [aid for aid in Aid if self.draft is not None or aid is not Aid.DRAFT]


@dataclass(frozen=True, slots=True)
class Plan:
    """One benchmark, its options parsed."""

    asked: Asked
    decoding: Decoding
    streams: int
    single: bool  # also plain with one stream
    check_exact: bool
    compare: Comparison | None


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the services said of themselves, and what each run did."""

    info: generation_pb2.GetModelInfoResponse
    records: dict[str, measure.Record]
    plan: Plan

    def summaries(self) -> list[dict[str, Any]]:
        return [measure.summarise(record, self.records[measure.PLAIN]) for record in self.records.values()]

    def exactness(self) -> Exactness:
        """Of the runs of this service; ids and digests."""
        names = [name for name in (SINGLE, *self.plan.asked.sources) if name in self.records]
        plain = self.records[measure.PLAIN].samples
        return exactness(plain, {name: self.records[name].samples for name in names})


async def run(services: Services, plan: Plan) -> report.Measured:
    async with services.open() as opened:
        outcome = await execute(opened.client, opened.info, plan)
    report.show(report.table(outcome.summaries()))
    compare = None
    if plan.compare is not None:
        compare = {**asdict(plan.compare), "prompt_lookup_num_tokens": LOOKUP_TOKENS}
        compare["model"] = plan.compare.model or outcome.info.model
    settings = {**plan.asked.as_json(), **asdict(plan.decoding), "streams": plan.streams}
    settings |= {**report.served(outcome.info), "compare": compare}
    plain = outcome.records[measure.PLAIN].samples
    answers = [{"question_id": s.prompt.question_id, "token_ids": s.token_ids} for s in plain]
    figures: dict[str, Any] = {"runs": outcome.summaries(), "answers": answers}
    if not plan.check_exact:
        return report.Measured(settings, figures)
    exact = outcome.exactness()
    print(f"exact: {exact.identical} of {exact.checked} answers are identical to plain's, ids and logits")
    report.tell_exactness(exact)
    idle = not any(sample.drafted for name in plan.asked.sources for sample in outcome.records[name].samples)
    if idle:
        print("forerun: no drafted token was checked: plain decoding was compared with itself", file=sys.stderr)
    return report.Measured(settings, {**figures, "exact": exact.as_json()}, passed=not exact.differences and not idle)


async def execute(client: Client, info: generation_pb2.GetModelInfoResponse, plan: Plan) -> Outcome:
    """Answer all prompts in all runs, with a progress bar on stderr."""
    template, digests = info.chat_template, plan.check_exact

    def service(name: str, sources: Sequence[str] | None, streams_most: int | None = None) -> ServiceRun:
        speculation = sources is not None
        return ServiceRun(name, client, plan.decoding, template, speculation, sources or (), digests, streams_most)

    runs: list[Run] = [service(measure.PLAIN, None)]
    runs += [service(SINGLE, None, streams_most=1)] if plan.single else []
    runs += [service(name, sources) for name, sources in plan.asked.sources.items()]
    reference = Reference(plan.decoding)
    try:
        if (compare := plan.compare) is not None:
            model = compare.model or info.model
            await reference.load(model, compare.dtype, compare.threads, info.eos_token_ids, compare.draft)
            runs += _compared(reference, plan.streams, compare.aids)
        with report.progress("warm-up", len(runs) * len(plan.asked.prompts)) as told:
            await warm_up(runs, plan.decoding.max_tokens)
            records = await interleave(runs, plan.asked.prompts, plan.streams, plan.decoding.max_tokens, told)
    finally:
        reference.close()
    return Outcome(info, records, plan)


def _compared(reference: Reference, streams: int, aids: Sequence[Aid]) -> list[Run]:
    """With one stream, one prompt at a time; with several, as many in a batch."""
    if streams > 1:
        return [BatchedReferenceRun("transformers-batched", reference)]
    return [ReferenceRun(reference, aid) for aid in aids]
