"""A GenerateRequest, checked. Whatever passes is honoured; whatever is not honoured is refused by name."""

from __future__ import annotations

import math
import secrets
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from forerun.core.errors import InvalidRequest
from forerun.core.messages import TargetParams
from forerun.core.params import MOST_DRAFT_TOKENS, Sampling, Source, Verification
from forerun.rpc.options import MAX_MESSAGE_BYTES
from forerun.text import TextModel
from forerun.v1 import common_pb2, generation_pb2

MOST_STOPS = 16
MOST_STOP_CHARS = 1024
MOST_STOP_IDS = 256
MOST_ID_CHARS = 256
HIGHEST_TEMPERATURE = 100.0

_NEUTRAL: dict[str, float] = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
"""Fields that are not honoured yet, and the value at which they mean nothing."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What the attached target can take, and what would be used by default."""

    context_limit: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    lookahead: int
    sources: tuple[Source, ...]  # attached now, drafts first


@dataclass(frozen=True, slots=True)
class Accepted:
    """A request that will be served as it says."""

    request_id: str
    attempt: int
    prompt: list[int]
    params: TargetParams
    stops: tuple[str, ...]
    most_tokens: int | None  # the request's own limit, if it has one


def check(request: generation_pb2.GenerateRequest, text: TextModel, names: Sequence[str], limits: Limits) -> Accepted:
    """Raises InvalidRequest naming the field, its value and what would be right."""
    if request.ByteSize() > MAX_MESSAGE_BYTES:
        raise InvalidRequest(f"the request has {request.ByteSize()} bytes; at most {MAX_MESSAGE_BYTES} are taken")
    _refuse_unknown(request, "")
    _refuse_unhonoured(request)
    if request.HasField("n") and request.n == 0:
        raise InvalidRequest("n must be at least 1, not 0")
    if request.model and request.model not in names:
        raise InvalidRequest(f"model {request.model!r} is not served here; {names[0]!r} is")
    if len(request.request_id) > MOST_ID_CHARS:
        raise InvalidRequest(f"request_id has {len(request.request_id)} characters; at most {MOST_ID_CHARS} are taken")
    prompt = _prompt(request, text, limits)
    stopping = request.stopping
    room = limits.context_limit - len(prompt)
    most_tokens = stopping.max_tokens if stopping.HasField("max_tokens") else None
    if most_tokens is not None and stopping.min_tokens > most_tokens:
        raise InvalidRequest(
            f"stopping.min_tokens is {stopping.min_tokens}, more than stopping.max_tokens, {most_tokens}"
        )
    sampling = _sampling(request)
    params = TargetParams(
        sampling,
        max_tokens=room if most_tokens is None else min(room, most_tokens),
        min_tokens=stopping.min_tokens,
        ends=_ends(stopping, limits),
        sources=_sources(request.speculation, limits),
        max_draft_tokens=_max_draft_tokens(request.speculation, limits),
        trace_detail=request.output.trace_detail,
        logits_digest=request.output.logits_digest,
    )
    request_id = request.request_id or uuid.uuid4().hex
    return Accepted(request_id, request.attempt, prompt, params, _stops(stopping), most_tokens)


def _refuse_unknown(message: Message, path: str) -> None:
    """Fields of a newer client: refused, since ignoring them would change their meaning silently."""
    unknown = UnknownFieldSet(message)
    if len(unknown):
        raise InvalidRequest(
            f"field number {unknown[0].field_number} of {path or 'the request'} is unknown to this build"
        )
    for descriptor, value in message.ListFields():
        if descriptor.message_type is None or descriptor.message_type.GetOptions().map_entry:
            continue
        for part in [value] if isinstance(value, Message) else value:
            _refuse_unknown(part, f"{path}.{descriptor.name}".lstrip("."))


def _refuse_unhonoured(request: generation_pb2.GenerateRequest) -> None:
    sampling, stopping, output = request.sampling, request.stopping, request.output
    unhonoured: list[tuple[str, bool]] = [
        ("resume", request.HasField("resume")),
        ("sampling.logit_bias", bool(sampling.logit_bias)),
        ("stopping.time_limit_ms", stopping.HasField("time_limit_ms")),
        ("output.logprobs", output.HasField("logprobs")),
        ("output.prompt_logprobs", output.HasField("prompt_logprobs")),
        ("output.echo", output.echo),
        ("priority", request.priority != 0),
        ("n above 1", request.n > 1),
        ("speculation.verification TYPICAL", request.speculation.verification == common_pb2.VERIFICATION_TYPICAL),
    ]
    for name, neutral in _NEUTRAL.items():
        unhonoured.append((f"sampling.{name}", sampling.HasField(name) and getattr(sampling, name) != neutral))
    for name, asked in unhonoured:
        if asked:
            raise InvalidRequest(f"{name} is not honoured by this build yet; leave it out")


def _limit(text: TextModel, limits: Limits) -> str:
    """What bounds prompt and answer: the model, or the target's KV, which is then less than one full sequence."""
    if limits.context_limit < text.context_limit:
        return (
            f"the limit of {limits.context_limit} tokens that the target's KV memory sets (--kv-memory; "
            f"the model takes {text.context_limit})"
        )
    return f"the context limit of {limits.context_limit} tokens"


def _refuse_hopeless(texts: Sequence[str], text: TextModel, limits: Limits) -> None:
    """Tokenising megabytes takes seconds and is pointless where no tokenisation can fit."""
    longest = text.vocabulary.longest
    given = sum(len(part.encode()) for part in texts)
    if longest is not None and given > limits.context_limit * longest:
        raise InvalidRequest(
            f"the prompt has {given} bytes; {_limit(text, limits)} holds at most {limits.context_limit * longest}"
        )


def _prompt(request: generation_pb2.GenerateRequest, text: TextModel, limits: Limits) -> list[int]:
    match request.WhichOneof("input"):
        case "text":
            _refuse_hopeless([request.text], text, limits)
            prompt = text.encode(request.text)
        case "chat":
            if not request.chat.messages:
                raise InvalidRequest("chat.messages is empty; at least one message is needed")
            for number, message in enumerate(request.chat.messages):
                if not message.role:
                    raise InvalidRequest(
                        f"chat.messages[{number}].role is empty; 'user', 'assistant' or 'system' is usual"
                    )
            if not any(message.content for message in request.chat.messages):
                raise InvalidRequest("the prompt is empty: no chat message has content")
            _refuse_hopeless([message.content for message in request.chat.messages], text, limits)
            prompt = text.encode_chat([(message.role, message.content) for message in request.chat.messages])
        case "token_ids":
            prompt = list(request.token_ids.token_ids)
        case _:
            raise InvalidRequest("the request has no input; give one of text, chat, token_ids")
    if not prompt:
        raise InvalidRequest("the prompt is empty (0 tokens); at least one token is needed")
    if len(prompt) >= limits.context_limit:
        raise InvalidRequest(
            f"the prompt has {len(prompt)} tokens; with one token of answer at most {limits.context_limit - 1} fit "
            f"{_limit(text, limits)}"
        )
    highest = max(prompt)
    if highest >= limits.vocab_size:
        raise InvalidRequest(f"token id {highest} is outside the vocabulary; ids go up to {limits.vocab_size - 1}")
    return prompt


def _sampling(request: generation_pb2.GenerateRequest) -> Sampling:
    given = request.sampling

    def number(name: str, default: float, fits: Callable[[float], bool], right: str) -> float:
        value = float(getattr(given, name)) if given.HasField(name) else default
        if not math.isfinite(value) or not fits(value):
            raise InvalidRequest(f"sampling.{name} must be {right}, not {value}")
        return value

    temperature = number("temperature", 1.0, lambda t: 0.0 <= t <= HIGHEST_TEMPERATURE, "in [0, 100]")
    top_p = number("top_p", 1.0, lambda p: 0.0 < p <= 1.0, "in (0, 1]")
    min_p = number("min_p", 0.0, lambda p: 0.0 <= p < 1.0, "in [0, 1)")
    seed = given.seed if given.HasField("seed") else secrets.randbits(64)
    asked = request.speculation.verification
    if asked not in common_pb2.Verification.values():
        raise InvalidRequest(f"speculation.verification {asked} is unknown; COUPLED and REJECTION are served")
    verification = Verification(int(asked) or Verification.COUPLED)
    return Sampling(temperature, given.top_k, top_p, min_p, seed, verification)


def _ends(stopping: generation_pb2.StoppingParams, limits: Limits) -> frozenset[int]:
    if len(stopping.stop_token_ids) > MOST_STOP_IDS:
        raise InvalidRequest(
            f"stopping.stop_token_ids has {len(stopping.stop_token_ids)} entries; at most {MOST_STOP_IDS}"
        )
    for token in stopping.stop_token_ids:
        if token >= limits.vocab_size:
            raise InvalidRequest(f"stopping.stop_token_ids: {token} is outside the vocabulary of {limits.vocab_size}")
    return frozenset(stopping.stop_token_ids) | frozenset(() if stopping.ignore_eos else limits.eos_token_ids)


def _stops(stopping: generation_pb2.StoppingParams) -> tuple[str, ...]:
    if len(stopping.stop) > MOST_STOPS:
        raise InvalidRequest(f"stopping.stop has {len(stopping.stop)} strings; at most {MOST_STOPS} are taken")
    for stop in stopping.stop:
        if not 0 < len(stop) <= MOST_STOP_CHARS:
            raise InvalidRequest(f"a stopping.stop string has {len(stop)} characters; 1 to {MOST_STOP_CHARS} are right")
    return tuple(stopping.stop)


def _sources(speculation: generation_pb2.SpeculationParams, limits: Limits) -> tuple[Source, ...]:
    """What was asked for; by default every source, those attached now first (rejection takes the first)."""
    if not speculation.sources:
        return tuple(dict.fromkeys((*limits.sources, *Source)))
    try:
        return tuple(dict.fromkeys(Source.parse(label) for label in speculation.sources))
    except KeyError as error:
        raise InvalidRequest(f"speculation.sources: {error.args[0]}") from None


def _max_draft_tokens(speculation: generation_pb2.SpeculationParams, limits: Limits) -> int:
    modes: Any = generation_pb2.SpeculationParams
    if speculation.mode not in (modes.MODE_UNSPECIFIED, modes.AUTO, modes.OFF):
        raise InvalidRequest(f"speculation.mode {speculation.mode} is unknown; AUTO and OFF are")
    if speculation.max_draft_tokens > MOST_DRAFT_TOKENS:
        raise InvalidRequest(
            f"speculation.max_draft_tokens must be in [0, {MOST_DRAFT_TOKENS}], not {speculation.max_draft_tokens}"
        )
    if speculation.mode == modes.OFF:
        return 0
    return speculation.max_draft_tokens if speculation.HasField("max_draft_tokens") else limits.lookahead
