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
        assert (info.model, set(info.sources)) == ("demo", {"early_exit", "ngram"})
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
