"""`forerun bench --scenarios` against a service without models: what it asks, and that each check can fail."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

from forerun import up
from forerun.commands import runs, scenarios
from forerun.commands.bench import bench
from forerun.commands.loss import Loss
from forerun.commands.measure import Prompt, Sample, Timeline
from forerun.commands.runs import Asked, Decoding, closed_loop
from forerun.v1 import generation_pb2 as pb
from tests.rpc.fake_generation import FakeGeneration, prompt_of, serving

app = typer.Typer()
app.command()(bench)

PROMPTS = 5
TOKENS = 9
PER_TOKEN = 1000
"""Bytes of the fake's KV."""

MOST_KV = 30_000
"""Tokens beyond which the fake takes no memory."""


@pytest.fixture
def fake() -> FakeGeneration:
    return FakeGeneration()


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"question_id": 80 + n, "turns": [f"p{n}"]}) + "\n" for n in range(PROMPTS)))
    return str(path)


class FakeTarget(up.Service):
    """Not a process: its end makes the fake's answers those of two workers."""

    def __init__(self, name: str, fake: FakeGeneration, log: list[str]) -> None:
        super().__init__(name, [], Path())
        self.fake, self.life = fake, log

    async def kill(self) -> None:
        self.life.append(f"kill {self.name}")
        if self.fake.waits_at is not None:
            self.fake.usage["targets"] = 2
        self.fake.go_on.set()

    async def start(self) -> None:
        self.life.append(f"start {self.name}")


class FakeRunning(up.Running):
    async def ready(self) -> None:
        for target in self.targets:
            assert isinstance(target, FakeTarget)
            target.fake.go_on.clear()
            target.fake.usage.pop("targets", None)


@pytest.fixture
def opened(fake: FakeGeneration, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[up.UpOptions]]:
    """Options with which services were started; what happens in each is `happens`."""
    asked: list[up.UpOptions] = []
    with serving(fake) as address:

        @asynccontextmanager
        async def started(options: up.UpOptions) -> AsyncIterator[up.Running]:
            asked.append(options)
            names = [f"target-{number}" for number in range(1, options.targets + 1)]
            fake.usage.clear()
            fake.waits_at = 6 if options.targets > 1 else None
            if options.kv_memory is not None:
                fake.usage["preempted"] = int(fake.preempts)
                fake.info.setdefault("kv_tokens", 1)
                if fake.info["kv_tokens"]:
                    fake.info["kv_tokens"] = min(MOST_KV, options.kv_memory // PER_TOKEN)
            yield FakeRunning(address, [FakeTarget(name, fake, life) for name in names], Path())

        monkeypatch.setattr(up, "started", started)
        life.clear()
        yield asked


life: list[str] = []
"""Kills and starts of targets, in order."""


def run(prompts: str, names: str, *more: str) -> Result:
    options = ("--prompts", prompts, "--scenarios", names, "--max-tokens", str(TOKENS), "--streams", "2")
    return CliRunner().invoke(app, [*options, *more])


def test_all_scenarios_pass_and_are_reported(
    fake: FakeGeneration, opened: list[up.UpOptions], prompts: str, tmp_path: Path
) -> None:
    out = tmp_path / "out.json"
    result = run(prompts, "alone,batch,preempt,failover", "--json", str(out), "--temperature", "1", "--seed", "3")
    assert result.exit_code == 0, result.stderr
    assert "exact: 35 of 35 answers are identical to those of plain decoding alone" in result.stdout
    found = json.loads(out.read_text())
    rows = [(row["scenario"], row["run"], row["identical"], row["checked"]) for row in found["scenarios"]]
    both = ("plain", "speculative")
    assert rows == [
        ("alone", "speculative", 5, 5),
        *((scenario, name, 5, 5) for scenario in ("batch", "preempt", "failover") for name in both),
    ]
    by_row = {(row["scenario"], row["run"]): row for row in found["scenarios"]}
    assert by_row["alone", "speculative"]["windows"] == {"4": 15}
    assert by_row["alone", "speculative"]["tokens_per_pass"] == 3.0
    assert by_row["batch", "plain"]["windows"] == {"0": 45}
    assert by_row["preempt", "plain"]["preempted"] == {"times": 5, "answers": 5}
    assert by_row["failover", "speculative"]["continued"] == 5
    assert found["settings"]["scenarios"] == ["alone", "batch", "preempt", "failover"]
    assert found["exact"] == {"checked": 35, "identical": 35}
    assert all(request.output.logits_digest for request in fake.requests)
    seeds = {(prompt_of(request), request.sampling.seed) for request in fake.requests}
    assert seeds == {(f"p{number}", 3 + number) for number in range(PROMPTS)}, "the same in all runs"


def test_services_are_ours_and_made_for_the_scenario(opened: list[up.UpOptions], prompts: str) -> None:
    assert run(prompts, "preempt,failover").exit_code == 0
    plain, *probes, scarce, pair = opened
    assert (plain.kv_memory, plain.targets) == (None, 1)
    assert [probe.draft for probe in probes] == [("none",)] * len(probes)
    assert probes[0].kv_memory == scenarios.PROBE, "of which the target takes only what it can use"
    assert scarce.kv_memory == probes[-1].kv_memory
    assert scarce.kv_memory is not None
    longest = 3 + TOKENS  # the fake's prompts have 3 tokens
    assert scarce.kv_memory // PER_TOKEN == pytest.approx(longest + scenarios.LEAST_SPARE, rel=scenarios.CLOSE - 1)
    assert scarce.max_sequences == scenarios.MOST_STREAMS
    assert (pair.targets, pair.kv_memory) == (2, None)
    opened.clear()
    assert run(prompts, "preempt", "--preempt-kv", "7MiB").exit_code == 0
    assert [options.kv_memory for options in opened] == [None, 7 << 20]


@pytest.mark.parametrize(("kv_tokens", "streams"), [(100, 20), (0, 8), (10_000, scenarios.MOST_STREAMS)])
def test_so_many_streams_that_kv_is_short(kv_tokens: int, streams: int) -> None:
    made: Any = scenarios.Scenarios(
        scenarios.ScenarioPlan((), Asked("", 0, 1, (), {}), Decoding(8, 0.0, 0, False)), None
    )  # type: ignore[arg-type]
    timeline = Timeline(0, (), 0)
    made.reference = [Sample(Prompt(n, "", "", True), (1, 2), timeline, 1, prompt_tokens=4 + 4 * n) for n in range(3)]
    assert made._crowd(kv_tokens) == streams, "sequences of 10 on average"


def test_targets_take_turns_at_being_killed_in_every_so_many_blocks(opened: list[up.UpOptions], prompts: str) -> None:
    assert run(prompts, "failover").exit_code == 0
    turns = [f"{deed} target-{number}" for number in (1, 2) for deed in ("kill", "start")]
    assert life == turns * 3, "3 blocks of 2 streams, plain and speculative"


def test_answers_that_nobody_had_to_continue_are_asked_again(
    fake: FakeGeneration, opened: list[up.UpOptions], prompts: str
) -> None:
    """Here the second of three blocks is never broken off; what differs is kept, whatever a later round says."""
    fake.patience_s = 0.3
    assert run(prompts, "failover", "--fail-every", "2", "--fail-rounds", "2").exit_code == 0
    asked = [prompt_of(request) for request in fake.requests][PROMPTS : 2 * PROMPTS + 2]
    assert sorted(asked) == ["p0", "p1", "p2", "p2", "p3", "p3", "p4"]
    assert sorted(asked[-2:]) == ["p2", "p3"]
    real, times = fake.digests_of, {"p2": 0}

    def wrong_once(request: pb.GenerateRequest, start: int, ids: Any) -> list[int]:
        if prompt_of(request) == "p2" and start == 0:
            times["p2"] += 1
        return [0] * len(ids) if times["p2"] == 2 and prompt_of(request) == "p2" else real(request, start, ids)

    fake.digests_of = wrong_once  # type: ignore[method-assign]
    result = run(prompts, "failover", "--fail-every", "2", "--fail-rounds", "2")
    assert result.exit_code == 1
    assert "failover, run plain differs from plain in question 82: only logits differ from position 0" in result.stderr


def test_a_batch_has_company_and_another_order(
    fake: FakeGeneration, opened: list[up.UpOptions], prompts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    staggers: list[float] = []

    async def loop(answer: Any, prompts: Any, streams: int, stagger_s: float) -> list[Sample]:
        staggers.append(stagger_s)
        return await closed_loop(answer, prompts, streams)

    monkeypatch.setattr(runs, "closed_loop", loop)
    assert run(prompts, "batch").exit_code == 0
    assert staggers == [0.0, 0.15, 0.15], "the reference, and both runs"
    asked = [prompt_of(request) for request in fake.requests]
    reference, batch = asked[:PROMPTS], asked[PROMPTS : 2 * PROMPTS]
    assert batch != reference
    assert sorted(batch) == sorted(reference)


async def test_streams_arrive_one_after_another() -> None:
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    async def answer(prompt: Prompt) -> Sample:
        await asyncio.sleep(0)
        return Sample(prompt, (), Timeline(0, (), 0), passes=0)

    prompts = [Prompt(number, "", "", True, number) for number in range(7)]
    samples = await closed_loop(answer, prompts, 3, 0.15, sleep)
    assert waits == pytest.approx([0.15, 0.30])
    assert [sample.prompt for sample in samples] == prompts


BROKEN: dict[str, tuple[str, dict[str, Any], str]] = {
    "logits alone": ("alone", {"logits_differ": {"p1": 4}}, "question 81: only logits differ from position 4"),
    "ids in a batch": ("batch", {"differs_on": {"p2"}}, "question 82: ids differ from position 8, logits differ"),
    "logits of a continuation": ("failover", {"logits_differ": {"p4": 7}}, "failover, run speculative differs"),
    "an answer that says so itself": ("failover", {"not_exact": True}, "failover, run plain: 5 answers say not_exact"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_what_is_wrong_is_told(fake: FakeGeneration, opened: list[up.UpOptions], prompts: str, case: str) -> None:
    names, wrong, complaint = BROKEN[case]
    for name, value in wrong.items():
        setattr(fake, name, value)
    result = run(prompts, names)
    assert result.exit_code == 1
    assert complaint in result.stderr


def test_no_preemption_is_a_failure(fake: FakeGeneration, opened: list[up.UpOptions], prompts: str) -> None:
    fake.preempts = False
    result = run(prompts, "preempt", "--preempt-kv", "7MiB")
    assert result.exit_code == 1
    assert "preempt, run plain: no sequence lost its KV" in result.stderr


def test_no_loss_in_mid_answer_is_a_failure(
    fake: FakeGeneration, opened: list[up.UpOptions], prompts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Loss, "count", lambda self, tokens: fake.go_on.set())
    result = run(prompts, "failover")
    assert result.exit_code == 1
    assert "failover, run plain: no answer was continued by a second worker" in result.stderr
    assert life == []


def test_hints_that_never_come_prove_nothing(fake: FakeGeneration, opened: list[up.UpOptions], prompts: str) -> None:
    real = fake.started

    def started(request: pb.GenerateRequest) -> pb.Started:
        fake.usage = {"drafted": 0}
        return real(request)

    fake.started = started  # type: ignore[method-assign]
    result = run(prompts, "alone")
    assert result.exit_code == 1
    assert "alone, run speculative: no drafted token was checked" in result.stderr


def test_services_of_other_bits_are_not_compared(
    fake: FakeGeneration, opened: list[up.UpOptions], prompts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = up.started

    @asynccontextmanager
    async def started(options: up.UpOptions) -> AsyncIterator[up.Running]:
        fake.info["numerics_id"] = f"n{options.targets}"
        async with real(options) as running:
            yield running

    monkeypatch.setattr(up, "started", started)
    result = run(prompts, "failover")
    assert result.exit_code == 1
    assert "these services compute other bits than the reference's: 'n2', not 'n1'" in result.stderr


def test_a_target_that_does_not_state_its_kv_needs_a_number(
    fake: FakeGeneration, opened: list[up.UpOptions], prompts: str
) -> None:
    fake.info["kv_tokens"] = 0
    result = run(prompts, "preempt")
    assert result.exit_code == 1
    assert "name --preempt-kv" in result.stderr
