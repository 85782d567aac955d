"""Draws one request as its trace saw it: target passes above, draft growth below, on one time axis.

    python benchmarks/timeline.py --out docs/overlap.svg

Starts the services with a small OTLP receiver of its own, so what is drawn is what any trace backend would get.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import threading
from concurrent import futures
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from forerun.client import Client, build_request
from forerun.telemetry.tracing import ENDPOINT
from forerun.up import UpOptions, started

WIDTH, LEFT, BAR, TOP = 1000, 70, 26, 46
INK, GREEN, GREY, BLUE = "#222", "#3a9d5d", "#c9ccd1", "#4a7fc1"


@dataclass(frozen=True, slots=True)
class Bar:
    """A span that matters here."""

    name: str
    start: int
    end: int
    counts: dict[str, int]


class Receiver(trace_service_pb2_grpc.TraceServiceServicer):
    """Keeps `verify` and `draft.grow` spans."""

    def __init__(self) -> None:
        self.bars: list[Bar] = []
        self._lock = threading.Lock()

    def Export(self, request: Any, context: Any) -> Any:
        for resource in request.resource_spans:
            for scope in resource.scope_spans:
                for span in scope.spans:
                    if span.name in ("verify", "draft.grow"):
                        counts = {a.key: a.value.int_value for a in span.attributes}
                        with self._lock:
                            self.bars.append(Bar(span.name, span.start_time_unix_nano, span.end_time_unix_nano, counts))
        return trace_service_pb2.ExportTraceServiceResponse()


async def collect(target: str, draft: str, tokens: int) -> list[Bar]:
    server = grpc.server(futures.ThreadPoolExecutor(2))
    receiver = Receiver()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(receiver, server)
    os.environ[ENDPOINT] = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    async with started(UpOptions(target=target, draft=(draft,), port=0)) as running, Client(running.address) as client:
        await client.generate(build_request("hello", temperature=0.0, max_tokens=tokens))
    server.stop(1.0).wait()
    return receiver.bars


def draw(bars: list[Bar], title: str) -> str:
    """SVG of the spans; a pass shows how many of its checked nodes were accepted."""
    begin = min(bar.start for bar in bars)
    scale = (WIDTH - LEFT - 12) / max(bar.end - begin for bar in bars)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="150"',
        ' font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="{LEFT}" y="20" fill="{INK}" font-size="14">{title}</text>',
    ]
    for row, (name, label) in enumerate((("verify", "target"), ("draft.grow", "draft"))):
        y = TOP + row * (BAR + 8)
        parts.append(f'<text x="8" y="{y + 17}" fill="{INK}">{label}</text>')
        for bar in sorted((bar for bar in bars if bar.name == name), key=lambda bar: bar.start):
            x, width = LEFT + (bar.start - begin) * scale, max(1.0, (bar.end - bar.start) * scale - 1)
            accepted = bar.counts.get("forerun.accepted", 0)
            colour = BLUE if name == "draft.grow" else GREEN if accepted else GREY
            parts.append(f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{BAR}" rx="2" fill="{colour}"/>')
            figure = bar.counts.get("forerun.nodes", 0) if name == "draft.grow" else bar.counts["forerun.committed"]
            if width > 12:
                parts.append(
                    f'<text x="{x + width / 2:.1f}" y="{y + 17}" fill="white" text-anchor="middle">{figure}</text>'
                )
    y = TOP + 2 * (BAR + 8) + 16
    for x, colour, text in (
        (LEFT, GREEN, "a pass with accepted guesses (tokens committed)"),
        (LEFT + 330, GREY, "a pass without (1 token)"),
        (LEFT + 500, BLUE, "growth of the tree (nodes)"),
    ):
        parts.append(f'<rect x="{x}" y="{y - 10}" width="12" height="12" fill="{colour}"/>')
        parts.append(f'<text x="{x + 18}" y="{y}" fill="{INK}">{text}</text>')
    span_ms = max(bar.end - begin for bar in bars) / 1e6
    parts.append(f'<text x="{WIDTH - 12}" y="{y}" fill="{INK}" text-anchor="end">{span_ms:.0f} ms</text></svg>')
    return "\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="sim:pass=30ms,step=3ms,accept=0.8,vocab=1000")
    parser.add_argument("--draft", default="model")
    parser.add_argument("--tokens", type=int, default=60)
    parser.add_argument("--out", type=Path, default=Path("docs/overlap.svg"))
    asked = parser.parse_args()
    bars = asyncio.run(collect(asked.target, asked.draft, asked.tokens))
    asked.out.write_text(draw(bars, f"one request, {asked.tokens} tokens, {asked.target}"))
    print(f"{len(bars)} spans drawn in {asked.out}")


if __name__ == "__main__":
    main()
