"""A Generation service without models: the answer to a prompt is a run of numbered words.

It runs on grpc's threads, so tests may drive it from an event loop or from the command line's own.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc

from forerun.rpc.options import Options, server_options
from forerun.v1 import generation_pb2 as pb
from forerun.v1 import generation_pb2_grpc

DEFAULT_TOKENS = 8
SPECULATIVE_CHUNK = 3
DRAFTED_PER_PASS = 4
TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"


def words(token_ids: Sequence[int]) -> str:
    return "".join(f"w{token_id} " for token_id in token_ids)


def prompt_of(request: pb.GenerateRequest) -> str:
    if request.WhichOneof("input") == "chat":
        return str(request.chat.messages[-1].content)
    return str(request.text)


def answer_to(prompt: str, tokens: int) -> list[int]:
    first = zlib.crc32(prompt.encode()) % 1000
    return [first + index for index in range(tokens)]


def digest_of(token_id: int) -> int:
    return (token_id * 0x9E3779B97F4A7C15) % (1 << 64)


def shared_len(one: Sequence[int], other: Sequence[int]) -> int:
    differing = (index for index, (mine, theirs) in enumerate(zip(one, other, strict=False)) if mine != theirs)
    return next(differing, min(len(one), len(other)))


class FakeGeneration(generation_pb2_grpc.GenerationServicer):
    """Set the fields a test needs; read `requests` and `metadata` afterwards."""

    def __init__(self) -> None:
        self.refusal: tuple[grpc.StatusCode, str] | None = None
        self.breaks_after: int | None = None  # chunks, then INTERNAL
        self.hangs_after: int | None = None  # chunks, then nothing until the client is gone
        self.differs_on: set[str] = set()  # prompts whose speculative answer is wrong
        self.logits_differ: dict[str, int] = {}  # by prompt: position whose speculative logits are wrong
        self.digests = True  # False: none are sent, whatever was asked
        self.usage: dict[str, int] = {}  # over what the fake counts itself
        self.not_exact = False
        self.preempts = True  # where KV is scarce
        self.waits_at: int | None = None  # tokens after which each answer waits for `go_on`
        self.go_on = threading.Event()
        self.patience_s = 10.0
        self.info: dict[str, Any] = {}  # over what the fake says of itself
        self.known: list[list[int]] = []  # token_ids of earlier prompts: prefixes found in KV
        self.remembers = True
        self.chat_template = True
        self.trace_id = TRACE_ID
        self.requests: list[pb.GenerateRequest] = []
        self.metadata: list[dict[str, str]] = []
        self.gone = threading.Event()  # the call that hangs was cancelled

    def answer(self, request: pb.GenerateRequest) -> list[int]:
        tokens = request.stopping.max_tokens if request.stopping.HasField("max_tokens") else DEFAULT_TOKENS
        token_ids = answer_to(prompt_of(request), tokens)
        if prompt_of(request) in self.differs_on and request.speculation.mode != pb.SpeculationParams.OFF:
            token_ids[-1] += 1
        return token_ids

    def digests_of(self, request: pb.GenerateRequest, start: int, ids: Sequence[int]) -> list[int]:
        digests = [digest_of(token_id) for token_id in ids]
        wrong = self.logits_differ.get(prompt_of(request), -1) - start
        if 0 <= wrong < len(digests) and request.speculation.mode != pb.SpeculationParams.OFF:
            digests[wrong] ^= 1
        return digests

    def started(self, request: pb.GenerateRequest) -> pb.Started:
        return pb.Started(
            request_id=request.request_id or "r1",
            seed=request.sampling.seed,
            trace_id=self.trace_id,
            model="fake",
            prompt_tokens=max(len(prompt_of(request).split()), len(request.token_ids.token_ids)),
        )

    def admit(self, request: pb.GenerateRequest, context: Any) -> None:
        self.requests.append(request)
        self.metadata.append({key: value for key, value in context.invocation_metadata() if isinstance(value, str)})
        if self.refusal is not None:
            context.abort(*self.refusal)

    def Generate(self, request: pb.GenerateRequest, context: Any) -> pb.GenerateResponse:
        self.admit(request, context)
        token_ids = self.answer(request)
        return pb.GenerateResponse(
            started=self.started(request),
            text=words(token_ids),
            token_ids=token_ids,
            finish_reason=pb.FINISH_REASON_LENGTH,
        )

    def GenerateStream(self, request: pb.GenerateRequest, context: Any) -> Iterator[pb.GenerateEvent]:
        self.admit(request, context)
        if self.hangs_after is not None:
            context.add_callback(self.gone.set)  # here: a call that is cancelled early gets no further
        yield pb.GenerateEvent(started=self.started(request))
        token_ids = self.answer(request)
        plain = request.speculation.mode == pb.SpeculationParams.OFF
        size = 1 if plain else SPECULATIVE_CHUNK
        prompt_ids = list(request.token_ids.token_ids)
        cached = max((shared_len(prompt_ids, before) for before in self.known), default=0) if self.remembers else 0
        self.known.append(prompt_ids)
        starts = range(0, len(token_ids), size)
        for index, start in enumerate(starts):
            if index == self.breaks_after:
                context.abort(grpc.StatusCode.INTERNAL, "the fake broke")
            if index == self.hangs_after:
                self.gone.wait(30)
                return
            if self.waits_at is not None and start >= self.waits_at:
                self.go_on.wait(self.patience_s)
            ids = token_ids[start : start + size]
            chunk = pb.Chunk(position=start, token_ids=ids, text=words(ids))
            if request.output.logits_digest and self.digests:
                chunk.logits_digests.extend(self.digests_of(request, start, ids))
                chunk.windows.append(0 if plain else DRAFTED_PER_PASS)
            yield pb.GenerateEvent(chunk=chunk)
        passes = len(starts)
        counted = {
            "prompt": 3,
            "cached": cached,
            "completion": len(token_ids),
            "passes": passes,
            "drafted": 0 if plain else DRAFTED_PER_PASS * passes,
            "accepted": 0 if plain else len(token_ids) - passes,
            "targets": 1,
        }
        usage = pb.Usage(**{**counted, **self.usage})
        cause = pb.StopCause(max_tokens=len(token_ids))
        yield pb.GenerateEvent(
            finished=pb.Finished(
                finish_reason=pb.FINISH_REASON_LENGTH, stop_cause=cause, usage=usage, not_exact=self.not_exact
            )
        )

    def GetModelInfo(self, request: pb.GetModelInfoRequest, context: Any) -> pb.GetModelInfoResponse:
        if self.refusal is not None:
            context.abort(*self.refusal)
        said = {
            "model": "fake",
            "numerics_id": "n1",
            "lookahead": DRAFTED_PER_PASS,
            "sources": ["early_exit", "ngram"],
            "chat_template": self.chat_template,
            "eos_token_ids": [2],
            "vocab_size": 1000,
            "context_limit": 8192,
            "kv_tokens": 4096,
        }
        return pb.GetModelInfoResponse(**{**said, **self.info})

    def Abort(self, request: pb.AbortRequest, context: Any) -> pb.AbortResponse:
        return pb.AbortResponse(found=any(seen.request_id == request.request_id for seen in self.requests))


@contextmanager
def serving(fake: FakeGeneration, options: Options | None = None) -> Iterator[str]:
    """The address of `fake` on a free port of this machine."""
    server = grpc.server(ThreadPoolExecutor(16), options=server_options() if options is None else options)
    generation_pb2_grpc.add_GenerationServicer_to_server(fake, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        fake.gone.set()
        server.stop(None).wait()
