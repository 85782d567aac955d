"""`forerun demo` with its real model, and how `forerun up` starts and ends: nothing is left behind."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import sys
from asyncio.subprocess import PIPE, Process
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from forerun.client import Client, build_request
from forerun.up import ServiceFailed, UpOptions, source_names, started

pytestmark = pytest.mark.services

SIM = "sim:pass=20ms,step=2ms,accept=0.8"


async def forerun(*arguments: str) -> Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "forerun.cli", *arguments, stdout=PIPE, stderr=PIPE, env={**os.environ, "NO_COLOR": "1"}
    )


async def ready(process: Process) -> tuple[str, list[int]]:
    """(address, pids) from the line that `up` prints."""
    assert process.stderr is not None
    while line := (await process.stderr.readline()).decode():
        if line.startswith("ready at"):
            found = re.match(r"ready at (\S+) \(processes: (.*); logs", line)
            assert found, line
            return found[1], [int(entry.split()[1]) for entry in found[2].split(", ")]
    raise AssertionError("up ended before it was ready")


async def gone(pids: list[int]) -> None:
    """Returns when none of the processes lives; the test's time limit is the bound."""
    for pid in pids:
        with suppress(ProcessLookupError):
            descriptor = os.pidfd_open(pid)
            ended = asyncio.Event()
            asyncio.get_running_loop().add_reader(descriptor, ended.set)
            await ended.wait()
            asyncio.get_running_loop().remove_reader(descriptor)
            os.close(descriptor)


@pytest.mark.demo_model
async def test_demo_streams_english_within_25_seconds() -> None:
    began = asyncio.get_running_loop().time()
    process = await forerun("demo", "--max-tokens", "40", "--", "What is the capital of France?")
    out, err = (stream.decode() for stream in await process.communicate())
    assert process.returncode == 0, err
    assert "Paris" in out
    summary = err.strip().splitlines()[-1]
    for figure in ("tokens/s", "passes", "drafted", "accepted", "tokens/pass", "OTEL_EXPORTER_OTLP_ENDPOINT"):
        assert figure in summary
    assert asyncio.get_running_loop().time() - began < 25.0


@pytest.mark.demo_model
async def test_real_workers_say_the_same_with_and_without_speculation() -> None:
    """bfloat16, the demo model, three processes, greedy and sampled."""
    async with started(UpOptions(port=0, quiet=True)) as running, Client(running.address) as client:
        info = await client.model_info()
        assert (info.model, set(info.sources)) == ("demo", {"distilled", "ngram"})
        for temperature in (0.0, 0.8):
            asked: dict[str, Any] = {"temperature": temperature, "seed": 5, "max_tokens": 48}
            prompt = "List the numbers from one to ten, then list them again."
            fast = await client.generate(build_request(messages=[{"role": "user", "content": prompt}], **asked))
            plain = await client.generate(
                build_request(messages=[{"role": "user", "content": prompt}], speculation=False, **asked)
            )
            assert list(fast.token_ids) == list(plain.token_ids)
            assert fast.text == plain.text
            assert fast.usage.drafted > 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_a_running_answer_ends_well_when_all_stops(number: int) -> None:
    process = await forerun("up", "--target", SIM, "--draft", "model", "--port", "0")
    address, pids = await ready(process)
    async with Client(address) as client:
        stream = client.stream(build_request("hello", temperature=0.0, max_tokens=150))
        assert (await anext(stream)).HasField("started")
        process.send_signal(number)
        events = [event async for event in stream]
    assert events[-1].finished.usage.completion == 150
    assert await process.wait() == 0
    await gone(pids)


async def test_killed_up_leaves_no_service_behind() -> None:
    process = await forerun("up", "--target", SIM, "--draft", "model", "--port", "0")
    _, pids = await ready(process)
    assert len(pids) == 3
    process.kill()
    await process.wait()
    await gone(pids)


def attached(log: str) -> int:
    """How often the worker with this log was."""
    return Path(log).read_text().count(" attached to 127.0.0.1:")


async def line_with(process: Process, text: str) -> str:
    """The next line that `up` prints with it."""
    assert process.stderr is not None
    while line := (await process.stderr.readline()).decode():
        if text in line:
            return line
    raise AssertionError(f"up ended and never said {text!r}")


async def test_workers_that_die_are_started_again_and_no_answer_is_lost() -> None:
    process = await forerun("up", "--target", SIM, "--targets", "2", "--draft", "model,ngram", "--port", "0")
    address, (_, target, second, draft) = await ready(process)
    assert re.search(r"KV up to \d+ MiB \([\d,]+ tokens\), 16 .*, on each target", await line_with(process, "KV"))
    async with Client(address) as client:
        asked = build_request("hello", temperature=0.0, max_tokens=100)
        expected = list((await client.generate(asked)).token_ids)
        streams = [client.stream(asked), client.stream(asked)]
        for stream in streams:
            assert (await anext(stream)).HasField("started")
        for pid, name in ((draft, "draft"), (second, "target-2")):
            os.kill(pid, signal.SIGKILL)
            line = await line_with(process, name)
            found = re.fullmatch(rf"{name} was ended by SIGKILL; starting it again in 0.5 s; its log: (\S+)\n", line)
            assert found, line
        for stream in streams:
            assert [token async for event in stream for token in event.chunk.token_ids] == expected
        while attached(found[1]) < 2:
            await client.model_info()
        os.kill(target, signal.SIGKILL)
        assert list((await client.generate(asked)).token_ids) == expected
    process.send_signal(signal.SIGTERM)
    assert await process.wait() == 0


async def test_the_coordinator_s_end_is_the_end() -> None:
    process = await forerun("up", "--target", SIM, "--draft", "none", "--port", "0")
    address, pids = await ready(process)
    generate = await forerun("generate", "--addr", address, "--temperature", "0", "hello")
    assert generate.stdout is not None
    await generate.stdout.read(1)
    os.kill(pids[0], signal.SIGKILL)
    _, err = await generate.communicate()
    assert re.match(rf"forerun: the service at {address} stopped in mid-answer; \d+ tokens? had come ", err.decode())
    _, err = await process.communicate()
    assert process.returncode == 1
    assert "forerun: coordinator was ended by SIGKILL:" in err.decode()
    await gone(pids)


async def test_a_worker_that_never_was_ready_ends_it() -> None:
    process = await forerun("up", "--target", SIM, "--draft", "none", "--tp", "2", "--port", "0")
    _, err = await process.communicate()
    assert process.returncode == 1
    assert "forerun: target ended with status 1:" in err.decode()
    assert "a simulated model computes nothing: leave --tp out" in err.decode()


async def test_interrupted_while_starting() -> None:
    process = await forerun("up", "--target", "sim:pass=20ms", "--draft", "model", "--port", "0")
    assert process.stderr is not None
    process.send_signal(signal.SIGTERM)
    await process.communicate()
    assert process.returncode != 0


async def test_a_taken_port_is_said_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ServiceFailed, match=f"port {port} "):
            async with started(UpOptions(target=SIM, draft=("none",), port=port, quiet=True)):
                raise AssertionError("it started")


WRONG = {
    ("--draft", ",,"): "no hint source is named",
    ("--draft", "psychic"): "early_exit, ngram",
    ("--target", "sim:pas=20ms"): "'pas'",
    ("--target", "/no/such/folder"): "/no/such/folder",
    ("--port", "99999"): "65534",
    ("--dtype", "int3"): "bfloat16",
}


@pytest.mark.parametrize("option", WRONG)
async def test_wrong_options_are_named(option: tuple[str, str]) -> None:
    process = await forerun("up", *option)
    _, err = await process.communicate()
    assert process.returncode != 0
    assert WRONG[option] in err.decode()
    assert "Traceback" not in err.decode()


def test_commas_of_a_simulated_model_are_its_own() -> None:
    assert source_names("sim:pass=1ms,accept=0.5,ngram") == ("sim:pass=1ms,accept=0.5", "ngram")
