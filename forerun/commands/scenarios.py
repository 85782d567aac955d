"""`forerun bench --scenarios`: the same answers alone, in a batch, after preemption and after the loss of a worker.

The reference is plain decoding, one answer at a time. Every other answer must have its token ids and, at every
position, its logits; and every scenario must have brought about what it is named after.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace

from forerun.commands import report
from forerun.commands.exact import FAILOVER, PREEMPT, Result, compare, judge
from forerun.commands.exact import figures as figures_of
from forerun.commands.loss import Loss
from forerun.commands.measure import PLAIN, Prompt, Sample
from forerun.commands.own import Opened, Services
from forerun.commands.runs import Asked, Decoding, ServiceRun, Told
from forerun.core.errors import ForerunError, InvalidRequest
from forerun.up import Service
from forerun.v1 import generation_pb2

BATCH = 8
"""Streams of the scenarios with company, unless said."""

STAGGER_S = 0.15
ROOM = 2.5
"""KV of the preempt scenario, in sequences as long as the longest."""

PROBE = 256 << 20
"""Bytes of KV with which a target is asked first how many tokens they hold."""

PROBES = 4
"""A target takes no more than it could ever use, so the first answers may overstate a token's bytes."""

CLOSE = 1.25
LEAST_SPARE = 256
"""Tokens beyond the longest sequence that fit in any case: two pages, however the target rounds."""

MOST_STREAMS = 32


class Incomparable(ForerunError):
    """The services of one scenario compute other bits than those of the reference, and say so."""


@dataclass(frozen=True, slots=True)
class ScenarioPlan:
    """What is asked, and in which company."""

    names: Sequence[str]  # of exact.SCENARIOS
    asked: Asked
    decoding: Decoding
    streams: int = BATCH
    preempt_kv: int | None = None  # bytes; None: room for ROOM sequences
    fail_every: int = 1  # block of answers in which a target is killed
    fail_rounds: int = 1  # in which answers that were not continued are asked again
    stagger_s: float = STAGGER_S

    @property
    def prompts(self) -> Sequence[Prompt]:
        return self.asked.prompts

    @property
    def sources(self) -> Mapping[str, Sequence[str]]:
        return self.asked.sources


@dataclass(slots=True)
class Scenarios:
    """Runs the plan. `results` grow as it goes."""

    plan: ScenarioPlan
    services: Services
    told: Told = lambda name: None
    info: generation_pb2.GetModelInfoResponse = field(default_factory=generation_pb2.GetModelInfoResponse)
    reference: list[Sample] = field(default_factory=list)
    results: list[Result] = field(default_factory=list)

    @property
    def answer_count(self) -> int:
        """Of all scenarios and the reference."""
        runs = 1 + len(self.plan.sources)
        each = {"alone": runs - 1}
        return len(self.plan.prompts) * (1 + sum(each.get(name, runs) for name in self.plan.names))

    async def run(self) -> None:
        """Raises what made a scenario impossible; differences are results."""
        plan = self.plan
        async with self.services.open() as opened:
            self.info = opened.info
            self.reference = await self._answers(self._run(opened, PLAIN), plan.prompts, 1)
            if "alone" in plan.names:
                for name in plan.sources:
                    self._judge("alone", name, await self._answers(self._run(opened, name), plan.prompts, 1))
        if "batch" in plan.names:
            async with self.services.open() as opened:  # others: here prompts are read beside answers, not found in KV
                for name in (PLAIN, *plan.sources):
                    run = replace(self._run(opened, name), stagger_s=plan.stagger_s)
                    self._judge("batch", name, await self._answers(run, self._shuffled(), plan.streams))
        if PREEMPT in plan.names:
            await self._preempt()
        if FAILOVER in plan.names:
            await self._failover()

    async def _preempt(self) -> None:
        """So little KV, and so many answers at once, that they take it from one another."""
        kv_memory = self.plan.preempt_kv or await self._scarce_kv()
        async with self.services.open(kv_memory=kv_memory, max_sequences=MOST_STREAMS) as opened:
            streams = self._crowd(opened.info.kv_tokens)
            for name in (PLAIN, *self.plan.sources):
                samples = await self._answers(self._run(opened, name), self._shuffled(), streams)
                self._judge(PREEMPT, name, samples)

    async def _failover(self) -> None:
        """Two targets, one of them killed in mid-answer; what the other did not have to continue is asked again."""
        async with self.services.open(targets=2) as opened:
            turns = itertools.cycle(opened.ours.targets)
            for name in (PLAIN, *self.plan.sources):
                kept: dict[int, Sample] = {}  # by place in the plan
                left = list(range(len(self.plan.prompts)))
                for _ in range(self.plan.fail_rounds):
                    for number, start in enumerate(range(0, len(left), self.plan.streams)):
                        block = left[start : start + self.plan.streams]
                        victim = None if number % self.plan.fail_every else next(turns)
                        kept |= await self._broken_off(opened, self._run(opened, name), block, victim)
                    left = [
                        index for index in left if kept[index].targets < 2 and not self._differs(index, kept[index])
                    ]
                self._judge(FAILOVER, name, [kept[index] for index in sorted(kept)])

    async def _broken_off(
        self, opened: Opened, run: ServiceRun, block: Sequence[int], victim: Service | None
    ) -> dict[int, Sample]:
        """Answers to these prompts; the victim is killed when a third of their tokens are there."""
        prompts = [self.plan.prompts[index] for index in block]
        if victim is None:
            return dict(zip(block, await self._answers(run, prompts, len(block)), strict=True))
        expected = sum(len(self.reference[index].token_ids) for index in block)
        async with Loss(victim, max(1, expected // 3)) as loss:
            samples = await self._answers(replace(run, on_tokens=loss.count), prompts, len(block))
        await opened.ours.ready()
        return dict(zip(block, samples, strict=True))

    def _differs(self, index: int, sample: Sample) -> bool:
        return compare(self.reference[index], sample) is not None

    # --- what they share -----------------------------------------------------------------------

    def _run(self, opened: Opened, name: str) -> ServiceRun:
        if opened.info.numerics_id != self.info.numerics_id:
            raise Incomparable(
                f"these services compute other bits than the reference's: {opened.info.numerics_id!r}, "
                f"not {self.info.numerics_id!r}"
            )
        speculation = name in self.plan.sources
        sources = self.plan.sources.get(name, ())
        decoding, template = self.plan.decoding, opened.info.chat_template
        return ServiceRun(name, opened.client, decoding, template, speculation, sources, digests=True)

    async def _answers(self, run: ServiceRun, prompts: Sequence[Prompt], streams: int) -> list[Sample]:
        """In the order of the file."""
        samples = await run.answers(prompts, streams, self.plan.decoding.max_tokens, self.told)
        return sorted(samples, key=lambda sample: sample.prompt.index)

    def _judge(self, scenario: str, run: str, samples: Sequence[Sample]) -> None:
        speculative = run in self.plan.sources
        self.results.append(judge(scenario, run, self.reference, samples, speculative=speculative))

    def _shuffled(self) -> list[Prompt]:
        prompts = list(self.plan.prompts)
        random.Random(self.plan.decoding.seed).shuffle(prompts)
        return prompts

    def _lengths(self) -> list[int]:
        """Tokens of each answer with its prompt."""
        return [sample.prompt_tokens + len(sample.token_ids) for sample in self.reference]

    async def _scarce_kv(self) -> int:
        """Bytes for ROOM sequences as long as the longest, by what targets say that some bytes hold."""
        longest = max(self._lengths())
        wanted = max(ROOM * longest, longest + LEAST_SPARE)
        budget = PROBE
        for _ in range(PROBES):
            async with self.services.open(kv_memory=budget, draft=("none",)) as opened:
                tokens = opened.info.kv_tokens
            if not tokens:
                raise InvalidRequest("this target does not state how many tokens its KV holds; name --preempt-kv")
            if tokens <= CLOSE * wanted:
                break
            budget = math.ceil(budget * wanted / tokens)
        return budget

    def _crowd(self, kv_tokens: int) -> int:
        """Streams whose sequences, of average length, are twice what KV holds."""
        lengths = self._lengths()
        wanted = math.ceil(2 * kv_tokens * len(lengths) / sum(lengths))
        return min(max(self.plan.streams, wanted), MOST_STREAMS)


async def run_scenarios(services: Services, plan: ScenarioPlan) -> report.Measured:
    if services.addr is not None and {PREEMPT, FAILOVER} & set(plan.names):
        raise InvalidRequest(f"scenarios {PREEMPT} and {FAILOVER} start services of their own; leave --addr out")
    quiet = replace(services, options=replace(services.options, quiet=True))  # the bar says what is going on
    scenarios = Scenarios(plan, quiet)
    with report.progress("reference", scenarios.answer_count) as told:
        scenarios.told = told
        await scenarios.run()
    results = scenarios.results
    report.show(report.scenario_table(results))
    checked, identical = (sum(getattr(result.exact, name) for result in results) for name in ("checked", "identical"))
    print(f"exact: {identical} of {checked} answers are identical to those of plain decoding alone, ids and logits")
    for result in results:
        report.tell_exactness(result.exact, f"{result.scenario}, ")
        report.tell_problems(f"{result.scenario}, run {result.run}", result.problems)
    settings = {**plan.asked.as_json(), **asdict(plan.decoding), "streams": plan.streams}
    settings |= {"scenarios": list(plan.names), "fail_every": plan.fail_every, **report.served(scenarios.info)}
    figures = {
        "reference": figures_of(scenarios.reference),
        "scenarios": [result.as_json() for result in results],
        "exact": {"checked": checked, "identical": identical},
    }
    return report.Measured(settings, figures, all(result.passed for result in results))
