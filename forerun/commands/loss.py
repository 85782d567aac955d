"""The loss of a worker in mid-answer, on purpose."""

from __future__ import annotations

import asyncio

from forerun.up import Service


class Loss:
    """A target that is killed once `after` tokens were counted, and started again at once."""

    def __init__(self, victim: Service, after: int) -> None:
        self._victim = victim
        self._left = after
        self._due = asyncio.Event()
        self._task: asyncio.Task[None]

    def count(self, tokens: int) -> None:
        self._left -= tokens
        if self._left <= 0:
            self._due.set()

    async def __aenter__(self) -> Loss:
        self._task = asyncio.create_task(self._strike())
        return self

    async def __aexit__(self, *failure: object) -> None:
        """Waits for the start of a target that was killed; one that was not is let live."""
        if not self._due.is_set():
            self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=not self._due.is_set())

    async def _strike(self) -> None:
        await self._due.wait()
        await self._victim.kill()
        await self._victim.start()
