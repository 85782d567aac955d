"""From committed tokens to what the client reads: text, chunks, finish reason, usage."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from coordinator.request import Accepted
from coordinator.session import Session
from forerun.core.hits import Hit
from forerun.core.params import Finish
from forerun.text import AnswerText, TextModel
from forerun.v1 import generation_pb2

STOP, LENGTH = generation_pb2.FINISH_REASON_STOP, generation_pb2.FINISH_REASON_LENGTH


async def events(
    session: Session, accepted: Accepted, model: TextModel, context_limit: int
) -> AsyncGenerator[generation_pb2.GenerateEvent, None]:
    """Chunks as tokens are committed, then Finished. Nothing after a stop is in text, ids or usage."""
    text = AnswerText(model, accepted.stops)
    position = 0
    while True:
        tokens = await session.completion_beyond(position) if accepted.params.max_tokens else []
        over = session.over or not accepted.params.max_tokens
        last_is_end = over and session.finish is Finish.END_TOKEN
        piece = text.feed(tokens[:-1] if last_is_end else tokens)
        shown, stop = piece.text, piece.stop
        if stop is not None:
            tokens = tokens[: piece.tokens_used]
        elif over:
            shown += text.flush()
            stop = text.stop
        if tokens or shown:
            chunk = generation_pb2.Chunk(position=position, token_ids=tokens, text=shown)
            if accepted.params.logits_digest:
                end = position + len(tokens)
                chunk.logits_digests.extend(session.digests[position:end])
                chunk.windows.extend(session.windows(position, end))
            yield generation_pb2.GenerateEvent(chunk=chunk)
        position += len(tokens)
        if stop is None and not over:
            continue
        finished = generation_pb2.Finished(usage=_usage(session, position), not_exact=session.not_exact)
        if stop is not None:
            finished.finish_reason = STOP
            finished.stop_cause.text = stop
        elif last_is_end:
            finished.finish_reason = STOP
            finished.stop_cause.token_id = tokens[-1] if tokens else session.ledger.tokens[-1]
        else:
            finished.finish_reason = LENGTH
            if accepted.most_tokens is not None and position >= accepted.most_tokens:
                finished.stop_cause.max_tokens = accepted.most_tokens
            else:
                finished.stop_cause.context_limit = context_limit
        yield generation_pb2.GenerateEvent(finished=finished)
        return


def _usage(session: Session, completion_len: int) -> generation_pb2.Usage:
    counts = session.counts(completion_len)
    return generation_pb2.Usage(
        prompt=session.ledger.prompt_len,
        cached=session.cached,
        completion=completion_len,
        drafted=counts.drafted,
        accepted=counts.accepted,
        passes=counts.passes,
        preempted=counts.preempted,
        targets=counts.targets,
        branched=counts.branched,
        hits=generation_pb2.Hits(**{hit.name.lower(): counts.hits[hit] for hit in Hit}),
    )
