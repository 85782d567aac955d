"""The target engine: plan, forward, pick, walk, commit, for all sequences at once.

It owns the next token of every sequence it was given. It never waits for a hint beyond its patience
and decodes by itself when none comes. It does not know coordinators, text or wire formats: commands
come in as values, events leave through `emit`, time is passed in.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from forerun.core.acceptance import Calibration
from forerun.core.cost import Load, PassCost
from forerun.core.errors import GroupLost, ModelRefused, SequenceRefused
from forerun.core.messages import Emit, Hinted, Refused, Start, Stop, TargetCommand, TargetEvent
from forerun.core.pages import TILE
from forerun.core.params import Finish, Source, Verification
from forerun.core.patience import worth_until
from forerun.core.plan import Share, plan_pass
from forerun.core.sequence import Landing
from forerun.core.spans import Record, record_nothing
from forerun.core.walk import Walk
from forerun.runtime.passes import Model, Row, Run
from target_worker.lineup import Key, Lineup
from target_worker.sequence import NotFinite, TargetSequence

log = logging.getLogger(__name__)

RESTARTS = 3
"""How often a group is started again without a pass in between before the worker gives up and ends."""

LONGEST = 0.75
"""Of a pass: nothing is worth waiting longer for."""

RATE_DECAY = 0.9
"""What the rate of tokens remembers after a pass."""

Link = Hashable
"""Whoever gave the sequence: events about it go back there."""


@dataclass(frozen=True, slots=True)
class TargetConfig:
    """Bounds of the engine, in sequences, rows and nodes."""

    max_sequences: int = 16  # in a pass; more wait their turn
    row_budget: int = 256  # rows of a pass
    prefill_chunk: int = 128  # prompt rows of one sequence in a pass
    ngram: bool = True  # prompt and output lookup in this process
    chains: bool = False  # check only the likeliest line; branches then serve as the next proposal alone
    lead: int = 16  # nodes wanted from a draft, per node that may be checked


@dataclass(frozen=True, slots=True)
class _Settled:
    """What one pass said about one sequence."""

    base_len: int
    nodes: int  # checked
    depth: int  # of the longest line of them: positions that were guessed
    branched: bool
    decided: Walk
    finish: Finish | None
    fresh: int
    digests: tuple[int, ...]


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
        cost: PassCost | None = None,
    ) -> None:
        self._model = model
        self._vocab_size = vocab_size
        self._config = config
        self._emit = emit
        self._record = record
        self._clock = clock
        self._wall_ns = wall_ns
        self._cost = cost or PassCost()
        self.lineup = Lineup(model.pages, config.max_sequences)
        self._trust: dict[Source, Calibration] = {}  # by those of the last sequence that is over
        self._limit = min(model.context_limit, model.pages.count * TILE - 1)
        self._rate = 0.0  # tokens per second, decayed mean over passes and what was waited for
        self._pass_s = 0.0  # decayed mean of a pass
        self._ended: float | None = None  # end of the last pass
        self._said = 0  # tokens committed by the pass that runs
        self.passes = 0
        self._restarts = 0  # since the last pass
        self.landings = {landing: 0 for landing in Landing}

    @property
    def sequence_count(self) -> int:
        return len(self.lineup)

    @property
    def progress(self) -> int:
        return self.passes

    # --- commands ------------------------------------------------------------------------------

    def handle(self, link: Link, command: TargetCommand, arrived: float | None = None) -> None:
        """Apply one command. What cannot be served is refused by an event; nothing is raised.

        arrived: when it came, by the engine's clock: it may have waited for a pass to end. None: now.
        """
        match command:
            case Start():
                try:
                    self._start(link, command)
                except SequenceRefused as refusal:
                    self._emit(link, Refused(command.seq, str(refusal), traceparent=command.traceparent))
            case Hinted():
                sequence = self.lineup.get((link, command.seq))
                if sequence is not None and sequence.drafted_for:
                    self.landings[sequence.take_hint(command.hint, self._clock() if arrived is None else arrived)] += 1
            case Stop():
                self._drop((link, command.seq))

    def drop_link(self, link: Link) -> None:
        """Whoever gave these sequences is gone."""
        for sequence in list(self.lineup):
            if sequence.link == link:
                self._drop((link, sequence.seq))

    def _start(self, link: Link, start: Start) -> None:
        limit = self._limit
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
        key = link, start.seq
        self._drop(key)
        sequence = TargetSequence(
            link, start, self._model.pages, self._vocab_size, limit, self._config.ngram, self._record, self._trust
        )
        self.lineup.add(key, sequence)

    def _drop(self, key: Key, *, poisoned: bool = False) -> None:
        sequence = self.lineup.remove(key)
        if sequence is not None:
            sequence.close(poisoned=poisoned)
            self._trust.update(sequence.trust)

    # --- the loop ------------------------------------------------------------------------------

    def hold_until(self) -> float | None:
        """A moment until which the next pass should wait for hints, or None. Only asked between passes.

        Only while every running sequence decodes and, of several, none knows how it goes on: a pass that has other
        work is not held back. And by no more than a share of a pass, whatever comes.
        """
        running = self.lineup.running
        if self.lineup.waiting_len or not running or self._ended is None:
            return None
        now, outlooks = self._clock(), []
        for sequence in running:
            if not sequence.decoding or (len(running) > 1 and sequence.text.tree.node_count):
                return None
            outlook = sequence.outlook(now)
            if outlook is not None:
                outlooks.append(outlook)
        until, latest = worth_until(now, outlooks, self._rate), self._held_until(self._ended)
        return None if until is None or now >= latest else min(until, latest)

    def held_in_vain(self) -> None:
        """Patience ran out, or the share of a pass did: do not wait again for these until a hint arrives."""
        now = self._clock()
        spent = self._ended is not None and now >= self._held_until(self._ended)
        for sequence in self.lineup.running:
            sequence.patience.expire(math.inf if spent else now)

    def _held_until(self, ended: float) -> float:
        """When the pass after the one that ended then begins, whatever comes."""
        return ended + LONGEST * self._pass_s

    def step(self) -> bool:
        """One pass: plan, forward, pick, walk, commit. False if there was nothing to do."""
        laid = self.lineup.lay(self._plan())
        if not laid:
            return False
        began, started_ns = self._clock(), self._wall_ns()
        runs = [run for _, own in laid for run in own]
        try:
            logits = iter(self._model.forward(runs))
        except GroupLost as lost:
            self._begin_again(lost)
            return True
        self.passes += 1
        self._restarts = 0
        for share, _ in laid:  # nothing was heard since it began
            if share.pays:
                share.key.pass_begins()
        prompts = any(share.debt_rows > 1 for share, _ in laid)
        self._cost.observe(_load(runs, len(laid)), self._clock() - began, prompts=prompts)
        for share, own in laid:
            self._finish_share(share, [next(logits) for _ in own], started_ns)
        self._observe_rate(began)
        return True

    def _plan(self) -> list[Share[TargetSequence]]:
        self.lineup.admit()
        waiting = [sequence.waiting(chains=self._config.chains) for sequence in self.lineup.running]
        return plan_pass(waiting, self._config.row_budget, self._config.prefill_chunk, self._cost)

    def _observe_rate(self, began: float) -> None:
        """After a pass: tokens per second of passes alone. With what was waited, waiting in vain would look cheap."""
        now = self._clock()
        took = now - began
        self._pass_s = took if self._pass_s == 0.0 else 0.8 * self._pass_s + 0.2 * took
        if took > 0.0 and self._said:
            rate = self._said / took
            self._rate = rate if self._rate == 0.0 else RATE_DECAY * self._rate + (1.0 - RATE_DECAY) * rate
        self._ended, self._said = now, 0

    def _begin_again(self, lost: GroupLost) -> None:
        """All KV is gone: the group comes back, and every sequence goes on from the tokens it holds."""
        log.error("%s; starting the group again", lost)
        while True:
            self._restarts += 1
            if self._restarts > RESTARTS:
                raise lost
            try:
                self._model.restart()
                break
            except (GroupLost, ModelRefused) as again:  # a rank that ends while it starts
                log.error("%s; once more", again)
        for sequence in self.lineup.running:
            sequence.lose_kv()

    def _finish_share(self, share: Share[TargetSequence], logits: list[NDArray[np.float32]], started_ns: int) -> None:
        sequence = share.key
        try:
            if not share.pays:
                sequence.prefilled(logits[0])
                return
            rows = sequence.rows_by_node(logits)
            if not sequence.doubts(rows):
                self._tell(sequence, self._settle(sequence, rows, branched=len(logits) > 1), started_ns)
        except (SequenceRefused, ArithmeticError, LookupError, ValueError) as error:
            # One request's trouble: the others of this pass go on.
            log.exception("sequence %s", sequence.seq)
            self._drop((sequence.link, sequence.seq), poisoned=isinstance(error, NotFinite))
            self._emit(sequence.link, Refused(sequence.seq, str(error), traceparent=sequence.traceparent))

    def _settle(self, sequence: TargetSequence, rows: dict[int, Row], *, branched: bool) -> _Settled:
        """Pick, walk and commit for one sequence. rows: logits [vocab] of its root and of every checked node."""
        base_len = sequence.text.committed_len
        checked = [node for node in rows if node]
        decided = sequence.judge(rows)
        fresh = sequence.fresh(decided.path)
        depth = sequence.deepest(checked)
        digests = sequence.digests(decided, rows)
        finish = sequence.commit(decided, checked, self._clock())
        return _Settled(base_len, len(checked), depth, branched, decided, finish, fresh, digests)

    def _tell(self, sequence: TargetSequence, settled: _Settled, started_ns: int) -> None:
        """Span, Emit, and the end if it is one."""
        ended_ns, decided = self._wall_ns(), settled.decided
        counts = {
            "forerun.base_len": settled.base_len,
            "forerun.nodes": settled.nodes,
            "forerun.drafted": settled.depth,
            "forerun.accepted": decided.accepted,
            "forerun.rolled_back": settled.depth - decided.accepted,
            "forerun.committed": len(decided.tokens),
            "forerun.accepted_fresh": settled.fresh,
        }
        hits = sequence.telling.pass_ended(started_ns, ended_ns, counts, over=settled.finish is not None)
        want = 0 if settled.finish else sequence.want(self._config.lead)
        sequence.asked = want > 0
        if want:
            sequence.patience.emitted(sequence.text.committed_len, self._clock())
        emit = Emit(
            sequence.seq,
            settled.base_len,
            decided.tokens,
            accepted=decided.accepted,
            drafted=settled.depth,
            passes=1,
            want=want,
            started_ns=started_ns,
            ended_ns=ended_ns,
            finish=settled.finish,
            cached=sequence.found or 0,
            traceparent=sequence.traceparent,
            digests=settled.digests,
            preempted=sequence.preempted,
            windows=(settled.nodes,),
            branched=int(settled.branched),
            hits=tuple(hits) if any(hits) else (),
        )
        sequence.found, sequence.preempted = 0, 0
        self._said += len(decided.tokens)
        self._emit(sequence.link, emit)
        if settled.finish:
            self._drop((sequence.link, sequence.seq))


def _load(runs: list[Run], sequences: int) -> Load:
    load = Load(0, mixed=len({len(run.tokens) > 1 for run in runs}) > 1, branches=len(runs) - sequences)
    for run in runs:
        load += Load.of_run(len(run.tokens), run.start)
    return load
