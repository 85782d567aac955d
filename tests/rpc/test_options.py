"""The two settings behind all channel options: pings that are always welcome, sizes that fit everywhere."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from concurrent.futures import ThreadPoolExecutor
from typing import Self

import grpc
import pytest

from forerun.client import Client, build_request
from forerun.rpc.options import GONE_FACTOR, KEEPALIVE_S, MAX_MESSAGE_BYTES, client_options, server_options
from tests.rpc.fake_generation import FakeGeneration, serving

SHORT_S = 1.0
"""gRPC keeps no connection alive more often."""

QUIET_S = 4.5
"""Time for four pings; a server with gRPC's defaults hangs up at the third."""


def test_the_client_pings_no_more_often_than_the_server_permits() -> None:
    client, server = dict(client_options()), dict(server_options())
    assert client["grpc.keepalive_time_ms"] == KEEPALIVE_S * 1000
    assert server["grpc.http2.min_ping_interval_without_data_ms"] <= client["grpc.keepalive_time_ms"] / 2
    assert client["grpc.keepalive_permit_without_calls"] == server["grpc.keepalive_permit_without_calls"] == 1


async def test_quiet_connections_are_left_alone() -> None:
    """One with an open stream, one without any call."""
    fake = FakeGeneration()
    fake.hangs_after = 0
    options = client_options(SHORT_S)
    with serving(fake, server_options(SHORT_S)) as address:
        async with Client(address, options=options) as client, grpc.aio.insecure_channel(address, options) as idle:
            events = client.stream(build_request("hello"))
            await asyncio.gather(anext(events), idle.channel_ready())
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(both_end(events, idle), QUIET_S)


async def both_end(events: AsyncIterator[object], channel: grpc.aio.Channel) -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(ended(anext(events)))
        group.create_task(ended(channel.wait_for_state_change(grpc.ChannelConnectivity.READY)))


async def ended(quiet: Awaitable[object]) -> None:
    raise AssertionError(f"not quiet: {await quiet}")


async def test_a_server_with_other_options_hangs_up() -> None:
    """What the test above would see if the options did nothing."""
    fake = FakeGeneration()
    fake.hangs_after = 0
    with serving(fake, []) as address:
        async with Client(address, options=client_options(SHORT_S)) as client:
            events = client.stream(build_request("hello"))
            await anext(events)
            with pytest.raises(grpc.aio.AioRpcError, match="Too many pings"):
                await anext(events)


class Wire:
    """A TCP connection through this process, which can go silent without closing."""

    def __init__(self, address: str) -> None:
        self.host, port = address.split(":")
        self.port = int(port)
        self.silent = False
        self.directions: list[asyncio.Task[None]] = []
        self.connections: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        self.listener = await asyncio.start_server(self.connect, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self.listener.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self.listener.close()
        for direction in self.directions:
            direction.cancel()
        await asyncio.gather(*self.connections)

    async def connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.connections.append(task)
        far_reader, far_writer = await asyncio.open_connection(self.host, self.port)
        pairs = ((reader, far_writer), (far_reader, writer))
        self.directions += (directions := [asyncio.create_task(self.forward(*pair)) for pair in pairs])
        await asyncio.gather(*directions, return_exceptions=True)
        for _, side in pairs:
            side.close()
            await asyncio.gather(side.wait_closed(), return_exceptions=True)

    async def forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            if not self.silent:
                writer.write(data)
                await writer.drain()


async def test_a_frozen_peer_is_noticed() -> None:
    """Its TCP connection stays open and acknowledges; nothing answers any more."""
    fake = FakeGeneration()
    fake.hangs_after = 0
    with serving(fake) as address:
        async with Wire(address) as wire, Client(wire.address, options=client_options(SHORT_S)) as client:
            events = client.stream(build_request("hello"))
            await anext(events)
            wire.silent = True
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await asyncio.wait_for(anext(events), SHORT_S * GONE_FACTOR + 3)
    assert raised.value.code() is grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize("size", [6_000_000, MAX_MESSAGE_BYTES - 1000, MAX_MESSAGE_BYTES + 1000])
async def test_large_prompts_reach_the_entry(size: int) -> None:
    """Also one that is too large, so that the entry can say so itself."""
    fake = FakeGeneration()
    with serving(fake) as address:
        async with Client(address) as client:
            await client.generate(build_request("x" * size))
    assert len(fake.requests[0].text) == size


async def test_many_token_ids_reach_the_entry() -> None:
    with serving(FakeGeneration()) as address:
        async with Client(address) as client:
            response = await client.generate(build_request(token_ids=[128_000] * 1_500_000))
    assert response.started.prompt_tokens == 1_500_000


def test_a_port_in_use_is_an_error() -> None:
    with serving(FakeGeneration()) as address:
        second = grpc.server(ThreadPoolExecutor(1), options=server_options())
        with pytest.raises(RuntimeError):
            second.add_insecure_port(address)
        second.stop(None)
