"""The coordinator process: two ports, one event loop, no torch.

Started as `forerun coordinator`. Not serving in health until a target is attached; SIGTERM says not
serving first, then lets running answers finish within the grace, then exits 0.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from dataclasses import dataclass

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer
from grpc_reflection.v1alpha import reflection

from coordinator.attachment import Attachment
from coordinator.links import Pool
from coordinator.router import Router, RouterConfig
from coordinator.service import Generation, Served
from forerun.core.errors import InvalidRequest, ModelRefused
from forerun.rpc.options import server_options
from forerun.runtime.models import resolve, revision
from forerun.runtime.sim import PREFIX, SimSpec
from forerun.telemetry.metrics import CoordinatorMetrics
from forerun.telemetry.tracing import Tracing
from forerun.text import TextModel
from forerun.v1 import attach_pb2, attach_pb2_grpc, generation_pb2, generation_pb2_grpc

log = logging.getLogger(__name__)

PUBLIC = "forerun.v1.Generation"


@dataclass(frozen=True, slots=True)
class CoordinatorOptions:
    model: str
    name: str = ""  # what clients call it; empty: `model`
    host: str = "127.0.0.1"
    port: int = 50051
    attach_port: int = 50052
    grace_s: float = 30.0
    max_requests: int = 256
    target_wait_s: float = 10.0
    metrics_port: int = 0  # 0: no metrics
    stall_s: float = 30.0  # a worker whose engine is in one step for so long is given up


async def serve(options: CoordinatorOptions) -> None:
    """Runs until SIGTERM or SIGINT. Raises InvalidRequest, ModelRefused, or OSError if a port is taken."""
    if options.port == options.attach_port:
        raise InvalidRequest(f"--port and --attach-port are both {options.port}; workers need one of their own")
    folder = resolve(options.model, weights=False)
    if folder.startswith(PREFIX):
        SimSpec.parse(folder)  # names what is misspelt
    served = Served(
        tuple(dict.fromkeys((options.name or options.model, options.model, folder))), TextModel.load(folder)
    )
    tracing = Tracing.from_environment("forerun-coordinator")
    health = HealthServicer()

    async def tell_health(targets: int) -> None:
        status = health_pb2.HealthCheckResponse
        now = status.SERVING if targets else status.NOT_SERVING
        for name in ("", PUBLIC):
            await health.set(name, now)

    loop = asyncio.get_running_loop()
    telling: set[asyncio.Task[None]] = set()

    def pool_changed(pool: Pool) -> None:
        task = loop.create_task(tell_health(len(pool.targets)))
        telling.add(task)
        task.add_done_callback(telling.discard)

    pool = Pool(pool_changed)
    router = Router(pool, RouterConfig(options.max_requests, options.target_wait_s))
    await tell_health(0)
    metrics = CoordinatorMetrics()
    metrics.watch("forerun_running_requests", "Requests that are being answered.", lambda: router.session_count)
    metrics.watch("forerun_attached_targets", "Target workers attached now.", lambda: len(pool.targets))
    metrics.watch("forerun_attached_drafts", "Draft workers attached now.", lambda: len(pool.drafts))
    if options.metrics_port:
        try:
            metrics.serve(options.host, options.metrics_port)
        except OSError as error:
            raise OSError(f"cannot serve metrics on {options.host}:{options.metrics_port}: {error.strerror}") from None

    public = grpc.aio.server(options=server_options())
    generation_pb2_grpc.add_GenerationServicer_to_server(Generation(served, router, tracing, metrics), public)
    health_pb2_grpc.add_HealthServicer_to_server(health, public)
    public_names = (
        generation_pb2.DESCRIPTOR.services_by_name["Generation"].full_name,
        health_pb2.DESCRIPTOR.services_by_name["Health"].full_name,
        reflection.SERVICE_NAME,
    )
    reflection.enable_server_reflection(public_names, public)
    internal = grpc.aio.server(options=server_options())
    name = f"{socket.gethostname()}:{options.port}"
    attach_pb2_grpc.add_AttachmentServicer_to_server(
        Attachment(name, router, _revision(folder), options.stall_s), internal
    )
    internal_names = (attach_pb2.DESCRIPTOR.services_by_name["Attachment"].full_name, reflection.SERVICE_NAME)
    reflection.enable_server_reflection(internal_names, internal)

    _bind(public, options.host, options.port)
    _bind(internal, options.host, options.attach_port)
    await public.start()
    await internal.start()
    log.info("serving %s on %s:%d, workers on %d", options.model, options.host, options.port, options.attach_port)

    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    await stopping.wait()
    log.info("draining, at most %g s", options.grace_s)
    await health.enter_graceful_shutdown()
    await public.stop(options.grace_s)
    await internal.stop(0.5)
    await asyncio.to_thread(tracing.shutdown)


def _revision(folder: str) -> str:
    """What its targets must say; empty where the weights are not at hand."""
    if folder.startswith(PREFIX):
        return folder
    try:
        return revision(folder)
    except ModelRefused:
        return ""


def _bind(server: grpc.aio.Server, host: str, port: int) -> None:
    try:
        got = server.add_insecure_port(f"{host}:{port}")
    except RuntimeError as error:
        raise OSError(f"cannot listen on {host}:{port}: {error}; is the port taken?") from None
    if got != port:
        raise OSError(f"cannot listen on {host}:{port}: gRPC took port {got}; ports are 1 to 65535")


def run(options: CoordinatorOptions) -> None:
    asyncio.run(serve(options))
