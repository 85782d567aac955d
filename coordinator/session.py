"""One request between its client, its target and its draft: relay, commit, emit.

The ledger is the truth. A target that is lost is replaced from it, a draft that is lost is forgotten.
Everything here runs on the event loop and never blocks; it does not know text, sockets or models.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from coordinator.account import Account, Counts
from coordinator.links import RelayedHint, WorkerLink
from forerun.core.errors import ForerunError, LedgerConflict, WorkerFailed
from forerun.core.hits import Hit
from forerun.core.ledger import Ledger
from forerun.core.messages import (
    Close,
    DraftParams,
    Emit,
    Gap,
    Refused,
    Start,
    Stop,
    Sync,
    TargetParams,
)
from forerun.core.params import MOST_DRAFT_TOKENS, Finish, SeqId, Source
from forerun.v1 import attach_pb2

log = logging.getLogger(__name__)


class Session:
    """The state of one request. Placing is the router's; it calls `begin_on` and `draft_with`."""

    def __init__(
        self,
        request_id: str,
        prompt: list[int],
        params: TargetParams,
        traceparent: str,
        next_attempt: Callable[[], int],
        replace_target: Callable[[Session], None],
        offer_draft: Callable[[Session], None],
    ) -> None:
        self.request_id = request_id
        self.params = params
        self.traceparent = traceparent
        self.ledger = Ledger(prompt)
        self.cached = 0  # prompt tokens found in KV
        self.digests: list[int] = []  # of the logits behind each completion token, if the request asks for them
        self._account = Account()
        self.finish: Finish | None = None
        self.failure: ForerunError | None = None
        self.not_exact = False
        self.refused_by: set[WorkerLink] = set()
        self.target: WorkerLink | None = None
        self.draft: WorkerLink | None = None
        self.target_hello: attach_pb2.Hello | None = None  # of the first target
        self._target_seq = SeqId(request_id)
        self._draft_seq = SeqId(request_id)
        self._want = 0
        self._told_len = 0  # tokens the draft was told of
        self._told_want = 0
        self._next_attempt = next_attempt
        self._replace_target = replace_target
        self._offer_draft = offer_draft
        self._changed = asyncio.Event()
        self._closed = False
        self.ended = asyncio.Event()  # closed, whatever the reason
        self.targets_used = 0

    @property
    def over(self) -> bool:
        return self.finish is not None or self.failure is not None or self._closed

    @property
    def wants_draft(self) -> bool:
        """Whether hints from another process may help."""
        return bool(self.draft_sources) and not self.over

    @property
    def draft_sources(self) -> list[Source]:
        return [source for source in self.params.hinted_by if source is not Source.NGRAM]

    # --- placing -------------------------------------------------------------------------------

    def begin_on(self, target: WorkerLink) -> None:
        """Start there, or go on there from the ledger."""
        self.target = target
        self.targets_used += 1
        target.sequences += 1
        self._target_seq = SeqId(self.request_id, self._next_attempt())
        if self.target_hello is None:
            self.target_hello = target.hello
        elif self.target_hello.numerics_id != target.hello.numerics_id:
            self.not_exact = True
        tokens = tuple(self.ledger.tokens)
        target.send(Start(self._target_seq, self.ledger.prompt_len, tokens, self.params, self.traceparent))

    def draft_with(self, draft: WorkerLink, want: int) -> None:
        """Open the sequence on a draft."""
        self.draft = draft
        draft.sequences += 1
        self._draft_seq = SeqId(self.request_id, self._next_attempt())
        self._want = want
        self._sync_from(0)

    def _sync_from(self, base_len: int) -> None:
        if self.draft is None:
            return
        params = None
        if base_len == 0:
            done = self.ledger.committed_len - self.ledger.prompt_len
            known = self.target_hello.vocab_size if self.target_hello else 0
            params = DraftParams(
                self.params.sampling,
                max(0, self.params.max_tokens - done),
                self.params.ends,
                self.ledger.prompt_len + self.params.min_tokens,
                known or 1 << 31,
            )
        tokens = tuple(self.ledger.tokens[base_len:])
        sync = Sync(self._draft_seq, base_len, tokens, self._want, params, self.traceparent)
        self.draft.send(sync)
        self._told_len, self._told_want = self.ledger.committed_len, self._want

    def _advance_draft(self) -> None:
        """Tell the draft what was committed. One that rests is told when it is wanted again, all at once."""
        if self._want or self._told_want:
            self._sync_from(self._told_len)

    # --- what workers say ----------------------------------------------------------------------

    def on_emit(self, link: WorkerLink, emit: Emit) -> None:
        """Commit, tell the draft, then wake the client's side."""
        if link is not self.target or emit.seq != self._target_seq or self.over:
            return
        base_len = self.ledger.committed_len
        try:
            self._check(link, emit)
            fresh = self.ledger.commit(emit.base_len, emit.tokens)
        except LedgerConflict as conflict:
            self._give_up_target(link, str(conflict))
            return
        self._want = emit.want
        if fresh:
            self.digests += emit.digests[-len(fresh) :]
            self._account.add(base_len, emit, link.hello.incarnation)
        self.cached = max(self.cached, emit.cached)
        self.finish = emit.finish
        if self.over:
            self._leave_target(stop=False)
            self._leave_draft()
        elif self.draft is not None:
            if fresh:
                self._advance_draft()
        elif self.wants_draft:
            self._offer_draft(self)
        self._changed.set()

    def _check(self, link: WorkerLink, emit: Emit) -> None:
        """Raises LedgerConflict for an Emit that no target of this request makes."""
        most_len = self.ledger.prompt_len + self.params.max_tokens
        end = emit.base_len + len(emit.tokens)
        if not emit.tokens or end > most_len:
            raise LedgerConflict(f"{len(emit.tokens)} tokens at {emit.base_len}; the request ends at {most_len}")
        if emit.finish is Finish.END_TOKEN and emit.tokens[-1] not in self.params.ends:
            raise LedgerConflict(f"token {emit.tokens[-1]} is no end token of this request")
        if emit.finish is Finish.LENGTH and end < min(most_len, link.hello.context_limit):
            raise LedgerConflict(f"it stops for length at {end} tokens; the request ends at {most_len}")
        if link.hello.vocab_size and max(emit.tokens) >= link.hello.vocab_size:
            raise LedgerConflict(f"token id {max(emit.tokens)} is outside its vocabulary of {link.hello.vocab_size}")
        counts = f"{emit.accepted} accepted of {emit.drafted} drafted in {emit.passes} passes"
        if emit.accepted > min(emit.drafted, len(emit.tokens)) or emit.drafted > emit.passes * MOST_DRAFT_TOKENS:
            raise LedgerConflict(f"{counts}, {len(emit.tokens)} tokens")
        if not 0 < emit.passes <= len(emit.tokens) or emit.cached > self.ledger.prompt_len:
            raise LedgerConflict(f"{counts}, {len(emit.tokens)} tokens, {emit.cached} of the prompt cached")
        if emit.windows and (len(emit.windows) != emit.passes or sum(emit.windows) < emit.drafted):
            raise LedgerConflict(f"{counts}, windows {list(emit.windows)}")
        if emit.branched > emit.passes:
            raise LedgerConflict(f"{counts}, {emit.branched} of them branched")
        # The pass before may have been open, and is counted now.
        if len(emit.hits) not in (0, len(Hit)) or sum(emit.hits) > emit.passes + 1:
            raise LedgerConflict(f"{counts}, hits {list(emit.hits)}")
        if len(emit.digests) != (len(emit.tokens) if self.params.logits_digest else 0):
            asked = "asked for" if self.params.logits_digest else "not asked for"
            raise LedgerConflict(f"{len(emit.digests)} digests, {asked}, of {len(emit.tokens)} tokens")

    def _give_up_target(self, link: WorkerLink, why: str) -> None:
        """What it says cannot be: go on elsewhere, not there."""
        log.error("%s gave up on %s: %s", self.request_id, link.name, why)
        self.refused_by.add(link)
        self._leave_target(stop=True)
        self._replace_target(self)

    def on_hint(self, link: WorkerLink, seq: SeqId, hint: bytes) -> None:
        if link is self.draft and seq == self._draft_seq and self.target is not None:
            self.target.send(RelayedHint(self._target_seq, hint))

    def on_gap(self, link: WorkerLink, gap: Gap) -> None:
        """A draft that lacks a prefix gets it; a target that does is started again."""
        if link is self.draft and gap.seq == self._draft_seq:
            self._sync_from(min(gap.have_len, self.ledger.committed_len))
        elif link is self.target and gap.seq == self._target_seq:
            self._give_up_target(link, f"it holds {gap.have_len} tokens of a sequence that was sent whole")

    def on_refused(self, link: WorkerLink, refused: Refused) -> None:
        if link is self.draft and refused.seq == self._draft_seq:
            self.refused_by.add(link)
            self._leave_draft(close=False)
        elif link is self.target and refused.seq == self._target_seq:
            self.refused_by.add(link)
            self._leave_target(stop=False)
            if refused.retryable:
                self._replace_target(self)
            else:
                self.fail(WorkerFailed(f"{link.name} refused: {refused.reason}"))

    def on_lost(self, link: WorkerLink) -> None:
        """A worker's stream ended."""
        self.refused_by.discard(link)
        if link is self.draft:
            self.draft = None
        elif link is self.target:
            self.target = None
            if not self.over:
                self._replace_target(self)

    def counts(self, completion_len: int) -> Counts:
        """Work behind the first `completion_len` tokens."""
        return self._account.counts(self.ledger.prompt_len + completion_len)

    def windows(self, start: int, end: int) -> list[int]:
        """Nodes checked in each pass behind completion tokens [start, end)."""
        return self._account.windows(self.ledger.prompt_len + start, self.ledger.prompt_len + end)

    # --- ending --------------------------------------------------------------------------------

    def fail(self, error: ForerunError) -> None:
        """Nobody can go on with this request."""
        self.failure = self.failure or error
        self.close()

    def close(self) -> None:
        """Free everything in the workers, and take nothing up again. Repeatable."""
        self._closed = True
        self.ended.set()
        self._leave_target(stop=True)
        self._leave_draft()
        self._changed.set()

    def _leave_target(self, stop: bool) -> None:
        if self.target is not None:
            self.target.sequences -= 1
            if stop:
                self.target.send(Stop(self._target_seq, self.traceparent))
            self.target = None

    def _leave_draft(self, close: bool = True) -> None:
        if self.draft is not None:
            self.draft.sequences -= 1
            if close:
                self.draft.send(Close(self._draft_seq, self.traceparent))
            self.draft = None

    # --- the client's side ---------------------------------------------------------------------

    async def completion_beyond(self, length: int) -> list[int]:
        """Completion tokens after the first `length`; waits until there are some or the answer is over.

        The ledger is the buffer: a client that reads slowly costs nothing more.
        """
        while True:
            have = self.ledger.committed_len - self.ledger.prompt_len
            if self.failure is not None:
                raise self.failure
            if have > length or self.over:
                return self.ledger.tokens[self.ledger.prompt_len + length :]
            self._changed.clear()
            await self._changed.wait()
