"""One trace per request over three processes, collected by a real OTLP receiver; none needed to serve."""

from __future__ import annotations

import asyncio
import itertools
import socket
import threading
from collections import defaultdict
from collections.abc import Iterator
from concurrent import futures
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from forerun.client import Client, build_request
from forerun.core.spans import DETAILED, SpanWindow
from forerun.up import UpOptions, started

pytestmark = pytest.mark.services

SIM = "sim:pass=20ms,step=2ms,accept=0.8,vocab=500,context=4096"
ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"


@dataclass
class Received:
    """A span as it was exported."""

    service: str
    name: str
    span_id: str
    parent_id: str
    start: int
    end: int
    attributes: dict[str, Any]


@dataclass
class Receiver(trace_service_pb2_grpc.TraceServiceServicer):  # type: ignore[misc]
    """An OTLP collector that keeps what it gets."""

    traces: dict[str, list[Received]] = field(default_factory=lambda: defaultdict(list))
    lock: Any = field(default_factory=threading.Lock)

    def Export(self, request: Any, context: Any) -> Any:
        with self.lock:
            for resource in request.resource_spans:
                service = next(a.value.string_value for a in resource.resource.attributes if a.key == "service.name")
                for scope in resource.scope_spans:
                    for span in scope.spans:
                        attributes = {
                            a.key: getattr(a.value, a.value.WhichOneof("value") or "string_value")
                            for a in span.attributes
                        }
                        self.traces[span.trace_id.hex()].append(
                            Received(
                                service,
                                span.name,
                                span.span_id.hex(),
                                span.parent_span_id.hex(),
                                span.start_time_unix_nano,
                                span.end_time_unix_nano,
                                attributes,
                            )
                        )
        return trace_service_pb2.ExportTraceServiceResponse()


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Receiver]:
    server = grpc.server(futures.ThreadPoolExecutor(2))
    receiver = Receiver()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(receiver, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    monkeypatch.setenv(ENDPOINT, f"http://127.0.0.1:{port}")
    yield receiver
    server.stop(None).wait()


async def answers(request: dict[str, Any], count: int = 1, **call: Any) -> list[Any]:
    """Answers of services that are started for them; they have sent their spans when this returns."""
    options = UpOptions(target=SIM, draft=("model",), port=0, quiet=True)
    async with started(options) as running, Client(running.address) as client:
        return [await client.generate(build_request(token_ids=[5, 6, 7], **request), **call) for _ in range(count)]


def overlaps(a: Received, b: Received) -> bool:
    return a.start < b.end and b.start < a.end


async def test_one_request_one_trace(receiver: Receiver) -> None:
    (answer,) = await answers({"temperature": 0.0, "max_tokens": DETAILED})
    spans = receiver.traces[answer.started.trace_id]
    assert {span.service for span in spans} == {"forerun-coordinator", "forerun-draft", "forerun-target"}
    roots = [span for span in spans if not span.parent_id]
    assert [(root.service, root.name) for root in roots] == [("forerun-coordinator", f"generate {SIM}")]
    known = {span.span_id for span in spans}
    assert [span.name for span in spans if span.parent_id and span.parent_id not in known] == []
    assert {"queue", "prefill", "verify", "draft.grow"} <= {span.name for span in spans}

    verify = sorted((span for span in spans if span.name == "verify"), key=lambda span: span.start)
    grow = [span for span in spans if span.name == "draft.grow"]
    usage = answer.usage
    assert sum(span.attributes["forerun.accepted"] for span in verify) == usage.accepted > 0
    assert sum(span.attributes["forerun.drafted"] for span in verify) == usage.drafted
    assert len(verify) == usage.passes <= DETAILED
    for span in verify:
        counts = span.attributes
        assert counts["forerun.rolled_back"] == counts["forerun.drafted"] - counts["forerun.accepted"]

    # Growth runs while a pass runs, and what was grown during one is accepted in the next.
    assert sum(any(overlaps(span, other) for other in grow) for span in verify) > len(verify) // 2
    assert any(
        later.attributes["forerun.accepted_fresh"] > 0 and any(overlaps(before, other) for other in grow)
        for before, later in itertools.pairwise(verify)
    )
    root = roots[0]
    for span in spans:
        assert root.start <= span.start
        assert span.service != "forerun-target" or span.end <= root.end + 50_000_000


async def test_a_caller_s_trace_is_joined(receiver: Receiver) -> None:
    trace, parent = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    (answer,) = await answers({"temperature": 0.0, "max_tokens": 5}, traceparent=f"00-{trace}-{parent}-01")
    assert answer.started.trace_id == trace
    spans = receiver.traces[trace]
    assert [span.parent_id for span in spans if span.name.startswith("generate")] == [parent]
    assert set(receiver.traces) == {trace}


async def test_a_long_answer_stays_readable(receiver: Receiver) -> None:
    (answer,) = await answers({"temperature": 0.0, "max_tokens": 600, "speculation": False})
    spans = receiver.traces[answer.started.trace_id]
    detailed = [span for span in spans if span.name == "verify"]
    windows = [span for span in spans if span.name == "decode.window"]
    assert len(detailed) == DETAILED
    assert sum(span.attributes["forerun.steps"] for span in windows) + DETAILED == answer.usage.passes == 600
    assert sum(span.attributes["forerun.committed"] for span in detailed + windows) == 600


@pytest.mark.parametrize("listening", [False, True])
async def test_a_collector_that_is_away_costs_nothing(monkeypatch: pytest.MonkeyPatch, listening: bool) -> None:
    """Refusing, or swallowing what it is sent: the answer comes, and the processes end in time."""
    silent = socket.create_server(("127.0.0.1", 0))  # the kernel accepts, nobody ever answers
    port = silent.getsockname()[1]
    if not listening:
        silent.close()
    monkeypatch.setenv(ENDPOINT, f"http://127.0.0.1:{port}")
    loop = asyncio.get_running_loop()
    options = UpOptions(target=SIM, draft=("model",), port=0, quiet=True)
    async with started(options) as running, Client(running.address) as client:
        answer = await client.generate(build_request(token_ids=[5], temperature=0.0, max_tokens=50))
        stopping = loop.time()
    assert answer.usage.completion == 50
    assert loop.time() - stopping < 7.0  # 2 s each for what the collector does not take, and the ends of processes
    assert [service.process.returncode for service in running.services if service.process] == [0, 0, 0]
    silent.close()


def test_windows_sum_and_flush() -> None:
    recorded: list[Any] = []
    window = SpanWindow(lambda *span: recorded.append(span), "parent", "one", "many")
    for step in range(DETAILED + 40):
        window.add(step, step + 1, {"forerun.committed": 2, "forerun.base_len": step})
    window.close()
    assert [span[1] for span in recorded] == ["one"] * DETAILED + ["many", "many"]
    first, second = recorded[-2:]
    assert (first[2], first[3], first[4]) == (32, 64, {"forerun.committed": 64, "forerun.steps": 32})
    assert second[4] == {"forerun.committed": 16, "forerun.steps": 8}
