"""All three services on this machine, as processes of their own: no Ray, no cluster.

Starts them, waits until an answer is possible, watches them, and takes them down together. It talks
to them as anybody would: command line, signals, health.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import grpc.aio
from rich.console import Console

from forerun.client import Client
from forerun.core.errors import ForerunError, ModelRefused
from forerun.core.params import Source
from forerun.rpc.options import client_options
from forerun.runtime.distill.draft import is_draft, shipped, shipped_draft
from forerun.runtime.models import resolve
from forerun.runtime.sim import PREFIX, SimSpec

TARGET, DRAFT = "target", "draft"
"""Names of the services; a second target is target-2."""

PARENT = "FORERUN_PARENT"
"""Process whose end ends a service, however it comes: it is started for that process alone."""

EARLY_EXIT_LAYERS = 8
READY_S = 1800.0
"""A large model from a cold disk takes its time; who ends while it starts is noticed at once."""
TARGET_WAIT_S = 120.0
"""What a request waits for a target that is started again: it loads and measures first."""
STOP_S = 10.0
GRACE_S = 5.0
"""What running answers get when everything stops; less than a process gets to end."""

PAUSE_S = (0.5, 30.0)
"""Before a worker that ended is started again, at first and at most: it doubles until one lasts that long."""

KV_LINE = "KV up to "
"""How a target says in its log what its KV may take."""


class ServiceFailed(ForerunError):
    """A service ended before it was told to."""


@dataclass(frozen=True, slots=True)
class UpOptions:
    """What `forerun up` starts.

    draft: sources; a model folder, hub id or sim:... stands for itself. None named: what ships for the target or else
    early exit, and lookup.
    """

    target: str = "demo"
    draft: Sequence[str] = ()
    port: int = 50051
    dtype: str = "bfloat16"
    lookahead: int = 8
    early_exit_layers: int = EARLY_EXIT_LAYERS
    threads: int = 0  # of a rank of a target; 0: all its cores but one, which is the draft's, divided among ranks
    quiet: bool = False
    targets: int = 1
    max_sequences: int = 16
    kv_memory: int | None = None  # bytes of each target; None: from what is free
    tp: int = 1
    chains: bool = False
    target_cores: tuple[int, ...] = ()  # none: all
    draft_cores: tuple[int, ...] = ()


@dataclass(slots=True)
class Service:
    name: str
    arguments: list[str]
    log: Path
    process: asyncio.subprocess.Process | None = None

    @property
    def is_target(self) -> bool:
        return self.name == TARGET or self.name.startswith(f"{TARGET}-")

    async def start(self) -> None:
        # A session of its own: the terminal's Ctrl-C reaches `up`, which decides who stops when.
        with self.log.open("ab") as log:
            self.process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-P",  # not from wherever this was started
                "-m",
                "forerun.cli",
                *self.arguments,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={**os.environ, PARENT: str(os.getpid())},
            )

    def check(self) -> None:
        """Raises ServiceFailed with the end of its log if it is not running."""
        if self.process is not None and self.process.returncode is not None:
            tail = "\n".join(self.log.read_text(errors="replace").splitlines()[-15:])
            raise ServiceFailed(f"{self.name} {_ended(self.process.returncode)}:\n{tail}")

    async def end(self) -> str:
        """Waits for it; says how it came."""
        assert self.process is not None, f"{self.name} was never started"
        return _ended(await self.process.wait())

    async def kill(self) -> None:
        """As a crash: nothing is said. `start` brings it back."""
        if self.process is not None and self.process.returncode is None:
            self.process.kill()
            await self.process.wait()

    async def stop(self) -> None:
        if self.process is None or self.process.returncode is not None:
            return
        with suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(self.process.wait(), STOP_S)
        except TimeoutError:
            self.process.kill()
            await self.process.wait()


@dataclass(slots=True)
class Running:
    """The services and where they answer."""

    address: str
    services: list[Service]
    logs: Path
    console: Console = field(default_factory=lambda: Console(stderr=True))
    _ready_s: float = 0.0  # from start until all were attached

    async def watch(self) -> None:
        """Starts workers again that end. Returns never; raises ServiceFailed when the coordinator ends."""
        coordinator, *workers = self.services
        tasks: list[asyncio.Future[Any]] = [asyncio.ensure_future(coordinator.end())]
        tasks += [asyncio.ensure_future(self._keep(worker)) for worker in workers]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
        coordinator.check()

    async def _keep(self, worker: Service) -> None:
        loop = asyncio.get_running_loop()
        pause, began = 0.0, loop.time()
        while True:
            how = await worker.end()
            pause = next_pause(pause, loop.time() - began - self._ready_s)
            self.console.print(f"{worker.name} {how}; starting it again in {pause:g} s; its log: {worker.log}")
            await asyncio.sleep(pause)
            began = loop.time()
            await worker.start()

    @property
    def targets(self) -> list[Service]:
        return [service for service in self.services if service.is_target]

    async def ready(self) -> None:
        """Returns when all are attached. Raises ServiceFailed."""
        began = asyncio.get_running_loop().time()
        await _ready(self)
        self._ready_s = asyncio.get_running_loop().time() - began

    def pids(self) -> dict[str, int]:
        return {service.name: service.process.pid for service in self.services if service.process}

    def kv(self) -> str:
        """What the KV of a target may take, in its own words; empty if it has not said."""
        said = self.targets[0].log.read_text(errors="replace").partition(KV_LINE)[1:]
        return "".join(said).partition("\n")[0]


def next_pause(before: float, lasted: float) -> float:
    """Seconds until a worker that lasted so long is started again. before: the pause that preceded it."""
    first, most = PAUSE_S
    return first if lasted >= most else min(max(first, 2 * before), most)


def _ended(status: int) -> str:
    return f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"


def plan(options: UpOptions, folder: str, attach_port: int, logs: Path) -> list[Service]:
    """The processes and their command lines. Raises ModelRefused for a source that is none."""
    options = replace(options, draft=options.draft or default_sources(folder))
    cores = len(options.target_cores or os.sched_getaffinity(0))
    drafts_apart = bool(options.target_cores and options.draft_cores)
    model_drafts = [source for source in options.draft if source not in ("ngram", "none")]
    if len(model_drafts) > 1:
        raise ModelRefused(f"one draft worker is started here; choose one of {', '.join(model_drafts)}")
    target_threads = options.threads or max(1, (cores - (0 if drafts_apart else len(model_drafts))) // options.tp)
    attach = ["--attach", f"127.0.0.1:{attach_port}"]
    public = ["--port", str(options.port), "--attach-port", str(attach_port), "--grace", str(GRACE_S)]
    public += ["--target-wait", str(TARGET_WAIT_S)]
    common = ["--dtype", options.dtype]
    services = [
        Service(
            "coordinator",
            ["coordinator", "--model", folder, "--name", options.target, *public],
            logs / "coordinator.log",
        ),
    ]
    target = ["target-worker", "--model", folder, "--threads", str(target_threads), *common, *attach]
    target += ["--lookahead", str(options.lookahead), "--max-sequences", str(options.max_sequences)]
    target += ["--tp", str(options.tp), *_pinned(options.target_cores)]
    target += [] if options.kv_memory is None else ["--kv-memory", str(options.kv_memory)]
    target += ["--chains"] if options.chains else []
    target += [] if "ngram" in options.draft else ["--no-ngram"]
    for number in range(1, options.targets + 1):
        name = TARGET if number == 1 else f"{TARGET}-{number}"
        services.append(Service(name, target, logs / f"{name}.log"))
    for source in model_drafts:
        if source in (Source.EARLY_EXIT.label, Source.MODEL.label):
            early = source == Source.EARLY_EXIT.label and not folder.startswith(PREFIX)
            chosen = ["--model", folder, *(["--layers", str(options.early_exit_layers)] if early else [])]
        else:
            found = _model_of(source, folder)
            chosen = ["--model", found, *(["--target", folder] if is_draft(found) else [])]
        draft = ["draft-worker", *chosen, "--threads", "1", *common, *attach, *_pinned(options.draft_cores)]
        services.append(Service(DRAFT, draft, logs / "draft.log"))
    return services


def _model_of(source: str, folder: str) -> str:
    """The folder (or sim:...) of a draft with weights of its own. Raises ModelRefused for a source that is none."""
    if source == Source.DISTILLED.label:
        return shipped_draft(folder)
    if source.startswith(PREFIX) or source == "demo" or "/" in source or Path(source).exists():
        return resolve(source)
    known = ", ".join(["none", *(known.label for known in Source)])
    raise ModelRefused(f"no hint source is called {source!r}; there are {known}, or a model's folder or hub id")


def draft_folder(options: UpOptions) -> str | None:
    """Of the draft that `up` starts; None if it has no weights of its own. Raises ModelRefused."""
    folder = resolve(options.target)
    shared = {Source.EARLY_EXIT.label, Source.MODEL.label, Source.NGRAM.label, "none"}
    own = [source for source in options.draft or default_sources(folder) if source not in shared]
    found = _model_of(own[0], folder) if own else PREFIX
    return None if found.startswith(PREFIX) else found


def _pinned(cores: Sequence[int]) -> list[str]:
    return ["--cores", ",".join(map(str, cores))] if cores else []


@asynccontextmanager
async def started(options: UpOptions) -> AsyncIterator[Running]:
    """The services, ready to answer. Raises ModelRefused, ServiceFailed. Logs stay if a service failed."""
    console = Console(stderr=True, quiet=options.quiet, soft_wrap=True)
    for source in (options.target, *options.draft):
        if source.startswith(PREFIX):
            SimSpec.parse(source)
    port = options.port or free_port()
    attach_port = free_port() if options.port == 0 else port + 1
    _check_free(port, attach_port)
    folder = await asyncio.to_thread(resolve, options.target)  # converts with its own progress bar
    with _logs() as logs:
        services = plan(replace(options, port=port), folder, attach_port, Path(logs))
        running = Running(f"127.0.0.1:{port}", services, Path(logs), console)
        names = ", ".join(service.name for service in services)
        console.print(f"starting {names}; logs: {logs}", style="dim")
        try:
            with console.status(f"starting {names}"):
                for service in services:
                    await service.start()
                await running.ready()
            yield running
        finally:
            with console.status("stopping"):
                await running.services[0].stop()  # it finishes answers, for which it needs the workers
                await asyncio.gather(*(service.stop() for service in running.services[1:]))


def default_sources(folder: str) -> tuple[str, ...]:
    """For the target in `folder`, if none are named."""
    draft = Source.EARLY_EXIT if shipped(folder) is None else Source.DISTILLED
    return draft.label, Source.NGRAM.label


def source_names(text: str | None) -> tuple[str, ...]:
    """Comma-joined sources; the commas of one sim:... belong to it. None: as UpOptions has it by default.

    Raises ModelRefused if there is none.
    """
    if text is None:
        return ()
    names: list[str] = []
    for part in filter(None, text.split(",")):
        if names and names[-1].startswith("sim:") and "=" in part:
            names[-1] += "," + part
        else:
            names.append(part)
    if not names:
        raise ModelRefused("no hint source is named; 'none' is one")
    return tuple(names)


async def _ready(running: Running) -> None:
    """Until the targets and the drafts are attached. Raises ServiceFailed."""
    targets = len(running.targets)
    drafts = sum(service.name == DRAFT for service in running.services)
    loop = asyncio.get_running_loop()
    deadline = loop.time() + READY_S
    async with Client(running.address, options=client_options()) as client:
        while True:
            for service in running.services:
                service.check()
            try:
                info = await client.model_info(timeout_s=1.0)
                if info.targets >= targets and info.drafts >= drafts:
                    return
            except grpc.aio.AioRpcError as error:
                if error.code() not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                    raise
            if loop.time() > deadline:
                raise ServiceFailed(
                    f"the services were not ready within {READY_S:g} s; their logs are in {running.logs}"
                )
            await asyncio.sleep(0.1)


@contextmanager
def _logs() -> Iterator[str]:
    """A folder that goes when all went well."""
    folder = tempfile.mkdtemp(prefix="forerun-")
    try:
        yield folder
    except ServiceFailed:
        raise
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    shutil.rmtree(folder, ignore_errors=True)


def _check_free(*ports: int) -> None:
    """Another service on a port would answer in the place of ours."""
    for port in ports:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except (OSError, OverflowError) as error:
                raise ServiceFailed(
                    f"port {port} of 127.0.0.1 cannot be used ({error}); --port takes P where P and P+1 are free"
                ) from None


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
