"""`forerun bench` against a service without models, and a tiny model in transformers beside it."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import Any

import grpc
import pytest
import typer
from typer.testing import CliRunner, Result

from forerun.client import build_request
from forerun.commands.bench import bench
from forerun.commands.measure import Prompt, Sample, Timeline
from forerun.commands.reference import Reference
from forerun.commands.runs import WARM_UP, Decoding, interleave
from forerun.v1 import generation_pb2 as pb
from tests.rpc.fake_generation import FakeGeneration, prompt_of, serving

app = typer.Typer()
app.command()(bench)

QUESTIONS = ["one", "two", "three"]


@pytest.fixture
def fake() -> FakeGeneration:
    return FakeGeneration()


@pytest.fixture
def addr(fake: FakeGeneration) -> Iterator[str]:
    with serving(fake) as address:
        yield address


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    path = tmp_path / "prompts.jsonl"
    lines = [
        {"question_id": 80 + index, "category": "odd" if index % 2 else "even", "turns": [text, "again"]}
        for index, text in enumerate(QUESTIONS)
    ]
    path.write_text("\n".join(map(json.dumps, lines)) + "\n")
    return str(path)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def kind(request: pb.GenerateRequest) -> str:
    if request.speculation.mode == pb.SpeculationParams.OFF:
        return "plain"
    return ",".join(request.speculation.sources) or "speculative"


def counted(fake: FakeGeneration) -> list[tuple[str, str]]:
    """Prompt and run of every request but the warm-up."""
    return [(prompt_of(request), kind(request)) for request in fake.requests if prompt_of(request) != WARM_UP.text]


def test_runs_take_turns_prompt_by_prompt(fake: FakeGeneration, addr: str, prompts: str) -> None:
    result = run("--addr", addr, "--prompts", prompts, "--max-tokens", "7", "--sources", "ngram;early_exit")
    assert result.exit_code == 0, result.stderr
    assert counted(fake) == [
        *(("one", name) for name in ("plain", "ngram", "early_exit")),
        *(("two", name) for name in ("ngram", "early_exit", "plain")),
        *(("three", name) for name in ("early_exit", "plain", "ngram")),
    ]
    table = result.stdout.splitlines()
    assert [line.split()[:3] for line in table[1:]] == [[name, "3", "21"] for name in ("plain", "ngram", "early_exit")]


def test_requests_state_the_settings(fake: FakeGeneration, addr: str, prompts: str) -> None:
    options = ("--limit", "1", "--max-tokens", "7", "--temperature", "0.5", "--seed", "3", "--ignore-eos")
    assert run("--addr", addr, "--prompts", prompts, *options).exit_code == 0
    knobs: dict[str, Any] = {"max_tokens": 7, "temperature": 0.5, "seed": 3, "ignore_eos": True}
    messages = [{"role": "user", "content": "one"}]
    assert fake.requests[-2:] == [
        build_request(messages=messages, speculation=False, **knobs),
        build_request(messages=messages, **knobs),
    ]


def test_turns_are_raw_text_where_the_model_has_no_template(fake: FakeGeneration, addr: str, prompts: str) -> None:
    fake.chat_template = False
    assert run("--addr", addr, "--prompts", prompts, "--limit", "1").exit_code == 0
    assert {request.WhichOneof("input") for request in fake.requests} == {"text"}


def test_json_has_machine_settings_runs_and_exact(addr: str, prompts: str, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    result = run("--addr", addr, "--prompts", prompts, "--max-tokens", "7", "--json", str(out), "--check-exact")
    assert result.exit_code == 0, result.stderr
    assert "exact: 3 of 3 answers are identical to plain's" in result.stdout
    found = json.loads(out.read_text())
    assert list(found) == ["machine", "settings", "runs", "exact"]
    assert found["exact"] == {"checked": 3, "identical": 3, "differing": []}
    assert found["machine"]["cores"] >= 1
    assert found["machine"]["memory_gib"] > 0
    assert found["settings"]["sources"] == {"speculative": []}
    assert found["settings"]["max_tokens"] == 7
    plain, speculative = found["runs"]
    assert (plain["name"], plain["ratio_to_plain"], plain["acceptance_rate"]) == ("plain", 1.0, None)
    assert plain["tokens_per_pass"] == 1.0
    assert speculative["name"] == "speculative"
    assert (speculative["prompts"], speculative["tokens"], speculative["passes"]) == (3, 21, 9)
    assert speculative["acceptance_rate"] == pytest.approx(12 / 36)
    assert speculative["ratio_to_plain"] == speculative["tokens_per_s"] / plain["tokens_per_s"]
    assert set(speculative["ttft_ms"]) == set(speculative["itl_ms"]) == {"p50", "p90", "p99"}
    assert {name: part["prompts"] for name, part in speculative["by_category"].items()} == {"even": 2, "odd": 1}


def test_answers_that_differ_from_plain_are_named(
    fake: FakeGeneration, addr: str, prompts: str, tmp_path: Path
) -> None:
    out = tmp_path / "out.json"
    fake.differs_on = {"two", "three"}
    result = run("--addr", addr, "--prompts", prompts, "--json", str(out), "--check-exact")
    assert result.exit_code == 1
    assert "forerun: run speculative differs from plain in question 81, 82" in result.stderr
    assert json.loads(out.read_text())["exact"] == {"checked": 3, "identical": 1, "differing": [81, 82]}
    assert run("--addr", addr, "--prompts", prompts).exit_code == 0, "only --check-exact judges"


def test_our_own_services_are_started_if_no_address_is_given(
    addr: str, prompts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict[str, str]] = []

    @asynccontextmanager
    async def running(**options: str) -> AsyncIterator[str]:
        asked.append(options)
        yield addr
        asked.append({"stopped": "yes"})

    up: Any = ModuleType("forerun.up")
    up.running = running
    monkeypatch.setitem(sys.modules, "forerun.up", up)
    assert run("--prompts", prompts, "--target", "sim:", "--draft", "ngram").exit_code == 0
    assert asked == [{"target": "sim:", "draft": "ngram"}, {"stopped": "yes"}]


def test_a_failing_call_names_question_and_run(fake: FakeGeneration, addr: str, prompts: str) -> None:
    fake.breaks_after = 1
    result = run("--addr", addr, "--prompts", prompts)
    assert result.exit_code == 1
    assert result.stderr.endswith("forerun: question warm-up, run plain: INTERNAL: the fake broke\n")


def test_no_server_is_one_line(prompts: str) -> None:
    with serving(FakeGeneration()) as address:
        pass
    result = run("--addr", address, "--prompts", prompts)
    assert result.exit_code == 1
    assert result.stderr.startswith(f"forerun: no coordinator answers at {address}")


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--prompts", "{dir}/none.jsonl"], "none.jsonl"),
        (["--prompts", "{dir}/bad.jsonl"], "bad.jsonl:2: not JSON"),
        (["--prompts", "{dir}/prompts.jsonl", "--sources", "a,"], "sources are names"),
        (["--prompts", "{dir}/prompts.jsonl", "--json", "{dir}/no/out.json"], "there is no folder"),
    ],
)
def test_bad_input_is_refused_before_anything_runs(
    fake: FakeGeneration, addr: str, prompts: str, tmp_path: Path, arguments: list[str], complaint: str
) -> None:
    (tmp_path / "bad.jsonl").write_text('{"prompt": "fine"}\n{\n')
    result = run("--addr", addr, *(argument.format(dir=tmp_path) for argument in arguments))
    assert result.exit_code == 1
    assert complaint in result.stderr
    assert fake.requests == []


def test_refusals_from_the_service_are_told(fake: FakeGeneration, addr: str, prompts: str) -> None:
    fake.refusal = (grpc.StatusCode.UNAVAILABLE, "no target worker is attached")
    assert run("--addr", addr, "--prompts", prompts).stderr == "forerun: UNAVAILABLE: no target worker is attached\n"


class Scripted:
    """A run that notes how many answers are in flight."""

    def __init__(self, name: str, log: list[str], streams_most: int | None = None) -> None:
        self.name = name
        self.log = log
        self.streams_most = streams_most
        self.in_flight = 0
        self.most = 0

    async def answer(self, prompt: Prompt, max_tokens: int) -> Sample:
        self.in_flight += 1
        self.most = max(self.most, self.in_flight)
        await asyncio.sleep(0)  # lets the other streams begin
        self.in_flight -= 1
        self.log.append(self.name)
        return Sample(prompt, (1,), Timeline(0, ((1, 1),), 1), passes=0)


async def test_several_streams_are_in_flight_and_a_run_is_alone_in_its_turn() -> None:
    log: list[str] = []
    runs = [Scripted("plain", log), Scripted("reference", log, streams_most=1)]
    prompts = [Prompt(number, "", "text", True) for number in range(20)]
    ticks = count()
    records = await interleave(runs, prompts, streams=2, max_tokens=1, clock=lambda: float(next(ticks)))
    assert [run.most for run in runs] == [2, 1]
    assert (
        log == ["plain"] * 8 + ["reference"] * 8 + ["reference"] * 8 + ["plain"] * 8 + ["plain"] * 4 + ["reference"] * 4
    )
    for record in records.values():
        assert [sample.prompt for sample in record.samples] == prompts
        assert record.seconds == 3.0


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A random Llama of 60 words, as a transformers folder."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=60,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=256,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel({f"w{index}": index for index in range(60)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    template = "{% for message in messages %}w5 {{ message.content }} w6{% endfor %}"
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template, "eos_token": "w2"})
    )
    return str(folder)


async def test_the_reference_counts_tokens_and_passes(tiny_model: str) -> None:
    ticks = count()
    reference = Reference(Decoding(24, 0.0, 0, ignore_eos=True), clock=lambda: float(next(ticks)))
    prompt = Prompt(1, "", "w7 w8 w9 w7 w8 w9", True)
    try:
        await reference.load(tiny_model, "float32", 1, [2])
        plain = await reference.answer(prompt, 24, lookup=False)
        lookup = await reference.answer(prompt, 24, lookup=True)
    finally:
        reference.close()
    assert plain.token_ids == lookup.token_ids
    assert len(plain.token_ids) == plain.timeline.tokens == lookup.timeline.tokens == 24
    assert plain.passes == 24
    assert lookup.passes < 24
    assert plain.timeline.ttft == 2.0, "sent, prompt, first token"


def test_compare_transformers_adds_two_runs(addr: str, prompts: str, tmp_path: Path, tiny_model: str) -> None:
    out = tmp_path / "out.json"
    compare = ("--compare", "transformers", "--model", tiny_model, "--dtype", "float32", "--threads", "1")
    result = run("--addr", addr, "--prompts", prompts, "--max-tokens", "5", "--json", str(out), *compare)
    assert result.exit_code == 0, result.stderr
    found = json.loads(out.read_text())
    assert [entry["name"] for entry in found["runs"]] == [
        "plain",
        "speculative",
        "transformers",
        "transformers-prompt-lookup",
    ]
    assert found["runs"][2]["prompts"] == 3
    assert found["runs"][2]["ratio_to_plain"] > 0
    assert found["runs"][2]["acceptance_rate"] is None
    assert found["settings"]["compare"]["dtype"] == "float32"


def test_compare_says_what_it_cannot_load(addr: str, prompts: str, tmp_path: Path) -> None:
    result = run("--addr", addr, "--prompts", prompts, "--compare", "transformers", "--model", str(tmp_path / "none"))
    assert result.exit_code == 1
    assert "none" in result.stderr.splitlines()[-1]
