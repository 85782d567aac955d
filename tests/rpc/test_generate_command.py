"""`forerun generate` against a service without models."""

from __future__ import annotations

import asyncio
import io
import json
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count

import grpc
import pytest
import typer
from grpc.aio import Metadata
from typer.testing import CliRunner, Result

from forerun.client import Client, build_request
from forerun.commands.failure import CallFailed
from forerun.commands.generate import generate, run_prompt
from forerun.rpc.options import server_options
from forerun.v1 import common_pb2
from forerun.v1 import generation_pb2 as pb
from tests.rpc.fake_generation import TRACE_ID, FakeGeneration, answer_to, serving, words

app = typer.Typer()
app.command()(generate)


def run(*arguments: str, stdin: str | None = None) -> Result:
    return CliRunner().invoke(app, list(arguments), input=stdin)


def test_text_goes_to_stdout_and_one_line_to_stderr(addr: str) -> None:
    result = run("--addr", addr, "hello")
    assert result.exit_code == 0, result.stderr
    assert result.stdout == words(answer_to("hello", 8)) + "\n"
    (line,) = result.stderr.splitlines()
    for part in (
        "8 tokens in ",
        " tokens/s, TTFT ",
        "3 passes | 12 drafted | 5 accepted (42%) | 2.67 tokens/pass | length (max_tokens 8)",
        f"trace {TRACE_ID}",
    ):
        assert part in line


def test_without_tracing_the_summary_says_how_to_get_a_trace(fake: FakeGeneration, addr: str) -> None:
    fake.trace_id = ""
    assert "OTEL_EXPORTER_OTLP_ENDPOINT" in run("--addr", addr, "hello").stderr


def test_an_answer_of_no_tokens_has_a_summary_too(addr: str) -> None:
    result = run("--addr", addr, "--max-tokens", "0", "hello")
    assert result.exit_code == 0, result.stderr
    assert result.stdout == ""
    assert "0 tokens" in result.stderr
    assert "TTFT - ms" in result.stderr
    assert "- tokens/pass" in result.stderr


def test_json_holds_everything(addr: str) -> None:
    result = run("--addr", addr, "--json", "--seed", "11", "--request-id", "mine", "hello")
    assert result.exit_code == 0, result.stderr
    assert result.stderr == ""
    found = json.loads(result.stdout)
    timings = found.pop("timings")
    assert found == {
        "text": words(answer_to("hello", 8)),
        "token_ids": answer_to("hello", 8),
        "finish_reason": "length",
        "stop_cause": {"max_tokens": 8},
        "not_exact": False,
        "seed": 11,
        "usage": {
            "prompt": 3,
            "cached": 0,
            "completion": 8,
            "drafted": 12,
            "accepted": 5,
            "passes": 3,
            "preempted": 0,
            "targets": 1,
            "branched": 0,
            "hits": {"continued": 0, "branch": 0, "awaited": 0, "late": 0, "miss": 0},
        },
        "started": {
            "request_id": "mine",
            "attempt": 0,
            "seed": 11,
            "trace_id": TRACE_ID,
            "model": "fake",
            "model_revision": "",
            "numerics_id": "",
            "prompt_tokens": 1,
        },
    }
    assert 0 < timings["ttft_ms"] <= timings["total_ms"]
    assert timings["tokens_per_s"] > 0
    assert timings["tokens_per_pass"] == 8 / 3
    assert set(timings["itl_ms"]) == {"p50", "p90", "p99"}


def test_options_reach_the_request(fake: FakeGeneration, addr: str) -> None:
    result = run(
        *("--addr", addr, "--raw", "--max-tokens", "5", "--min-tokens", "1", "--temperature", "0.5", "--top-k", "3"),
        *("--top-p", "0.9", "--min-p", "0.1", "--seed", "4", "--stop", "a", "--stop", "b", "--stop-token-id", "9"),
        *("--ignore-eos", "--sources", "ngram,early_exit", "--max-draft-tokens", "2", "--verification", "rejection"),
        *("--request-id", "mine", "--model", "m", "hello"),
    )
    assert result.exit_code == 0, result.stderr
    assert fake.requests == [
        build_request(
            "hello",
            max_tokens=5,
            min_tokens=1,
            temperature=0.5,
            top_k=3,
            top_p=0.9,
            min_p=0.1,
            seed=4,
            stop=["a", "b"],
            stop_token_ids=[9],
            ignore_eos=True,
            sources=["ngram", "early_exit"],
            max_draft_tokens=2,
            verification="rejection",
            request_id="mine",
            model="m",
        )
    ]
    assert fake.requests[0].speculation.verification == common_pb2.VERIFICATION_REJECTION


def test_no_option_states_nothing(fake: FakeGeneration, addr: str) -> None:
    run("--addr", addr, "--raw", "hello")
    run("--addr", addr, "--raw", "--no-speculation", "hello")
    assert fake.requests == [build_request("hello"), build_request("hello", speculation=False)]


@pytest.mark.parametrize(
    ("template", "arguments", "expected"),
    [
        (True, [], [("user", "hello")]),
        (False, [], None),
        (True, ["--raw"], None),
        (False, ["--chat"], [("user", "hello")]),
        (True, ["--system", "Be brief."], [("system", "Be brief."), ("user", "hello")]),
    ],
)
def test_chat_is_the_default_if_the_model_has_a_template(
    fake: FakeGeneration, addr: str, template: bool, arguments: list[str], expected: list[tuple[str, str]] | None
) -> None:
    fake.chat_template = template
    assert run("--addr", addr, *arguments, "hello").exit_code == 0
    (request,) = fake.requests
    if expected is None:
        assert request.text == "hello"
    else:
        assert [(message.role, message.content) for message in request.chat.messages] == expected


def test_a_dash_reads_stdin(fake: FakeGeneration, addr: str) -> None:
    assert run("--addr", addr, "--raw", "-", stdin="from a\npipe").exit_code == 0
    assert fake.requests[0].text == "from a\npipe"


def test_traceparent_is_taken_from_the_environment(
    fake: FakeGeneration, addr: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    traceparent = f"00-{TRACE_ID}-00f067aa0ba902b7-01"
    monkeypatch.setenv("TRACEPARENT", traceparent)
    assert run("--addr", addr, "hello").exit_code == 0
    assert fake.metadata[0]["traceparent"] == traceparent


def test_a_refusal_is_one_line_and_status_1(fake: FakeGeneration, addr: str) -> None:
    fake.refusal = (grpc.StatusCode.INVALID_ARGUMENT, "temperature must be at most 100,\nnot 101")
    result = run("--addr", addr, "--raw", "hello")
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr == "forerun: INVALID_ARGUMENT: temperature must be at most 100, not 101\n"


def test_unavailable_from_the_server_is_told_from_no_server(fake: FakeGeneration, addr: str) -> None:
    fake.refusal = (grpc.StatusCode.UNAVAILABLE, "no target worker is attached")
    assert run("--addr", addr, "hello").stderr == "forerun: UNAVAILABLE: no target worker is attached\n"


def test_no_server_names_the_address_and_what_to_start() -> None:
    with serving(FakeGeneration()) as address:
        pass
    result = run("--addr", address, "hello")
    assert result.exit_code == 1
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"forerun: no coordinator answers at {address}: start one with `forerun up`")


def test_a_break_in_the_middle_leaves_the_text_on_its_own_line(fake: FakeGeneration, addr: str) -> None:
    fake.breaks_after = 1
    result = run("--addr", addr, "hello")
    assert result.exit_code == 1
    assert result.stdout == words(answer_to("hello", 3)) + "\n"
    assert result.stderr == "forerun: INTERNAL: the fake broke\n"


def test_the_port_of_workers_is_told_from_the_public_one() -> None:
    server = grpc.server(ThreadPoolExecutor(1), options=server_options())
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    result = run("--addr", address, "hello")
    server.stop(None).wait()
    assert result.exit_code == 1
    assert result.stderr.startswith(f"forerun: {address} does not take requests: it looks like the port that workers")


@pytest.mark.parametrize(("tokens", "had"), [(0, "no token had"), (1, "1 token had"), (3, "3 tokens had")])
async def test_a_service_that_is_gone_in_mid_answer(monkeypatch: pytest.MonkeyPatch, tokens: int, had: str) -> None:
    async def cut_off(*_: object, **__: object) -> AsyncIterator[pb.GenerateEvent]:
        yield pb.GenerateEvent(started=pb.Started())
        if tokens:
            yield pb.GenerateEvent(chunk=pb.Chunk(token_ids=range(tokens), text="x"))
        raise grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, Metadata(), Metadata(), "Socket closed")

    async with Client("localhost:1") as client:
        monkeypatch.setattr(client, "stream", cut_off)
        with pytest.raises(CallFailed, match=f"^the service at localhost:1 stopped in mid-answer; {had} come"):
            await run_prompt(client, build_request("hello"), out=io.StringIO(), err=io.StringIO())


@pytest.mark.parametrize(
    ("arguments", "status", "complaint"),
    [
        (["--sources", "ngram,", "hello"], 1, "sources are names separated by commas"),
        (["--seed", "-1", "hello"], 1, "seed cannot be -1"),
        (["--traceparent", "1-2", "hello"], 1, "traceparent is 00-"),
        (["--system", "s", "--raw", "hello"], 2, "--system"),
        (["--verification", "maybe", "hello"], 2, "maybe"),
    ],
)
def test_bad_options_are_refused(addr: str, arguments: list[str], status: int, complaint: str) -> None:
    result = run("--addr", addr, *arguments)
    assert result.exit_code == status
    assert complaint in result.stderr


async def test_text_arrives_before_the_answer_is_complete(fake: FakeGeneration, addr: str) -> None:
    """Cancelling then cancels the call, and leaves what came on a line of its own."""
    fake.hangs_after = 1
    arrived = asyncio.Event()

    class Out(io.StringIO):
        def flush(self) -> None:
            arrived.set()

    out, err = Out(), io.StringIO()
    async with Client(addr) as client:
        task = asyncio.create_task(run_prompt(client, build_request("hello"), out=out, err=err))
        await arrived.wait()
        assert out.getvalue() == words(answer_to("hello", 3))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await asyncio.to_thread(fake.gone.wait, 10)
    assert out.getvalue() == words(answer_to("hello", 3)) + "\n"
    assert err.getvalue() == ""


async def test_run_prompt_times_with_the_clock_it_is_given(addr: str) -> None:
    ticks = count()
    async with Client(addr) as client:
        answer = await run_prompt(
            client, build_request("hello"), out=io.StringIO(), err=io.StringIO(), clock=lambda: float(next(ticks))
        )
    assert answer.timeline.arrivals == ((1.0, 3), (2.0, 3), (3.0, 2))
    assert answer.timeline.ttft == 1.0
    assert answer.tokens_per_s == 2.0


@pytest.mark.parametrize(
    ("number", "status", "line"),
    [(signal.SIGINT, 130, b"forerun: interrupted\n"), (signal.SIGTERM, 143, b"forerun: terminated\n")],
)
def test_signals_cancel_the_call(
    fake: FakeGeneration, addr: str, number: signal.Signals, status: int, line: bytes
) -> None:
    fake.hangs_after = 1
    script = "import typer; from forerun.commands.generate import generate; typer.run(generate)"
    with subprocess.Popen(
        [sys.executable, "-c", script, "--addr", addr, "hello"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        expected = words(answer_to("hello", 3)).encode()
        assert process.stdout.read(len(expected)) == expected
        process.send_signal(number)
        assert process.wait(20) == status
        assert process.stderr.read() == line
    assert fake.gone.wait(10)


def test_nothing_here_imports_torch() -> None:
    script = "import sys, forerun.commands.generate, forerun.commands.bench; print('torch' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", script]) == b"False\n"


async def test_a_gap_in_the_chunks_is_noticed(addr: str, fake: FakeGeneration, monkeypatch: pytest.MonkeyPatch) -> None:
    from forerun.core.errors import MalformedMessage

    async def gapped(*_: object, **__: object) -> object:
        yield pb.GenerateEvent(started=pb.Started())
        yield pb.GenerateEvent(chunk=pb.Chunk(position=1, token_ids=[5], text="x"))

    async with Client(addr) as client:
        monkeypatch.setattr(client, "stream", gapped)
        with pytest.raises(MalformedMessage, match="position 1 after 0 tokens"):
            await run_prompt(client, build_request("hello"), out=io.StringIO(), err=io.StringIO())
