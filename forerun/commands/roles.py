"""`forerun coordinator | draft-worker | target-worker | up | demo`: start services.

The role packages are imported when their command runs: a coordinator must not load torch.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import signal
import sys
from collections.abc import Callable, Coroutine
from typing import Annotated, Any

import typer
from rich.console import Console

from forerun.client import Client
from forerun.commands import failure
from forerun.commands.generate import has_chat_template, prompt_request, run_prompt
from forerun.commands.options import (
    Chains,
    Cores,
    Device,
    Draft,
    DraftCores,
    Dtype,
    KvMemory,
    Layers,
    Lookahead,
    MaxSequences,
    Model,
    OnDevice,
    Precision,
    TargetCores,
    Tp,
    parse_cores,
    parse_size,
)

Attach = Annotated[
    list[str], typer.Option("--attach", help="A coordinator's internal host:port, or dns:host:port; repeatable.")
]
Threads = Annotated[int, typer.Option(min=1, help="CPU threads.")]
Port = Annotated[int, typer.Option(min=0, max=65534, help="Public port; workers use the next one. 0: any free.")]
DEMO_PROMPT = "Why is the sky blue? Answer in three sentences."


def coordinator(
    model: Model = "demo",
    name: Annotated[str, typer.Option(help="What clients call the model. Default: as --model says.")] = "",
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=1, max=65535, help="Public port: the Generation API, health, reflection.")
    ] = 50051,
    attach_port: Annotated[int, typer.Option(min=1, max=65535, help="Internal port: workers dial it.")] = 50052,
    grace: Annotated[float, typer.Option(help="Seconds that running answers get at SIGTERM.")] = 30.0,
    max_requests: Annotated[int, typer.Option(min=1, help="At once; more get RESOURCE_EXHAUSTED.")] = 256,
    target_wait: Annotated[float, typer.Option(help="Seconds a request waits for a target to attach.")] = 10.0,
    metrics_port: Annotated[int, typer.Option(min=0, max=65535, help="Prometheus metrics; 0: none.")] = 0,
    stall: Annotated[float, typer.Option(help="Seconds one step of a worker's engine may take.")] = 30.0,
) -> None:
    """Run a coordinator: the public API, the ledger, and the port that workers dial."""
    from coordinator.main import CoordinatorOptions, serve

    options = CoordinatorOptions(
        model, name, host, port, attach_port, grace, max_requests, target_wait, metrics_port, stall
    )
    _run(lambda: serve(options))


def target_worker(
    attach: Attach,
    model: Model = "demo",
    dtype: Dtype = Precision.BFLOAT16,
    threads: Threads = 1,
    lookahead: Lookahead = 8,
    max_sequences: MaxSequences = 16,
    chains: Chains = False,
    ngram: Annotated[bool, typer.Option("--ngram/--no-ngram", help="Offer prompt and output lookup.")] = True,
    kv_memory: KvMemory = "auto",
    tp: Tp = 1,
    device: OnDevice = Device.AUTO,
    cores: Cores = "",
) -> None:
    """Run a target worker: the model whose words count."""
    from forerun.runtime.serving import LoadOptions
    from target_worker.main import TargetOptions, serve

    def options() -> TargetOptions:
        load = LoadOptions(model, dtype, threads, kv_memory=parse_size(kv_memory), tp=tp, device=device)
        return TargetOptions(load, attach, lookahead, max_sequences, ngram, chains)

    _run(lambda: serve(options()), cores)


def draft_worker(
    attach: Attach,
    model: Model = "demo",
    dtype: Dtype = Precision.BFLOAT16,
    threads: Threads = 1,
    layers: Annotated[int | None, typer.Option(min=1, help="Early exit: only the first layers of the model.")] = None,
    target: Annotated[
        str | None,
        typer.Option(help="Whose embedding a distilled draft shares. Default: the one it was made for, by name."),
    ] = None,
    max_sequences: Annotated[int, typer.Option(min=1, help="Sequences drafted for at once.")] = 64,
    width: Annotated[
        int, typer.Option(min=1, help="Most tree nodes grown in a step; fewer while more do not pay.")
    ] = 12,
    device: OnDevice = Device.AUTO,
    cores: Cores = "",
) -> None:
    """Run a draft worker: guesses ahead of the target.

    MODEL may also be a folder that `forerun distill` wrote, or `distilled`: the draft that ships for the target.
    """
    from draft_worker.main import DraftOptions, serve
    from forerun.runtime.serving import LoadOptions

    load = LoadOptions(model, dtype, threads, layers, device=device, target=target)
    options = DraftOptions(load, attach, max_sequences, width)
    _run(lambda: serve(options), cores)


def up(
    target: Annotated[str, typer.Option(help="The model whose words count: folder, hub id, demo or sim:...")] = "demo",
    draft: Draft = None,
    port: Port = 50051,
    dtype: Dtype = Precision.BFLOAT16,
    lookahead: Lookahead = 8,
    layers: Layers = 8,
    threads: Annotated[int, typer.Option(min=0, help="CPU threads of a target; 0: what the drafts leave.")] = 0,
    targets: Annotated[int, typer.Option(min=1, help="Target workers, each with the whole model.")] = 1,
    max_sequences: MaxSequences = 16,
    kv_memory: KvMemory = "auto",
    tp: Tp = 1,
    target_cores: TargetCores = "",
    draft_cores: DraftCores = "",
) -> None:
    """Start coordinator, target and draft on this machine, until Ctrl-C."""
    from forerun.up import UpOptions, source_names, started

    async def main() -> None:
        console = Console(stderr=True, soft_wrap=True)
        options = UpOptions(
            target,
            source_names(draft),
            port,
            dtype,
            lookahead,
            layers,
            threads,
            targets=targets,
            max_sequences=max_sequences,
            kv_memory=parse_size(kv_memory),
            tp=tp,
            target_cores=parse_cores(target_cores),
            draft_cores=parse_cores(draft_cores),
        )
        async with started(options) as running:
            stopped = asyncio.Event()
            for number in (signal.SIGTERM, signal.SIGINT):
                asyncio.get_running_loop().add_signal_handler(number, stopped.set)
            pids = ", ".join(f"{name} {pid}" for name, pid in running.pids().items())
            console.print(f"ready at [bold]{running.address}[/] (processes: {pids}; logs: {running.logs})")
            if kv := running.kv():
                console.print(kv + (", on each target" if targets > 1 else ""))
            console.print(f'try: forerun generate --addr {running.address} "Why is the sky blue?"')
            watch = asyncio.ensure_future(running.watch())
            stop = asyncio.ensure_future(stopped.wait())
            await asyncio.wait({watch, stop}, return_when=asyncio.FIRST_COMPLETED)
            stop.cancel()
            if watch.done():
                watch.result()
            watch.cancel()

    failure.run(main())


def demo(
    prompt: Annotated[str, typer.Argument(help="What to answer.")] = DEMO_PROMPT,
    target: Annotated[str, typer.Option(help="Model, as for `forerun up`.")] = "demo",
    draft: Draft = None,
    layers: Layers = 8,
    max_tokens: Annotated[int, typer.Option(min=1)] = 200,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    seed: Annotated[int | None, typer.Option(help="Only matters above temperature 0.")] = None,
) -> None:
    """Start the three services, stream one answer, print a line of figures, stop."""
    from forerun.up import UpOptions, source_names, started

    async def main() -> None:
        async with (
            started(UpOptions(target, source_names(draft), port=0, early_exit_layers=layers)) as running,
            Client(running.address) as client,
        ):
            with failure.explained(client):
                chat = await has_chat_template(client)
                knobs: dict[str, Any] = {"max_tokens": max_tokens, "temperature": temperature, "seed": seed}
                await run_prompt(client, prompt_request(prompt, chat=chat, **knobs))

    failure.run(main())


def _run(serve: Callable[[], Coroutine[Any, Any, None]], cores: str = "") -> None:
    """A role's process, pinned first: plain logs on stderr; refusals are one line, faults are loud."""

    async def pinned() -> None:
        if numbers := parse_cores(cores):
            os.sched_setaffinity(0, numbers)  # this thread; those that the role starts inherit it
        await serve()

    _end_with_parent()
    logging.basicConfig(
        level=os.environ.get("FORERUN_LOG", "INFO").upper(),
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )
    try:
        failure.run(pinned())
    except OSError as error:
        print(f"forerun: {error}", file=sys.stderr)
        raise typer.Exit(failure.FAILED) from error


def _end_with_parent() -> None:
    """SIGTERM to this process when the one that started it for itself is gone (Linux; nothing elsewhere)."""
    from forerun.up import PARENT

    parent = os.environ.pop(PARENT, "")
    if not parent or not sys.platform.startswith("linux"):
        return
    set_parent_death_signal = 1
    ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGTERM)
    if os.getppid() != int(parent):  # it went before this was asked for
        raise typer.Exit(failure.FAILED)
