"""Wire messages to values and back. The one door: what comes through it is well-formed.

Raises MalformedMessage, which names the field; the sequence can still be refused by `seq_of`.
"""

from __future__ import annotations

import math
from typing import Any

from google.protobuf.message import DecodeError

from forerun.core.errors import MalformedMessage
from forerun.core.messages import (
    Close,
    DraftCommand,
    DraftEvent,
    DraftParams,
    Emit,
    Gap,
    Hinted,
    Refused,
    Start,
    Stop,
    Sync,
    TargetCommand,
    TargetEvent,
    TargetParams,
)
from forerun.core.params import Finish, Sampling, SeqId, Source, Verification
from forerun.core.sequence import TAIL, Hint
from forerun.core.tree import NodeLaw, TokenTree
from forerun.v1 import common_pb2, draft_pb2, target_pb2

MOST_TREE_ROWS = 1024
"""A hint with more rows is malformed: no worker keeps as many."""


# --- common ---------------------------------------------------------------------------------------


def seq_of(message: common_pb2.Seq) -> SeqId:
    if not message.request_id:
        raise MalformedMessage("seq.request_id is empty")
    return SeqId(message.request_id, message.attempt)


def put_seq(seq: SeqId) -> common_pb2.Seq:
    return common_pb2.Seq(request_id=seq.request_id, attempt=seq.attempt)


def _number(value: int) -> Any:
    """An enum's number for a wire field, which the stubs type as the wire's own enum."""
    return int(value)


def _source(number: int) -> Source:
    try:
        return Source(number)
    except ValueError:
        raise MalformedMessage(f"source {number} is unknown") from None


def sampling_of(message: common_pb2.Sampling) -> Sampling:
    if not math.isfinite(message.temperature) or message.temperature < 0:
        raise MalformedMessage(f"sampling.temperature must be finite and at least 0, not {message.temperature}")
    if not 0.0 < message.top_p <= 1.0:
        raise MalformedMessage(f"sampling.top_p must be in (0, 1], not {message.top_p}")
    if not 0.0 <= message.min_p < 1.0:
        raise MalformedMessage(f"sampling.min_p must be in [0, 1), not {message.min_p}")
    try:
        verification = Verification(message.verification or Verification.COUPLED)
    except ValueError:
        raise MalformedMessage(f"sampling.verification {message.verification} is unknown") from None
    return Sampling(message.temperature, message.top_k, message.top_p, message.min_p, message.seed, verification)


def put_sampling(sampling: Sampling) -> common_pb2.Sampling:
    return common_pb2.Sampling(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        seed=sampling.seed,
        verification=_number(sampling.verification),
    )


# --- trees and hints ------------------------------------------------------------------------------


def tree_of(message: common_pb2.Tree) -> TokenTree:
    if len(message.tokens) > MOST_TREE_ROWS:
        raise MalformedMessage(f"a tree of {len(message.tokens)} rows; at most {MOST_TREE_ROWS} are taken")
    if not all(math.isfinite(score) and 0.0 <= score <= 1.0 for score in message.scores):
        raise MalformedMessage("tree.scores must be in [0, 1]")
    sources = [_source(number) if number else None for number in message.sources]
    laws = [_law(law) for law in message.laws]
    for token, law in zip(message.tokens, laws, strict=False):
        if law is not None and token not in law.tokens:
            raise MalformedMessage(f"tree.laws: token {token} cannot have been drawn from a law that lacks it")
    return TokenTree.from_columns(list(message.tokens), list(message.parents), list(message.scores), sources, laws)


def _law(message: common_pb2.Law) -> NodeLaw | None:
    if not message.tokens:
        return None
    fine = all(math.isfinite(p) and p > 0.0 for p in message.probabilities)
    if len(message.tokens) != len(message.probabilities) or not fine or len(set(message.tokens)) != len(message.tokens):
        raise MalformedMessage("tree.laws: as many positive probabilities as different tokens are needed")
    return NodeLaw(tuple(message.tokens), tuple(message.probabilities))


def put_tree(tree: TokenTree) -> common_pb2.Tree:
    laws = [
        common_pb2.Law(tokens=law.tokens, probabilities=law.probabilities) if law else common_pb2.Law()
        for law in tree.laws
    ]
    return common_pb2.Tree(
        tokens=tree.tokens,
        parents=tree.parents,
        scores=tree.scores,
        sources=[_number(source or 0) for source in tree.sources],
        laws=laws if any(tree.laws) else [],
    )


def hint_of(data: bytes) -> tuple[Hint, str]:
    """The hint and its traceparent."""
    try:
        message = draft_pb2.Hint.FromString(data)
    except DecodeError as error:
        raise MalformedMessage(f"hint is no Hint message: {error}") from None
    if not 0 < len(message.tail) <= min(TAIL, message.base_len):
        raise MalformedMessage(f"hint.tail has {len(message.tail)} tokens; 1 to {TAIL}, at most base_len, are right")
    return Hint(message.base_len, tuple(message.tail), tree_of(message.tree)), message.traceparent


def put_hint(hint: Hint, traceparent: str) -> bytes:
    return draft_pb2.Hint(
        base_len=hint.base_len, tail=hint.tail, tree=put_tree(hint.tree), traceparent=traceparent
    ).SerializeToString()


# --- target ---------------------------------------------------------------------------------------


def target_command_of(message: target_pb2.TargetCommand) -> TargetCommand:
    match message.WhichOneof("kind"):
        case "start":
            start = message.start
            return Start(
                seq_of(start.seq),
                start.prompt_len,
                tuple(start.tokens),
                _target_params(start.params),
                start.traceparent,
            )
        case "hint":
            hint, traceparent = hint_of(message.hint.hint)
            return Hinted(seq_of(message.hint.seq), hint, traceparent)
        case "stop":
            return Stop(seq_of(message.stop.seq), message.stop.traceparent)
    raise MalformedMessage("a TargetCommand is one of start, hint, stop")


def _target_params(params: target_pb2.TargetParams) -> TargetParams:
    return TargetParams(
        sampling_of(params.sampling),
        params.max_tokens,
        params.min_tokens,
        frozenset(params.end_token_ids),
        tuple(_source(number) for number in params.sources),
        params.max_draft_tokens,
        params.trace_detail,
        params.logits_digest,
    )


def put_target_command(command: TargetCommand) -> target_pb2.TargetCommand:
    match command:
        case Start():
            params = command.params
            start = target_pb2.Start(
                seq=put_seq(command.seq),
                prompt_len=command.prompt_len,
                tokens=command.tokens,
                params=target_pb2.TargetParams(
                    sampling=put_sampling(params.sampling),
                    max_tokens=params.max_tokens,
                    min_tokens=params.min_tokens,
                    end_token_ids=sorted(params.ends),
                    sources=[_number(source) for source in params.sources],
                    max_draft_tokens=params.max_draft_tokens,
                    trace_detail=params.trace_detail,
                    logits_digest=params.logits_digest,
                ),
                traceparent=command.traceparent,
            )
            return target_pb2.TargetCommand(start=start)
        case Hinted():
            return relayed_hint(command.seq, put_hint(command.hint, command.traceparent))
        case Stop():
            return target_pb2.TargetCommand(
                stop=target_pb2.Stop(seq=put_seq(command.seq), traceparent=command.traceparent)
            )


def relayed_hint(seq: SeqId, hint: bytes) -> target_pb2.TargetCommand:
    """A hint passes the coordinator as the bytes it came in."""
    return target_pb2.TargetCommand(hint=draft_pb2.HintEnvelope(seq=put_seq(seq), hint=hint))


def target_event_of(message: target_pb2.TargetEvent) -> TargetEvent:
    match message.WhichOneof("kind"):
        case "emit":
            emit = message.emit
            return Emit(
                seq_of(emit.seq),
                emit.base_len,
                tuple(emit.tokens),
                emit.accepted,
                emit.timings.drafted,
                emit.timings.passes,
                emit.want,
                emit.timings.started_ns,
                emit.timings.ended_ns,
                Finish(emit.finish) if emit.finish in (1, 2) else None,
                emit.cached,
                emit.traceparent,
                tuple(emit.digests),
                emit.preempted,
                tuple(emit.timings.windows),
                emit.branched,
                tuple(emit.hits),
            )
        case "gap":
            return _gap(message.gap)
        case "refused":
            return _refused(message.refused)
    raise MalformedMessage("a TargetEvent is one of emit, gap, refused")


def put_target_event(event: TargetEvent) -> target_pb2.TargetEvent:
    match event:
        case Emit():
            emit = target_pb2.Emit(
                seq=put_seq(event.seq),
                base_len=event.base_len,
                tokens=event.tokens,
                accepted=event.accepted,
                want=event.want,
                timings=target_pb2.Timings(
                    started_ns=event.started_ns,
                    ended_ns=event.ended_ns,
                    passes=event.passes,
                    drafted=event.drafted,
                    windows=event.windows,
                ),
                finish=_number(event.finish or 0),
                cached=event.cached,
                traceparent=event.traceparent,
                digests=event.digests,
                preempted=event.preempted,
                branched=event.branched,
                hits=event.hits,
            )
            return target_pb2.TargetEvent(emit=emit)
        case Gap():
            return target_pb2.TargetEvent(gap=_put_gap(event))
        case Refused():
            return target_pb2.TargetEvent(refused=_put_refused(event))


# --- draft ----------------------------------------------------------------------------------------


def draft_command_of(message: draft_pb2.DraftCommand) -> DraftCommand:
    match message.WhichOneof("kind"):
        case "sync":
            sync = message.sync
            params = None
            if sync.HasField("params"):
                params = DraftParams(
                    sampling_of(sync.params.sampling),
                    sync.params.remaining,
                    frozenset(sync.params.end_token_ids),
                    sync.params.ends_from,
                    sync.params.vocab_size or 1 << 31,
                )
            return Sync(
                seq_of(sync.seq),
                sync.base_len,
                tuple(sync.tokens),
                sync.want,
                params,
                sync.traceparent,
            )
        case "close":
            return Close(seq_of(message.close.seq), message.close.traceparent)
    raise MalformedMessage("a DraftCommand is one of sync, close")


def put_draft_command(command: DraftCommand) -> draft_pb2.DraftCommand:
    match command:
        case Sync():
            sync = draft_pb2.Sync(
                seq=put_seq(command.seq),
                base_len=command.base_len,
                tokens=command.tokens,
                want=command.want,
                traceparent=command.traceparent,
            )
            if command.params is not None:
                sync.params.CopyFrom(
                    draft_pb2.DraftParams(
                        sampling=put_sampling(command.params.sampling),
                        remaining=command.params.remaining,
                        end_token_ids=sorted(command.params.ends),
                        ends_from=command.params.ends_from,
                        vocab_size=command.params.vocab_size,
                    )
                )
            return draft_pb2.DraftCommand(sync=sync)
        case Close():
            return draft_pb2.DraftCommand(
                close=draft_pb2.Close(seq=put_seq(command.seq), traceparent=command.traceparent)
            )


def put_draft_event(event: DraftEvent) -> draft_pb2.DraftEvent:
    match event:
        case Hinted():
            envelope = draft_pb2.HintEnvelope(seq=put_seq(event.seq), hint=put_hint(event.hint, event.traceparent))
            return draft_pb2.DraftEvent(hint=envelope)
        case Gap():
            return draft_pb2.DraftEvent(gap=_put_gap(event))
        case Refused():
            return draft_pb2.DraftEvent(refused=_put_refused(event))


def draft_answer_of(message: draft_pb2.DraftEvent) -> Gap | Refused:
    """A draft's event other than a hint, which is relayed unread."""
    match message.WhichOneof("kind"):
        case "gap":
            return _gap(message.gap)
        case "refused":
            return _refused(message.refused)
    raise MalformedMessage("a DraftEvent is one of hint, gap, refused")


def _gap(gap: draft_pb2.Gap) -> Gap:
    return Gap(seq_of(gap.seq), gap.have_len, gap.traceparent)


def _put_gap(gap: Gap) -> draft_pb2.Gap:
    return draft_pb2.Gap(seq=put_seq(gap.seq), have_len=gap.have_len, traceparent=gap.traceparent)


def _refused(refused: draft_pb2.Refused) -> Refused:
    return Refused(seq_of(refused.seq), refused.reason, refused.retryable, refused.traceparent)


def _put_refused(refused: Refused) -> draft_pb2.Refused:
    return draft_pb2.Refused(
        seq=put_seq(refused.seq),
        reason=refused.reason,
        retryable=refused.retryable,
        traceparent=refused.traceparent,
    )
