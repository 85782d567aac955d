"""`forerun bench` against a service without models, and a tiny model in transformers beside it."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any

import grpc
import pytest
import typer
from typer.testing import CliRunner, Result

from forerun import up
from forerun.client import build_request
from forerun.commands.bench import bench
from forerun.commands.measure import Prompt, Sample, Timeline
from forerun.commands.reference import Aid, Reference
from forerun.commands.runs import WARM_UP, Decoding, closed_loop, interleave
from forerun.v1 import generation_pb2 as pb
from tests.rpc.fake_generation import FakeGeneration, prompt_of, serving

app = typer.Typer()
app.command()(bench)

QUESTIONS = ["one", "two", "three"]


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


@pytest.mark.parametrize(("options", "seeds"), [((), [5, 6, 7]), (("--skip", "1", "--limit", "1"), [6])])
def test_every_prompt_has_its_own_seed_whatever_the_slice(
    fake: FakeGeneration, addr: str, prompts: str, options: tuple[str, ...], seeds: list[int]
) -> None:
    assert run("--addr", addr, "--prompts", prompts, "--seed", "5", *options).exit_code == 0
    asked = {kind(request): [] for request in fake.requests}
    for request in fake.requests:
        if prompt_of(request) != WARM_UP.text:
            asked[kind(request)].append(request.sampling.seed)
    assert asked == {"plain": seeds, "speculative": seeds}


def test_logits_that_differ_where_ids_do_not_are_told(fake: FakeGeneration, addr: str, prompts: str) -> None:
    fake.logits_differ = {"two": 4}
    result = run("--addr", addr, "--prompts", prompts, "--check-exact")
    assert result.exit_code == 1
    assert "exact: 2 of 3" in result.stdout
    assert "differs from plain in question 81: only logits differ from position 4\n" in result.stderr
    assert run("--addr", addr, "--prompts", prompts).exit_code == 0
    assert [request.output.logits_digest for request in fake.requests[:2]] == [True, True]
    assert not fake.requests[-1].output.logits_digest, "they cost time"


def test_digests_that_do_not_come_are_no_proof(fake: FakeGeneration, addr: str, prompts: str) -> None:
    fake.digests = False
    result = run("--addr", addr, "--prompts", prompts, "--check-exact")
    assert result.exit_code == 1
    assert "a chunk of 1 tokens has 0 digests" in result.stderr


def test_a_single_stream_is_compared_in_the_same_run(addr: str, prompts: str, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    result = run("--addr", addr, "--prompts", prompts, "--streams", "2", "--single", "--json", str(out))
    assert result.exit_code == 0, result.stderr
    assert [entry["name"] for entry in json.loads(out.read_text())["runs"]] == ["plain", "plain-single", "speculative"]


def test_turns_are_raw_text_where_the_model_has_no_template(fake: FakeGeneration, addr: str, prompts: str) -> None:
    fake.chat_template = False
    assert run("--addr", addr, "--prompts", prompts, "--limit", "1").exit_code == 0
    assert {request.WhichOneof("input") for request in fake.requests} == {"text"}


def test_json_has_machine_settings_runs_and_exact(addr: str, prompts: str, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    result = run("--addr", addr, "--prompts", prompts, "--max-tokens", "7", "--json", str(out), "--check-exact")
    assert result.exit_code == 0, result.stderr
    assert "exact: 3 of 3 answers are identical to plain's, ids and logits" in result.stdout
    found = json.loads(out.read_text())
    assert list(found) == ["machine", "settings", "runs", "answers", "exact"]
    assert [answer["question_id"] for answer in found["answers"]] == [80, 81, 82]
    assert [len(answer["token_ids"]) for answer in found["answers"]] == [7, 7, 7]
    assert found["exact"] == {"checked": 3, "identical": 3, "differing": [], "differences": {}}
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
    result = run("--addr", addr, "--prompts", prompts, "--max-tokens", "8", "--json", str(out), "--check-exact")
    assert result.exit_code == 1
    for question in (81, 82):
        complaint = f"question {question}: ids differ from position 7, logits differ from position 7\n"
        assert f"forerun: run speculative differs from plain in {complaint}" in result.stderr
    assert "question 80" not in result.stderr
    exact = json.loads(out.read_text())["exact"]
    assert (exact["checked"], exact["identical"], exact["differing"]) == (3, 1, [81, 82])
    assert exact["differences"]["speculative"][0] == {"question_id": 81, "ids_at": 7, "logits_at": 7}
    assert run("--addr", addr, "--prompts", prompts).exit_code == 0, "only --check-exact judges"


def test_our_own_services_are_started_if_no_address_is_given(
    addr: str, prompts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    @asynccontextmanager
    async def started(options: up.UpOptions) -> AsyncIterator[up.Running]:
        asked.append(options)
        yield up.Running(addr, [], Path())
        asked.append("stopped")

    monkeypatch.setattr(up, "started", started)
    core = str(min(os.sched_getaffinity(0)))
    options = ["--dtype", "float32", "--threads", "3", "--lookahead", "16", "--max-sequences", "32", "--tp", "2"]
    options += ["--kv-memory", "1.5GiB", "--target-cores", core, "--draft-cores", core, "--layers", "4"]
    assert run("--prompts", prompts, "--target", "sim:", "--draft", "ngram", *options).exit_code == 0
    expected = up.UpOptions(
        "sim:",
        ("ngram",),
        0,
        "float32",
        16,
        4,
        3,
        max_sequences=32,
        kv_memory=3 << 29,
        tp=2,
        target_cores=(int(core),),
        draft_cores=(int(core),),
    )
    assert asked == [expected, "stopped"]


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
        (["--prompts", "{dir}/prompts.jsonl", "--skip", "3"], "--skip 3 leaves none"),
        (["--prompts", "{dir}/prompts.jsonl", "--scenarios", "alone,none"], "--scenarios takes some of alone,batch"),
        (["--prompts", "{dir}/prompts.jsonl", "--scenarios", "preempt"], "leave --addr out"),
        (["--prompts", "{dir}/prompts.jsonl", "--scenarios", "alone", "--single"], "--single: not used with"),
        (["--prompts", "{dir}/prompts.jsonl", "--fail-every", "2"], "--fail-every: needs one of --scenarios"),
        (["--prompts", "{dir}/prompts.jsonl", "--kv-memory", "1GiB"], "--kv-memory: of services of our own"),
        (["--prefix", "--interfere"], "--prefix and --interfere do not go together"),
        (["--prefix", "--limit", "3"], "--limit: not used with --prefix"),
        (["--prefix", "--prompt-tokens", "8190"], "8206 with the question do not fit a context of 8192"),
        (["--interfere", "--prompt-tokens", "9000"], "9000 does not fit the context limit of 8192"),
        ([], "--prompts is missing"),
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

    def __init__(self, name: str, log: list[str], streams_most: int = 99) -> None:
        self.name = name
        self.log = log
        self.streams_most = streams_most
        self.in_flight = 0
        self.most = 0

    async def answers(self, prompts: Sequence[Prompt], streams: int, max_tokens: int, told: Any) -> list[Sample]:
        return await closed_loop(self.answer, prompts, min(streams, self.streams_most))

    async def answer(self, prompt: Prompt) -> Sample:
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
        plain = await reference.answer(prompt, 24)
        lookup = await reference.answer(prompt, 24, Aid.LOOKUP)
    finally:
        reference.close()
    assert plain.token_ids == lookup.token_ids
    assert len(plain.token_ids) == plain.timeline.tokens == lookup.timeline.tokens == 24
    assert plain.passes == 24
    assert lookup.passes < 24
    assert plain.timeline.ttft == 2.0, "sent, prompt, first token"


def test_assisted_generation_needs_a_draft_model(addr: str, prompts: str) -> None:
    for options in (("--addr", addr), ("--target", "sim:", "--draft", "model"), ("--streams", "2")):
        result = run("--prompts", prompts, "--compare", "assisted", *options)
        assert result.exit_code == 1
        assert "--compare assisted is for one stream" in result.stderr


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


async def test_a_batch_answers_as_each_prompt_alone(tiny_model: str) -> None:
    """Prompts of different lengths: padding must not be attended to."""
    ticks = count()
    reference = Reference(Decoding(12, 0.0, 0, ignore_eos=True), clock=lambda: float(next(ticks)))
    prompts = [Prompt(number, "", " ".join(["w7 w8 w9"] * number), True) for number in (1, 3, 7)]
    try:
        await reference.load(tiny_model, "float32", 1, [2])
        alone = [await reference.answer(prompt, 12) for prompt in prompts]
        batch = await reference.answer_batch(prompts, 12)
    finally:
        reference.close()
    assert [sample.token_ids for sample in batch] == [sample.token_ids for sample in alone]
    assert [sample.timeline.tokens for sample in batch] == [12, 12, 12]
    assert {sample.timeline.ttft for sample in batch} == {2.0}, "sent, prompts, first tokens"
    assert batch[0].timeline.itl == [1.0] * 11


async def test_answers_of_a_batch_end_at_their_end_token(tiny_model: str) -> None:
    prompts = [Prompt(number, "", f"w{number} w8 w9", True) for number in (7, 11, 13)]
    whole = await batch_of(tiny_model, prompts, [])
    lengths = {}
    for end in {token for sample in whole for token in sample.token_ids}:
        lengths[end] = [(*sample.token_ids, end).index(end) + 1 for sample in whole]
    end, expected = max(lengths.items(), key=lambda entry: len(set(entry[1])))
    assert len(set(expected)) > 1, "some end before others"
    cut = await batch_of(tiny_model, prompts, [end])
    for before, after, length in zip(whole, cut, (min(12, length) for length in expected), strict=True):
        assert after.token_ids == before.token_ids[:length]
        assert after.timeline.tokens == after.passes == length


async def batch_of(model: str, prompts: list[Prompt], ends: list[int]) -> list[Sample]:
    reference = Reference(Decoding(12, 0.0, 0, ignore_eos=False))
    try:
        await reference.load(model, "float32", 1, ends)
        return await reference.answer_batch(prompts, 12)
    finally:
        reference.close()


def test_compare_in_batches_with_several_streams(addr: str, prompts: str, tmp_path: Path, tiny_model: str) -> None:
    out = tmp_path / "out.json"
    compare = ("--compare", "transformers", "--model", tiny_model, "--dtype", "float32", "--threads", "1")
    options = ("--streams", "2", "--max-tokens", "5", "--ignore-eos", "--json", str(out))
    result = run("--addr", addr, "--prompts", prompts, *options, *compare)
    assert result.exit_code == 0, result.stderr
    runs = json.loads(out.read_text())["runs"]
    assert [entry["name"] for entry in runs] == ["plain", "speculative", "transformers-batched"]
    assert (runs[2]["prompts"], runs[2]["tokens"]) == (3, 15)


def test_compare_says_what_it_cannot_load(addr: str, prompts: str, tmp_path: Path) -> None:
    result = run("--addr", addr, "--prompts", prompts, "--compare", "transformers", "--model", str(tmp_path / "none"))
    assert result.exit_code == 1
    assert "none" in result.stderr.splitlines()[-1]
