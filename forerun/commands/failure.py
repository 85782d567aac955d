"""From a failure to one line on stderr and an exit status. The boundary of both commands."""

from __future__ import annotations

import asyncio
import signal
import sys
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import grpc
import typer

from forerun.client import Client
from forerun.core.errors import ForerunError

T = TypeVar("T")

FAILED = 1
INTERRUPTED = 130
TERMINATED = 143


class CallFailed(ForerunError):
    """A call ended with a status; the message says which, and what to do if nobody answered."""


@contextmanager
def explained(client: Client) -> Iterator[None]:
    """A status from a call of `client` becomes a CallFailed."""
    try:
        yield
    except grpc.aio.AioRpcError as error:
        details = " ".join((error.details() or "no details").split())
        if error.code() is grpc.StatusCode.UNIMPLEMENTED:
            raise CallFailed(
                f"{client.addr} does not take requests: it looks like the port that workers dial; the public one is the"
                " one before unless --attach-port said otherwise"
            ) from error
        silent = error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
        if silent and not client.connected:
            raise CallFailed(
                f"no coordinator answers at {client.addr}: start one with `forerun up`, or name another with --addr"
                f" ({error.code().name}: {details})"
            ) from error
        raise CallFailed(f"{error.code().name}: {details}") from error


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run a command. Every ForerunError is one line and status 1, Ctrl-C status 130, SIGTERM 143.

    Either signal cancels `main`, so that what it started is stopped and what it asked for is cancelled.
    """
    try:
        return asyncio.run(_cancelled_by_sigterm(main))
    except ForerunError as error:
        print(f"forerun: {error}", file=sys.stderr)
        raise typer.Exit(FAILED) from error
    except KeyboardInterrupt as error:
        print("forerun: interrupted", file=sys.stderr)
        raise typer.Exit(INTERRUPTED) from error
    except asyncio.CancelledError as error:
        print("forerun: terminated", file=sys.stderr)
        raise typer.Exit(TERMINATED) from error


async def _cancelled_by_sigterm(main: Coroutine[Any, Any, T]) -> T:
    task = asyncio.current_task()
    if task is not None and threading.current_thread() is threading.main_thread():
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    return await main
