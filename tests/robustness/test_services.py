"""The three services as real processes, on a simulated model: what a client sees, also when workers die."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from forerun.client import Client, build_request
from forerun.rpc.options import client_options
from forerun.up import Running, Service, UpOptions, free_port, started
from forerun.v1 import attach_pb2, attach_pb2_grpc, common_pb2, draft_pb2, generation_pb2, target_pb2

pytestmark = [pytest.mark.services, pytest.mark.asyncio(loop_scope="module")]

SIM = "sim:pass=10ms,step=1ms,accept=0.8,vocab=500,context=512"
PROMPT = [3, 1, 4, 1, 5]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def services() -> AsyncIterator[Running]:
    async with started(UpOptions(target=SIM, draft=("model", "ngram"), port=0, quiet=True)) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def client(services: Running) -> AsyncIterator[Client]:
    async with Client(services.address) as client:
        yield client


def asking(**knobs: Any) -> generation_pb2.GenerateRequest:
    return build_request(**{"token_ids": PROMPT, "temperature": 0.0, "max_tokens": 60, **knobs})


async def collect(client: Client, request: generation_pb2.GenerateRequest) -> list[generation_pb2.GenerateEvent]:
    return [event async for event in client.stream(request)]


async def test_stream_and_unary_say_the_same(client: Client) -> None:
    unary = await client.generate(asking(request_id="a", seed=7))
    events = await collect(client, asking(request_id="b", seed=7))
    assert events[0].started.request_id == "b"
    assert events[0].started.seed == unary.seed == 7
    assert events[0].started.numerics_id == unary.started.numerics_id != ""
    assert events[0].started.model_revision != ""
    chunks = [event.chunk for event in events[1:-1]]
    ids = [token for chunk in chunks for token in chunk.token_ids]
    assert [chunk.position for chunk in chunks] == [
        sum(len(before.token_ids) for before in chunks[:at]) for at in range(len(chunks))
    ]
    assert ids == list(unary.token_ids)
    assert "".join(chunk.text for chunk in chunks) == unary.text != ""
    finished = events[-1].finished
    assert finished.finish_reason == unary.finish_reason == generation_pb2.FINISH_REASON_LENGTH
    assert finished.stop_cause.max_tokens == 60
    usage = finished.usage
    assert (usage.prompt, usage.completion) == (len(PROMPT), 60)
    assert usage.completion == usage.accepted + usage.passes
    assert usage.accepted <= usage.drafted


async def test_speculation_changes_speed_and_nothing_else(client: Client) -> None:
    for temperature in (0.0, 1.0):
        fast = await client.generate(asking(temperature=temperature, seed=11, max_tokens=120))
        plain = await client.generate(asking(temperature=temperature, seed=11, max_tokens=120, speculation=False))
        assert list(fast.token_ids) == list(plain.token_ids)
        assert plain.usage.drafted == 0
        assert plain.usage.passes == 120
        assert 120 / fast.usage.passes > 1.2


async def test_many_at_once_equal_alone(client: Client) -> None:
    prompts = [[i + 1, 2 * i + 1, 7] for i in range(24)]
    alone = [list((await client.generate(asking(token_ids=p, max_tokens=20))).token_ids) for p in prompts]
    together = await asyncio.gather(*(client.generate(asking(token_ids=p, max_tokens=20)) for p in prompts))
    assert [list(answer.token_ids) for answer in together] == alone


async def test_stop_string_ends_text_ids_and_usage(client: Client) -> None:
    whole = await client.generate(asking())
    word = whole.text.split()[23]
    first = whole.text.split().index(word)
    events = await collect(client, asking(stop=[word + " "]))
    finished = events[-1].finished
    text = "".join(event.chunk.text for event in events[1:-1])
    ids = [token for event in events[1:-1] for token in event.chunk.token_ids]
    assert text == " ".join(whole.text.split()[:first]) + (" " if first else "")
    assert finished.finish_reason == generation_pb2.FINISH_REASON_STOP
    assert finished.stop_cause.text == word + " "
    assert ids == list(whole.token_ids)[: len(ids)]
    assert first < len(ids) <= first + 2
    usage = finished.usage
    assert usage.completion == len(ids)
    assert max(usage.accepted, usage.passes) <= usage.completion


@pytest.mark.parametrize("index", range(0, 12))
async def test_stop_token_at_every_offset(client: Client, index: int) -> None:
    whole = list((await client.generate(asking())).token_ids)
    end = whole.index(whole[index])
    answer = await client.generate(asking(stop_token_ids=[whole[index]]))
    assert list(answer.token_ids) == whole[: end + 1]
    assert answer.finish_reason == generation_pb2.FINISH_REASON_STOP
    assert answer.stop_cause.token_id == whole[index]
    held_back = await client.generate(asking(stop_token_ids=[whole[index]], min_tokens=60))
    assert whole[index] not in held_back.token_ids
    assert held_back.usage.completion == 60


async def test_fills_the_context_exactly(client: Client) -> None:
    for prompt_len in (511, 510, 505):
        answer = await client.generate(build_request(token_ids=[5] * prompt_len, temperature=0.0))
        assert answer.usage.completion == 512 - prompt_len
        assert answer.finish_reason == generation_pb2.FINISH_REASON_LENGTH
        assert answer.stop_cause.context_limit == 512


async def test_no_tokens_asked_none_given(client: Client) -> None:
    answer = await client.generate(asking(max_tokens=0))
    assert (list(answer.token_ids), answer.text, answer.usage.completion) == ([], "", 0)
    assert answer.stop_cause.WhichOneof("kind") == "max_tokens"


REFUSED = {
    "empty prompt": (lambda r: r.token_ids.ClearField("token_ids"), "empty"),
    "no input": (lambda r: r.ClearField("token_ids"), "no input"),
    "id outside": (lambda r: r.token_ids.token_ids.append(500), "outside the vocabulary"),
    "too long": (lambda r: r.token_ids.token_ids.extend([1] * 600), "512"),
    "no template": (lambda r: r.chat.messages.add(role="user", content="x"), "chat template"),
    "temperature": (lambda r: setattr(r.sampling, "temperature", -0.5), "sampling.temperature"),
    "nan": (lambda r: setattr(r.sampling, "temperature", float("nan")), "sampling.temperature"),
    "top_p": (lambda r: setattr(r.sampling, "top_p", 0.0), "sampling.top_p"),
    "min_p": (lambda r: setattr(r.sampling, "min_p", 1.0), "sampling.min_p"),
    "repetition": (lambda r: setattr(r.sampling, "repetition_penalty", 1.2), "repetition_penalty"),
    "presence": (lambda r: setattr(r.sampling, "presence_penalty", 0.5), "presence_penalty"),
    "frequency": (lambda r: setattr(r.sampling, "frequency_penalty", 0.5), "frequency_penalty"),
    "bias": (lambda r: r.sampling.logit_bias.update({3: 1.0}), "logit_bias"),
    "min over max": (lambda r: setattr(r.stopping, "min_tokens", 61), "min_tokens"),
    "time limit": (lambda r: setattr(r.stopping, "time_limit_ms", 5), "time_limit_ms"),
    "empty stop": (lambda r: r.stopping.stop.append(""), "stop"),
    "stop id": (lambda r: r.stopping.stop_token_ids.append(999), "stop_token_ids"),
    "source": (lambda r: r.speculation.sources.append("psychic"), "psychic"),
    "draft tokens": (lambda r: setattr(r.speculation, "max_draft_tokens", 10_000), "max_draft_tokens"),
    "typical": (lambda r: setattr(r.speculation, "verification", common_pb2.VERIFICATION_TYPICAL), "TYPICAL"),
    "logprobs": (lambda r: setattr(r.output, "logprobs", 0), "logprobs"),
    "prompt logprobs": (lambda r: setattr(r.output, "prompt_logprobs", 1), "prompt_logprobs"),
    "echo": (lambda r: setattr(r.output, "echo", True), "echo"),
    "n": (lambda r: setattr(r, "n", 2), "n "),
    "priority": (lambda r: setattr(r, "priority", 3), "priority"),
    "resume": (lambda r: r.resume.token_ids.append(1), "resume"),
    "model": (lambda r: setattr(r, "model", "gpt-9"), "gpt-9"),
}


@pytest.mark.parametrize("case", REFUSED)
async def test_what_is_wrong_or_not_honoured_is_refused_by_name(client: Client, case: str) -> None:
    change, named = REFUSED[case]
    request = asking()
    change(request)
    with pytest.raises(grpc.aio.AioRpcError) as unary:
        await client.generate(request)
    with pytest.raises(grpc.aio.AioRpcError) as stream:
        await collect(client, request)
    for error in (unary.value, stream.value):
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert named in (error.details() or "")


async def test_unknown_fields_are_refused(client: Client) -> None:
    request = asking()
    request.MergeFromString(bytes([0xBA, 0x3E, 0x01, 0x41]))  # field 999, one byte
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await client.generate(request)
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "999" in (error.value.details() or "")


async def test_health_and_reflection(services: Running) -> None:
    async with grpc.aio.insecure_channel(services.address, client_options()) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        for name in ("", "forerun.v1.Generation"):
            answer = await health.Check(health_pb2.HealthCheckRequest(service=name))
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
        names = {service.name async for reply in call for service in reply.list_services_response.service}
        assert {"forerun.v1.Generation", "grpc.health.v1.Health"} <= names


async def test_model_info(client: Client) -> None:
    info = await client.model_info()
    assert (info.vocab_size, info.context_limit, info.lookahead) == (500, 512, 8)
    assert set(info.sources) == {"model", "ngram"}
    assert (info.targets, info.drafts, info.chat_template) == (1, 1, False)


async def test_abort_and_id_in_use(client: Client) -> None:
    stream = client.stream(asking(request_id="long", max_tokens=400))
    assert (await anext(stream)).HasField("started")
    with pytest.raises(grpc.aio.AioRpcError) as twice:
        await client.generate(asking(request_id="long"))
    assert twice.value.code() is grpc.StatusCode.ALREADY_EXISTS
    assert await client.abort("long")
    with pytest.raises(grpc.aio.AioRpcError) as aborted:
        await rest(stream)
    assert aborted.value.code() is grpc.StatusCode.CANCELLED
    assert not await client.abort("long")
    assert not await client.abort("never seen")


async def rest(stream: AsyncIterator[Any]) -> list[Any]:
    return [event async for event in stream]


async def test_cancel_and_resend_with_the_same_id(client: Client) -> None:
    expected = list((await client.generate(asking(max_tokens=10))).token_ids)
    for _ in range(30):
        stream = client.stream(asking(request_id="again", max_tokens=400))
        assert (await anext(stream)).HasField("started")
        await stream.aclose()
        answer = await resent(client, asking(request_id="again", max_tokens=10))
        assert list(answer.token_ids) == expected


async def resent(client: Client, request: generation_pb2.GenerateRequest) -> generation_pb2.GenerateResponse:
    """The server may learn of a cancellation after the call that follows it."""
    while True:
        try:
            return await client.generate(request)
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.ALREADY_EXISTS:
                raise


async def test_garbage_on_the_internal_port_ends_nothing(services: Running, client: Client) -> None:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{attach_port(services)}", client_options()) as channel:
        attach: Any = attach_pb2_grpc.AttachmentStub(channel).Attach
        impolite = attach(iter([attach_pb2.WorkerFrame(heartbeat=attach_pb2.Heartbeat())]))
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await impolite.read()
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT

        plain = list((await client.generate(asking(max_tokens=100, speculation=False))).token_ids)
        call = attach()
        hello = attach_pb2.Hello(
            role=attach_pb2.ROLE_DRAFT, worker="liar", incarnation="1", capacity=99, sources=[common_pb2.SOURCE_MODEL]
        )
        await call.write(attach_pb2.WorkerFrame(hello=hello))
        assert (await call.read()).HasField("welcome")
        for _ in range(3):
            await call.write(attach_pb2.WorkerFrame(heartbeat=attach_pb2.Heartbeat()))
            # The honest draft is attached first and is asked first; the next request gets the liar.
            first = client.stream(asking(max_tokens=400))
            assert (await anext(first)).HasField("started")
            running = asyncio.ensure_future(client.generate(asking(max_tokens=100)))
            seq = None
            while seq is None:
                for command in (await call.read()).draft:
                    if command.HasField("sync"):
                        seq = seq or command.sync.seq
            for hint in (
                b"\xff\xff\xff",
                draft_pb2.Hint(base_len=5, tail=[5], tree=common_pb2.Tree()).SerializeToString(),
            ):
                envelope = draft_pb2.HintEnvelope(seq=seq, hint=hint)
                await call.write(attach_pb2.WorkerFrame(draft=[draft_pb2.DraftEvent(hint=envelope)]))
            emit = target_pb2.Emit(seq=seq, base_len=5, tokens=[1, 2, 3])
            await call.write(attach_pb2.WorkerFrame(target=[target_pb2.TargetEvent(emit=emit)]))
            await call.write(attach_pb2.WorkerFrame(hello=hello))
            assert list((await running).token_ids) == plain
            await first.aclose()
        call.cancel()


def attach_port(services: Running) -> int:
    arguments = services.services[0].arguments
    return int(arguments[arguments.index("--attach-port") + 1])


async def test_workers_that_cannot_serve_are_refused_and_newer_ones_do_no_harm(
    services: Running, client: Client
) -> None:
    target = {"role": attach_pb2.ROLE_TARGET, "worker": "t", "incarnation": "1", "capacity": 4}
    fit = {"context_limit": 512, "vocab_size": 500, "lookahead": 8, "revision": SIM}
    refused = {
        "context_limit": {**target, **fit, "context_limit": 0},
        "lookahead": {**target, **fit, "lookahead": 1000},
        "capacity": {**target, **fit, "capacity": 0},
        "served here is": {**target, **fit, "revision": "another model"},
    }
    async with grpc.aio.insecure_channel(f"127.0.0.1:{attach_port(services)}", client_options()) as channel:
        attach: Any = attach_pb2_grpc.AttachmentStub(channel).Attach
        for named, hello in refused.items():
            call = attach()
            await call.write(attach_pb2.WorkerFrame(hello=attach_pb2.Hello(**hello)))
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await call.read()
            assert named in (error.value.details() or "")
        newer = attach()
        hello = attach_pb2.Hello(role=attach_pb2.ROLE_DRAFT, worker="n", incarnation="1", capacity=4, sources=[99, 1])
        await newer.write(attach_pb2.WorkerFrame(hello=hello))
        assert (await newer.read()).HasField("welcome")
        info = await client.model_info()
        assert (info.drafts, set(info.sources)) == (2, {"model", "ngram"})
        assert (await client.generate(asking(max_tokens=5))).usage.completion == 5
        newer.cancel()


def mapped_files(pid: int) -> str:
    return Path(f"/proc/{pid}/maps").read_text()


async def test_coordinator_never_loads_torch(services: Running) -> None:
    maps = mapped_files(services.pids()["coordinator"])
    assert "libtorch" not in maps
    assert "grpc" in maps


async def test_workers_killed_and_back_within_one_answer() -> None:
    """A draft, then the target is killed in mid answer; others come; the client sees one unbroken answer."""
    async with (
        started(UpOptions(target=SIM, draft=("model", "ngram"), port=0, quiet=True)) as running,
        Client(running.address) as client,
    ):
        expected = list((await client.generate(asking(max_tokens=300, speculation=False))).token_ids)
        position, seen = 0, []
        killed = False
        async for event in client.stream(asking(max_tokens=300)):
            if event.HasField("chunk"):
                assert event.chunk.position == position
                position += len(event.chunk.token_ids)
                seen.extend(event.chunk.token_ids)
            if position > 40 and not killed:
                killed = True
                for service in running.services[1:]:
                    assert service.process is not None
                    service.process.send_signal(signal.SIGKILL)
                    await service.process.wait()
                    again = Service(service.name, service.arguments, service.log)
                    await again.start()
                    running.services.append(again)
        assert killed
        assert seen == expected
        assert await client.abort("unknown") is False
        answer = await client.generate(asking(max_tokens=200))
        assert 200 / answer.usage.passes > 1.2  # speculation came back with the draft


def lone_coordinator(target_wait: str) -> tuple[int, int, Service]:
    """(public port, attach port, a coordinator that is not started yet)."""
    port, attach = free_port(), free_port()
    ports = ["--port", str(port), "--attach-port", str(attach)]
    arguments = ["coordinator", "--model", SIM, *ports, "--target-wait", target_wait]
    return port, attach, Service("coordinator", arguments, Path(os.devnull))


async def test_without_workers_unavailable_and_sigterm_ends_with_0() -> None:
    port, _, service = lone_coordinator(target_wait="0.2")
    await service.start()
    assert service.process is not None
    async with Client(f"127.0.0.1:{port}") as client:
        channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}", client_options())
        health = health_pb2_grpc.HealthStub(channel)
        answer = await health.Check(health_pb2.HealthCheckRequest(), wait_for_ready=True)
        assert answer.status == health_pb2.HealthCheckResponse.NOT_SERVING
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await client.generate(asking())
        assert error.value.code() is grpc.StatusCode.UNAVAILABLE
        await channel.close()
    service.process.send_signal(signal.SIGTERM)
    assert await asyncio.wait_for(service.process.wait(), 20) == 0


async def test_requests_that_come_before_the_first_target() -> None:
    """One is aborted while it waits; the other is served like any, speculation included."""
    port, attach, first = lone_coordinator(target_wait="60")
    dial = ["--model", SIM, "--attach", f"127.0.0.1:{attach}"]
    services = [
        first,
        Service("draft", ["draft-worker", *dial], Path(os.devnull)),
        Service("target", ["target-worker", *dial], Path(os.devnull)),
    ]
    await services[0].start()
    channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}", client_options())
    await channel.channel_ready()
    async with Client(f"127.0.0.1:{port}") as client:
        waiting = asyncio.ensure_future(client.generate(asking(request_id="aborted")))
        while not await client.abort("aborted"):  # until it has arrived
            assert not waiting.done()
        with pytest.raises(grpc.aio.AioRpcError) as aborted:
            await waiting
        assert aborted.value.code() is grpc.StatusCode.CANCELLED
        early = asyncio.ensure_future(client.generate(asking(max_tokens=200)))
        for service in services[1:]:
            await service.start()
        answer = await early
        assert answer.usage.completion == 200
        assert answer.usage.drafted > 0
    await channel.close()
    for service in services:
        await service.stop()
