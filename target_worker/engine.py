"""The target engine: plan, forward, pick, walk, commit, for all sequences at once.

It owns the next token of every sequence it was given. It never waits for a hint beyond its patience
and decodes by itself when none comes. It does not know coordinators, text or wire formats: commands
come in as values, events leave through `emit`, time is passed in.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from forerun.core.errors import SequenceRefused
from forerun.core.messages import Emit, Hinted, Refused, Start, Stop, TargetCommand, TargetEvent
from forerun.core.params import Finish, SeqId, Verification
from forerun.core.plan import Share, plan_pass
from forerun.core.sequence import Landing
from forerun.core.spans import Record, record_nothing
from forerun.core.walk import Walk
from forerun.runtime.passes import Model
from target_worker.sequence import TargetSequence

log = logging.getLogger(__name__)

Link = Hashable
"""Whoever gave the sequence: events about it go back there."""


@dataclass(frozen=True, slots=True)
class TargetConfig:
    """Bounds of the engine, in sequences, rows and nodes."""

    max_sequences: int = 16  # in a pass; more wait their turn
    row_budget: int = 256  # rows of a pass
    prefill_chunk: int = 128  # prompt rows of one sequence in a pass
    ngram: bool = True  # prompt and output lookup in this process
    lead: int = 6  # nodes wanted from a draft, per node that may be checked


class TargetEngine:
    """Single-threaded: whoever calls `step` also calls `handle`."""

    def __init__(
        self,
        model: Model,
        vocab_size: int,
        config: TargetConfig,
        emit: Callable[[Link, TargetEvent], None],
        record: Record = record_nothing,
        clock: Callable[[], float] = time.monotonic,
        wall_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self._model = model
        self._vocab_size = vocab_size
        self._config = config
        self._emit = emit
        self._record = record
        self._clock = clock
        self._wall_ns = wall_ns
        self._sequences: dict[tuple[Link, SeqId], TargetSequence] = {}
        self._running: deque[tuple[Link, SeqId]] = deque()
        self._queued: deque[tuple[Link, SeqId]] = deque()
        self._pass_s = 0.0  # decayed mean of a pass
        self.passes = 0
        self.landings = {landing: 0 for landing in Landing}

    @property
    def sequence_count(self) -> int:
        return len(self._sequences)

    @property
    def progress(self) -> int:
        return self.passes

    # --- commands ------------------------------------------------------------------------------

    def handle(self, link: Link, command: TargetCommand) -> None:
        """Apply one command. What cannot be served is refused by an event; nothing is raised."""
        match command:
            case Start():
                try:
                    self._start(link, command)
                except SequenceRefused as refusal:
                    self._emit(link, Refused(command.seq, str(refusal), traceparent=command.traceparent))
            case Hinted():
                sequence = self._sequences.get((link, command.seq))
                if sequence is not None and sequence.drafted_for:
                    self.landings[sequence.text.land(command.hint, depth=max(0, sequence.room - 1))] += 1
                    sequence.patience.hinted(self._clock())
                    sequence.hinted = True
            case Stop():
                self._drop((link, command.seq))

    def drop_link(self, link: Link) -> None:
        """Whoever gave these sequences is gone."""
        for key in [key for key in self._sequences if key[0] == link]:
            self._drop(key)

    def _start(self, link: Link, start: Start) -> None:
        limit = self._model.context_limit
        if not 0 < start.prompt_len <= len(start.tokens):
            raise SequenceRefused(f"prompt_len must be in [1, {len(start.tokens)}], not {start.prompt_len}")
        if len(start.tokens) >= limit:
            raise SequenceRefused(f"{len(start.tokens)} tokens leave no room: the context limit is {limit}")
        if max(start.tokens) >= self._model.vocab_size:
            raise SequenceRefused(f"token id {max(start.tokens)} is outside the vocabulary of {self._model.vocab_size}")
        if start.params.max_tokens <= len(start.tokens) - start.prompt_len:
            raise SequenceRefused(f"max_tokens {start.params.max_tokens} is reached already")
        if start.params.sampling.verification is Verification.TYPICAL:
            raise SequenceRefused("verification TYPICAL is not served by this worker; COUPLED and REJECTION are")
        self._drop((link, start.seq))
        sequence = TargetSequence(
            link, start, self._model.new_kv(), self._vocab_size, limit, self._config.ngram, self._record
        )
        self._sequences[link, start.seq] = sequence
        self._queued.append((link, start.seq))

    def _drop(self, key: tuple[Link, SeqId]) -> None:
        sequence = self._sequences.pop(key, None)
        if sequence is None:
            return
        sequence.spans.close()
        for queue in (self._running, self._queued):
            if key in queue:
                queue.remove(key)

    # --- the loop ------------------------------------------------------------------------------

    def hold_until(self) -> float | None:
        """A moment until which the next pass should wait for hints, or None. Only asked between passes.

        Only if every running sequence decodes and none knows how it goes on: a pass that has other
        work is not held back.
        """
        if self._queued or not self._running:
            return None
        now, deadline = self._clock(), None
        for key in self._running:
            sequence = self._sequences[key]
            if not sequence.decoding or sequence.text.tree.node_count or not sequence.wants_hints:
                return None
            until = sequence.patience.deadline(now, self._pass_s)
            if until is None:
                return None
            deadline = until if deadline is None else min(deadline, until)
        return deadline

    def held_in_vain(self) -> None:
        """Patience ran out: do not wait again for these until a hint arrives."""
        for key in self._running:
            self._sequences[key].patience.expire()

    def step(self) -> bool:
        """One pass: plan, forward, pick, walk, commit. False if there was nothing to do."""
        shares = self._plan()
        if not shares:
            return False
        began, started_ns = self._clock(), self._wall_ns()
        logits = self._model.forward([share.key.run(share) for share in shares])
        self.passes += 1
        for share, rows in zip(shares, logits, strict=True):
            sequence = share.key
            if not share.pays:
                sequence.prefilled(share.debt_rows)
                continue
            try:
                self._settle(share, rows, started_ns)
            except (SequenceRefused, ArithmeticError, LookupError, ValueError) as error:
                # One request's trouble: the others of this pass go on.
                log.exception("sequence %s", sequence.seq)
                self._drop((sequence.link, sequence.seq))
                self._emit(sequence.link, Refused(sequence.seq, str(error), traceparent=sequence.traceparent))
        took = self._clock() - began
        self._pass_s = took if self._pass_s == 0.0 else 0.8 * self._pass_s + 0.2 * took
        return True

    def _settle(self, share: Share[TargetSequence], rows: NDArray[np.float32], started_ns: int) -> None:
        """Pick, walk and commit for one sequence. rows: [1 + nodes, vocab]."""
        sequence = share.key
        if np.isnan(rows.max()):
            raise SequenceRefused("the model's logits for this sequence are not numbers")
        base_len = sequence.text.committed_len
        decided = sequence.judge(share.nodes, rows)
        fresh = sequence.fresh(decided.path)
        hinted = (len(sequence.drafted(share.nodes)), len(sequence.drafted(decided.path)))
        finish = sequence.commit(decided)
        self._tell(sequence, share, decided, finish, base_len, started_ns, fresh, hinted)

    def _plan(self) -> list[Share[TargetSequence]]:
        while self._queued and len(self._running) < self._config.max_sequences:
            self._running.append(self._queued.popleft())
        self._running.rotate(-1)  # whoever came last in this pass comes earlier in the next
        waiting = [self._sequences[key].waiting() for key in self._running]
        return plan_pass(waiting, self._config.row_budget, self._config.prefill_chunk)

    def _tell(
        self,
        sequence: TargetSequence,
        share: Share[TargetSequence],
        decided: Walk,
        finish: Finish | None,
        base_len: int,
        started_ns: int,
        fresh: int,
        hinted: tuple[int, int],
    ) -> None:
        ended_ns = self._wall_ns()
        sequence.spans.add(
            started_ns,
            ended_ns,
            {
                "forerun.base_len": base_len,
                "forerun.drafted": len(share.nodes),
                "forerun.accepted": decided.accepted,
                "forerun.rolled_back": len(share.nodes) - decided.accepted,
                "forerun.committed": len(decided.tokens),
                "forerun.accepted_fresh": fresh,
            },
        )
        want = 0 if finish else self._want(sequence)
        sequence.patience.emitted(self._clock(), asking=want > 0)
        self._emit(
            sequence.link,
            Emit(
                sequence.seq,
                base_len,
                decided.tokens,
                accepted=decided.accepted,
                drafted=len(share.nodes),
                passes=1,
                want=want,
                started_ns=started_ns,
                ended_ns=ended_ns,
                finish=finish,
                traceparent=sequence.traceparent,
                hinted_checked=hinted[0],
                hinted_accepted=hinted[1],
            ),
        )
        if finish:
            self._drop((sequence.link, sequence.seq))

    def _want(self, sequence: TargetSequence) -> int:
        """Nodes that a draft should hold ready below the last committed token."""
        if not sequence.wants_hints:
            return 0
        return sequence.most_nodes * self._config.lead
