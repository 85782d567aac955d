"""Asyncio client of the public API, and `build_request`, which makes a request from keyword arguments.

Owns one channel. Errors of the server arrive as grpc.aio.AioRpcError, unchanged; a request that cannot
even be written down (a wrong type, a value outside its field) is an InvalidRequest naming the argument.
"""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import grpc
from google.protobuf.message import Message as Protobuf

from forerun.core.errors import InvalidRequest
from forerun.rpc.options import Options, client_options
from forerun.v1 import common_pb2, generation_pb2, generation_pb2_grpc

DEFAULT_ADDR = "localhost:50051"
UNARY_TIMEOUT_S = 10.0
"""For the calls that only look something up."""

_Stub: Any = generation_pb2_grpc.GenerationStub  # generated without types
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")


class Client:
    """Talks to one coordinator. Make it inside a running event loop; close it, or use `async with`."""

    def __init__(
        self,
        addr: str = DEFAULT_ADDR,
        *,
        credentials: grpc.ChannelCredentials | None = None,
        options: Options | None = None,
    ) -> None:
        """`credentials` None is plain text. `options` None is rpc.options.client_options()."""
        self.addr = addr
        options = client_options() if options is None else options
        if credentials is None:
            self._channel = grpc.aio.insecure_channel(addr, options)
        else:
            self._channel = grpc.aio.secure_channel(addr, credentials, options)
        self._stub = _Stub(self._channel)

    @property
    def connected(self) -> bool:
        """Whether the channel holds a working connection now (so a failure came from the server)."""
        return bool(self._channel.get_state() is grpc.ChannelConnectivity.READY)

    async def generate(
        self,
        request: generation_pb2.GenerateRequest,
        *,
        traceparent: str | None = None,
        timeout_s: float | None = None,
    ) -> generation_pb2.GenerateResponse:
        """The whole answer. Cancelling the awaiting task cancels the request on the server."""
        response: generation_pb2.GenerateResponse = await self._stub.Generate(
            request, metadata=_metadata(traceparent), timeout=timeout_s
        )
        return response

    async def stream(
        self,
        request: generation_pb2.GenerateRequest,
        *,
        traceparent: str | None = None,
        timeout_s: float | None = None,
    ) -> AsyncGenerator[generation_pb2.GenerateEvent, None]:
        """Started, chunks, Finished, as they arrive. Leaving the loop early cancels the request on the server."""
        call = self._stub.GenerateStream(request, metadata=_metadata(traceparent), timeout=timeout_s)
        try:
            async for event in call:
                yield event
        finally:
            call.cancel()  # does nothing to a call that has ended

    async def model_info(self, *, timeout_s: float = UNARY_TIMEOUT_S) -> generation_pb2.GetModelInfoResponse:
        """What is served, its limits, and the hint sources attached now."""
        info: generation_pb2.GetModelInfoResponse = await self._stub.GetModelInfo(
            generation_pb2.GetModelInfoRequest(), timeout=timeout_s
        )
        return info

    async def abort(self, request_id: str, *, timeout_s: float = UNARY_TIMEOUT_S) -> bool:
        """End a request by id. False if no such request runs."""
        reply = await self._stub.Abort(generation_pb2.AbortRequest(request_id=request_id), timeout=timeout_s)
        return bool(reply.found)

    async def close(self) -> None:
        await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


def build_request(
    prompt: str | None = None,
    *,
    messages: Sequence[Mapping[str, str]] | None = None,
    token_ids: Sequence[int] | None = None,
    request_id: str | None = None,
    attempt: int | None = None,
    resume: Sequence[int] | None = None,
    model: str | None = None,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    seed: int | None = None,
    repetition_penalty: float | None = None,
    presence_penalty: float | None = None,
    frequency_penalty: float | None = None,
    logit_bias: Mapping[int, float] | None = None,
    max_tokens: int | None = None,
    min_tokens: int | None = None,
    stop: Sequence[str] | str | None = None,
    stop_token_ids: Sequence[int] | None = None,
    ignore_eos: bool | None = None,
    time_limit_ms: int | None = None,
    speculation: bool | None = None,
    sources: Sequence[str] | str | None = None,
    max_draft_tokens: int | None = None,
    verification: str | None = None,
    logprobs: int | None = None,
    prompt_logprobs: int | None = None,
    echo: bool | None = None,
    trace_detail: bool | None = None,
    logits_digest: bool | None = None,
    n: int | None = None,
    priority: int | None = None,
) -> generation_pb2.GenerateRequest:
    """A request that states what is given and leaves the rest to the server's defaults.

    The input is one of `prompt` (text, as it is), `messages` (role and content, through the model's chat
    template) and `token_ids`. `speculation` False is mode OFF, True is AUTO; `verification` is "coupled",
    "rejection" or "typical". `resume` are tokens already received. All else is named as in generation.proto.

    Raises:
        InvalidRequest: not exactly one input, or a value its field cannot hold.
    """
    inputs = {"prompt": prompt, "messages": messages, "token_ids": token_ids}
    given = [name for name, value in inputs.items() if value is not None]
    if len(given) != 1:
        raise InvalidRequest(f"give exactly one of prompt, messages and token_ids, not {', '.join(given) or 'none'}")
    request = generation_pb2.GenerateRequest()
    _set(request, text=prompt, request_id=request_id, attempt=attempt, model=model, n=n, priority=priority)
    if messages is not None:
        request.chat.SetInParent()
        for message in messages:
            if set(message) != {"role", "content"}:
                raise InvalidRequest(f"a message has role and content, not {', '.join(sorted(message)) or 'nothing'}")
            _set(request.chat.messages.add(), **message)
    if token_ids is not None:
        request.token_ids.SetInParent()
        _set(request.token_ids, token_ids=token_ids)
    if resume is not None:
        request.resume.SetInParent()
        _set(request.resume, token_ids=resume)
    _set(
        request.sampling,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=seed,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        logit_bias=logit_bias,
    )
    _set(
        request.stopping,
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        stop=[stop] if isinstance(stop, str) else stop,
        stop_token_ids=stop_token_ids,
        ignore_eos=ignore_eos,
        time_limit_ms=time_limit_ms,
    )
    speculation_pb = generation_pb2.SpeculationParams
    mode = None if speculation is None else speculation_pb.AUTO if speculation else speculation_pb.OFF
    _set(
        request.speculation,
        mode=mode,
        sources=[sources] if isinstance(sources, str) else sources,
        max_draft_tokens=max_draft_tokens,
        verification=None if verification is None else _verification(verification),
    )
    _set(
        request.output,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        echo=echo,
        trace_detail=trace_detail,
        logits_digest=logits_digest,
    )
    return request


def _set(message: Protobuf, **values: Any) -> None:
    """Set the fields that are not None. An empty list or map sets nothing, not even its parent."""
    for name, value in values.items():
        if value is None:
            continue
        try:
            if isinstance(value, Mapping):
                if value:
                    getattr(message, name).update(value)
            elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
                if value:
                    getattr(message, name).extend(value)
            else:
                setattr(message, name, value)
        except (TypeError, ValueError) as error:
            raise InvalidRequest(f"{name} cannot be {value!r}: {error}") from error


def _verification(label: str) -> int:
    items = common_pb2.Verification.items()
    known: dict[str, int] = {name.removeprefix("VERIFICATION_").lower(): int(number) for name, number in items}
    del known["unspecified"]
    if label not in known:
        raise InvalidRequest(f"verification is one of {', '.join(known)}, not {label!r}")
    return known[label]


def _metadata(traceparent: str | None) -> tuple[tuple[str, str], ...]:
    if traceparent is None:
        return ()
    if not _TRACEPARENT.fullmatch(traceparent):
        raise InvalidRequest(f"traceparent is 00-<32 hex>-<16 hex>-<2 hex> (W3C Trace Context), not {traceparent!r}")
    return (("traceparent", traceparent),)
