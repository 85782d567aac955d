"""Where a benchmark's answers come from: a coordinator that runs already, or services of its own."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

from forerun import up
from forerun.client import Client
from forerun.commands import failure
from forerun.core.errors import InvalidRequest
from forerun.v1 import generation_pb2


@dataclass(frozen=True, slots=True)
class Opened:
    """Services that answer, and what they say of themselves."""

    client: Client
    info: generation_pb2.GetModelInfoResponse
    running: up.Running | None  # None: not ours

    @property
    def ours(self) -> up.Running:
        """Raises InvalidRequest if they are somebody else's."""
        if self.running is None:
            raise InvalidRequest("services at --addr are not ours to stop; leave --addr out")
        return self.running


@dataclass(frozen=True, slots=True)
class Services:
    """`options` say what is started, unless `addr` names a coordinator."""

    options: up.UpOptions
    addr: str | None = None

    @asynccontextmanager
    async def open(self, **changes: Any) -> AsyncIterator[Opened]:
        """`changes` to the options need services of our own. Raises InvalidRequest if they are not."""
        if self.addr is not None:
            if changes:
                raise InvalidRequest(f"services with another {', '.join(changes)} have to be ours; leave --addr out")
            async with _opened(self.addr, None) as opened:
                yield opened
            return
        async with (
            up.started(replace(self.options, port=0, **changes)) as running,
            _opened(running.address, running) as opened,
        ):
            yield opened


@asynccontextmanager
async def _opened(address: str, running: up.Running | None) -> AsyncIterator[Opened]:
    async with Client(address) as client:
        with failure.explained(client):
            info = await client.model_info()
        yield Opened(client, info, running)
