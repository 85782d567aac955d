"""One trace per request across the processes. Spans are made by hand; context travels in messages.

Exported over OTLP when OTEL_EXPORTER_OTLP_ENDPOINT is set, from a bounded queue in a background
thread: a collector that is away costs dropped spans and nothing else. Without it nothing is made.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Mapping
from typing import Any

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import NonRecordingSpan, Span, SpanContext, SpanKind, TraceFlags

from forerun import __version__
from forerun.core.spans import Attributes

EXPORT_TIMEOUT_S = 3
FLUSH_S = 2.0
ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"


class Tracing:
    """Makes spans for one process. `exporter` None: tracing is off."""

    def __init__(self, service: str, exporter: SpanExporter | None) -> None:
        self._provider: TracerProvider | None = None
        if exporter is not None:
            resource = Resource.create({"service.name": service, "service.version": __version__})
            self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
            self._provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=500))
        self._tracer = trace.get_tracer("forerun", __version__, self._provider or trace.NoOpTracerProvider())

    @classmethod
    def from_environment(cls, service: str) -> Tracing:
        if not os.environ.get(ENDPOINT):
            return cls(service, None)
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

        for name in ("opentelemetry.sdk.trace.export", "opentelemetry.exporter.otlp.proto.grpc.exporter"):
            logging.getLogger(name).setLevel(logging.CRITICAL)  # a collector that is away is no news every second
        return cls(service, OTLPSpanExporter(insecure=True, timeout=EXPORT_TIMEOUT_S))

    @property
    def on(self) -> bool:
        return self._provider is not None

    def start(self, name: str, parent: str, start_ns: int, attributes: Attributes) -> Span:
        """An open server span below the W3C traceparent `parent` (empty: a new trace)."""
        return self._tracer.start_span(
            name, context=_context(parent), kind=SpanKind.SERVER, attributes=attributes, start_time=start_ns
        )

    def record(self, parent: str, name: str, start_ns: int, end_ns: int, attributes: Attributes) -> None:
        """A finished span; the form engines use (core.spans.Record)."""
        if self._provider is None or not parent:
            return
        span = self._tracer.start_span(name, context=_context(parent), start_time=start_ns, attributes=attributes)
        span.end(end_ns)

    def shutdown(self) -> None:
        """Send what can be sent in FLUSH_S. The library's own limit is per batch, hence the thread."""
        if self._provider is not None:
            ending = threading.Thread(target=self._provider.shutdown, name="trace-flush", daemon=True)
            ending.start()
            ending.join(FLUSH_S)


def traceparent_of(span: Span) -> str:
    """W3C form; empty if the span belongs to no trace."""
    context = span.get_span_context()
    if not context.is_valid:
        return ""
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"


def trace_id_of(span: Span) -> str:
    context = span.get_span_context()
    return f"{context.trace_id:032x}" if context.is_valid else ""


def traceparent_in(metadata: Mapping[str, Any]) -> str:
    """The caller's context, whatever the case of its header name."""
    for name, value in metadata.items():
        if name.lower() == "traceparent":
            return str(value)
    return ""


def _context(traceparent: str) -> Context:
    """Context holding the remote parent, or an empty one if there is none or it is malformed."""
    parts = traceparent.split("-")
    empty = trace.set_span_in_context(trace.INVALID_SPAN, Context())
    if len(parts) < 4 or len(parts[1]) != 32 or len(parts[2]) != 16:
        return empty
    try:
        context = SpanContext(int(parts[1], 16), int(parts[2], 16), True, TraceFlags(int(parts[3], 16)))
    except ValueError:
        return empty
    if not context.is_valid:
        return empty
    return trace.set_span_in_context(NonRecordingSpan(context), Context())
