"""The asyncio client against a service without models."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import Any

import grpc
import pytest

from forerun.client import Client, build_request
from forerun.core.errors import InvalidRequest
from forerun.v1 import common_pb2
from forerun.v1 import generation_pb2 as pb
from tests.rpc.fake_generation import FakeGeneration, answer_to, serving, words

TRACEPARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


async def test_generate_gives_the_whole_answer(addr: str) -> None:
    async with Client(addr) as client:
        response = await client.generate(build_request("hello", max_tokens=5, seed=7))
    assert list(response.token_ids) == answer_to("hello", 5)
    assert response.text == words(answer_to("hello", 5))
    assert response.started.seed == 7


async def test_stream_gives_started_chunks_finished(addr: str) -> None:
    async with Client(addr) as client:
        events = [event async for event in client.stream(build_request("hello", max_tokens=7))]
    assert [event.WhichOneof("kind") for event in events] == ["started", "chunk", "chunk", "chunk", "finished"]
    assert [token for event in events for token in event.chunk.token_ids] == answer_to("hello", 7)


@pytest.mark.parametrize("method", ["generate", "stream"])
async def test_traceparent_travels_as_metadata(fake: FakeGeneration, addr: str, method: str) -> None:
    request = build_request("hello")
    async with Client(addr) as client:
        for traceparent in (None, TRACEPARENT):
            if method == "generate":
                await client.generate(request, traceparent=traceparent)
            else:
                assert [event async for event in client.stream(request, traceparent=traceparent)]
    assert [metadata.get("traceparent") for metadata in fake.metadata] == [None, TRACEPARENT]


async def test_a_bad_traceparent_is_refused_before_the_call(fake: FakeGeneration, addr: str) -> None:
    async with Client(addr) as client:
        with pytest.raises(InvalidRequest, match="traceparent"):
            await client.generate(build_request("hello"), traceparent="4bf92f")
    assert fake.requests == []


async def test_leaving_the_loop_cancels_the_call(fake: FakeGeneration, addr: str) -> None:
    fake.hangs_after = 1
    async with Client(addr) as client:
        async with aclosing(client.stream(build_request("hello"))) as events:
            async for event in events:
                if event.WhichOneof("kind") == "chunk":
                    break
        assert await asyncio.to_thread(fake.gone.wait, 10)


async def test_cancelling_the_task_cancels_the_call(fake: FakeGeneration, addr: str) -> None:
    fake.hangs_after = 1
    first_chunk = asyncio.Event()

    async def read(client: Client) -> None:
        async for event in client.stream(build_request("hello")):
            if event.WhichOneof("kind") == "chunk":
                first_chunk.set()

    async with Client(addr) as client:
        task = asyncio.create_task(read(client))
        await first_chunk.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await asyncio.to_thread(fake.gone.wait, 10)


async def test_status_and_details_arrive_unchanged(fake: FakeGeneration, addr: str) -> None:
    fake.refusal = (grpc.StatusCode.INVALID_ARGUMENT, "temperature must be at most 100, not 101")
    async with Client(addr) as client:
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await client.generate(build_request("hello", temperature=101))
        assert client.connected
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert raised.value.details() == "temperature must be at most 100, not 101"


async def test_model_info_and_abort(addr: str) -> None:
    async with Client(addr) as client:
        assert (await client.model_info()).sources == ["early_exit", "ngram"]
        await client.generate(build_request("hello", request_id="mine"))
        assert await client.abort("mine")
        assert not await client.abort("other")


async def test_not_connected_where_nobody_listens() -> None:
    with serving(FakeGeneration()) as address:
        pass
    async with Client(address) as client:
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await client.model_info()
        assert not client.connected
    assert raised.value.code() is grpc.StatusCode.UNAVAILABLE


def test_build_request_states_only_what_is_given() -> None:
    assert build_request("hi") == pb.GenerateRequest(text="hi")
    assert build_request("hi", stop=[], sources=[], logit_bias={}) == pb.GenerateRequest(text="hi")


def test_build_request_states_zeros_and_false() -> None:
    request = build_request("", temperature=0.0, top_k=0, ignore_eos=False, max_tokens=0, priority=0)
    assert request.WhichOneof("input") == "text"
    assert request.sampling.HasField("temperature")
    assert request.sampling.HasField("top_k")
    assert not request.sampling.HasField("top_p")
    assert request.stopping.HasField("max_tokens")
    assert request.stopping.HasField("ignore_eos")
    assert request.HasField("priority")
    assert not request.HasField("speculation")


def test_build_request_knows_every_field() -> None:
    full: dict[str, Any] = {
        "request_id": "r",
        "attempt": 1,
        "resume": [5],
        "model": "m",
        "temperature": 0.5,
        "top_k": 3,
        "top_p": 0.9,
        "min_p": 0.1,
        "seed": 2**64 - 1,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.1,
        "frequency_penalty": 0.2,
        "logit_bias": {3: -1.0},
        "max_tokens": 9,
        "min_tokens": 2,
        "stop": "end",
        "stop_token_ids": [4],
        "ignore_eos": True,
        "time_limit_ms": 1000,
        "speculation": True,
        "sources": ["ngram"],
        "max_draft_tokens": 2,
        "verification": "rejection",
        "logprobs": 1,
        "prompt_logprobs": 1,
        "echo": True,
        "trace_detail": True,
        "logits_digest": True,
        "n": 2,
        "priority": -1,
    }
    request = build_request(messages=[{"role": "user", "content": "hi"}], **full)
    unset = [
        f"{part.DESCRIPTOR.name}.{field.name}"
        for part in (request, request.sampling, request.stopping, request.speculation, request.output)
        for field in part.DESCRIPTOR.fields
        if field.name not in [set_field.name for set_field, _ in part.ListFields()] + ["text", "token_ids"]
    ]
    assert unset == []
    assert request.stopping.stop == ["end"]
    assert request.speculation.mode == pb.SpeculationParams.AUTO
    assert request.speculation.verification == common_pb2.VERIFICATION_REJECTION
    assert build_request("hi", speculation=False).speculation.mode == pb.SpeculationParams.OFF
    assert build_request(token_ids=[1, 2]).token_ids.token_ids == [1, 2]


@pytest.mark.parametrize(
    ("arguments", "words_of_it"),
    [
        ({}, "exactly one of prompt, messages and token_ids, not none"),
        ({"prompt": "hi", "token_ids": [1]}, "not prompt, token_ids"),
        ({"prompt": "hi", "max_tokens": -1}, "max_tokens cannot be -1"),
        ({"prompt": "hi", "top_k": 1.5}, "top_k cannot be 1.5"),
        ({"prompt": "hi", "temperature": "hot"}, "temperature cannot be 'hot'"),
        ({"prompt": "hi", "seed": 2**64}, "seed cannot be 18446744073709551616"),
        ({"prompt": "hi", "stop_token_ids": [2**32]}, "stop_token_ids cannot be"),
        ({"token_ids": [-1]}, "token_ids cannot be"),
        ({"prompt": "hi", "verification": "maybe"}, "verification is one of coupled, rejection, typical, not 'maybe'"),
        ({"messages": [{"role": "user"}]}, "a message has role and content, not role"),
    ],
)
def test_build_request_names_what_is_wrong(arguments: dict[str, Any], words_of_it: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        build_request(**arguments)
    assert words_of_it in str(raised.value)
