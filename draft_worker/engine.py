"""The draft engine: choose frontier, forward, grow, for all sequences at once.

It owns trees and their KV and decides nothing about any answer. It does not know coordinators or
wire formats: commands come in as values, hints leave through `emit`.
"""

from __future__ import annotations

import heapq
import logging
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass

import numpy as np

from draft_worker.sequence import DraftSequence
from forerun.core.acceptance import Acceptance
from forerun.core.cost import Load, PassCost
from forerun.core.errors import GroupLost, SequenceRefused
from forerun.core.messages import Close, DraftCommand, DraftEvent, Gap, Hinted, Refused, Sync
from forerun.core.pages import KV, OutOfPages
from forerun.core.params import SeqId, Source
from forerun.core.spans import Record, record_nothing
from forerun.core.tree import ROOT
from forerun.runtime.passes import Model, Run

log = logging.getLogger(__name__)

UNKNOWN_WIDTH = 2
"""Nodes grown beside the best one of each sequence while it is not known what a step costs."""

OBSERVED = 4
"""Every so manieth step says what steps cost: a small model's are so short that looking at each would slow them."""

Link = Hashable


@dataclass(frozen=True, slots=True)
class DraftConfig:
    """Bounds of the engine."""

    source: Source = Source.MODEL  # what its hints are labelled
    max_sequences: int = 64
    width: int = 12  # most nodes grown in one step, over all sequences; at least one each while they are few
    prefill_chunk: int = 128  # rows of one sequence in a step
    row_budget: int = 256  # rows of a step: many new prompts do not stall those that are drafted for


class DraftEngine:
    """Single-threaded: whoever calls `step` also calls `handle`."""

    def __init__(
        self,
        model: Model,
        vocab_size: int,
        config: DraftConfig,
        emit: Callable[[Link, DraftEvent], None],
        record: Record = record_nothing,
        wall_ns: Callable[[], int] = time.time_ns,
        clock: Callable[[], float] = time.monotonic,
        cost: PassCost | None = None,
    ) -> None:
        self._model = model
        self._vocab_size = vocab_size
        self._config = config
        self._emit = emit
        self._record = record
        self._wall_ns = wall_ns
        self._clock = clock
        self._cost = cost or PassCost()
        self._sequences: dict[tuple[Link, SeqId], DraftSequence] = {}
        self._pools = {greedy: Acceptance() for greedy in (False, True)}
        self._gaps: dict[tuple[Link, SeqId], int] = {}  # have_len that was reported and not closed yet
        self.steps = 0

    @property
    def sequence_count(self) -> int:
        return len(self._sequences)

    @property
    def progress(self) -> int:
        return self.steps

    # --- commands ------------------------------------------------------------------------------

    def handle(self, link: Link, command: DraftCommand, arrived: float | None = None) -> None:
        """Apply one command. What cannot be served is refused by an event; nothing is raised."""
        match command:
            case Sync():
                try:
                    self._sync(link, command)
                except SequenceRefused as refusal:
                    self._drop((link, command.seq))
                    self._emit(link, Refused(command.seq, str(refusal), traceparent=command.traceparent))
            case Close():
                self._drop((link, command.seq))

    def drop_link(self, link: Link) -> None:
        for key in [key for key in self._sequences if key[0] == link]:
            self._drop(key)
        for key in [key for key in self._gaps if key[0] == link]:
            del self._gaps[key]

    def _sync(self, link: Link, sync: Sync) -> None:
        key = (link, sync.seq)
        sequence = self._sequences.get(key)
        have_len = sequence.have_len if sequence else 0
        if sync.base_len > have_len:
            if self._gaps.get(key) != have_len:  # one outstanding: what comes above it waits for the answer
                self._gaps[key] = have_len
                self._emit(link, Gap(sync.seq, have_len, sync.traceparent))
            return
        self._gaps.pop(key, None)
        if sync.tokens and max(sync.tokens) >= self._model.vocab_size:
            raise SequenceRefused(
                f"token id {max(sync.tokens)} is outside the draft's vocabulary of {self._model.vocab_size}"
            )
        if sync.base_len + len(sync.tokens) >= self._model.context_limit:
            raise SequenceRefused(f"the draft's context limit is {self._model.context_limit} tokens")
        if sequence is not None:
            sequence.sync(sync)
            return
        if len(self._sequences) >= self._config.max_sequences:
            self._emit(
                link,
                Refused(
                    sync.seq, f"the draft has {self._config.max_sequences} sequences already", True, sync.traceparent
                ),
            )
            return
        kv, limit = KV(self._model.pages), self._model.context_limit
        pool = self._pools[sync.params.sampling.greedy if sync.params else True]
        self._sequences[key] = DraftSequence(
            link, sync, kv, self._vocab_size, limit, self._config.source, pool, self._record
        )

    def _drop(self, key: tuple[Link, SeqId]) -> None:
        self._gaps.pop(key, None)
        sequence = self._sequences.pop(key, None)
        if sequence is not None:
            sequence.close()

    # --- the loop ------------------------------------------------------------------------------

    def hold_until(self) -> float | None:
        """A draft waits for nothing."""
        return None

    def held_in_vain(self) -> None:
        """Never called: nothing is held."""

    def step(self) -> bool:
        """One step: choose frontier, forward, grow. False if nothing is worth growing."""
        frontier = self._choose_frontier()
        if not frontier:
            return False
        began, started_ns = self._clock(), self._wall_ns()
        laid = self._lay(frontier)
        if not laid:
            return False
        try:
            logits = self._model.forward([run for _, _, run in laid])
        except GroupLost as lost:
            self._begin_again(lost)
            return True
        ended_ns = self._wall_ns()
        self.steps += 1
        for (sequence, row, run), rows in zip(laid, logits, strict=True):
            if sequence.key not in self._sequences:
                continue
            if len(rows) and not np.isfinite(rows[-1].max()):
                self._refuse_sick(sequence)
                continue
            sequence.grow(row, run, rows, started_ns, ended_ns)
        for sequence in {sequence.key: sequence for sequence, _, _ in laid}.values():
            if sequence.key in self._sequences and (hint := sequence.hint()) is not None:
                self._emit(sequence.link, Hinted(sequence.seq, hint, sequence.traceparent))
        if self.steps % OBSERVED == 0:
            load = Load(0, branches=sum(row != ROOT for _, row, _ in laid))
            load = sum((Load.of_run(len(run.tokens), run.start) for _, _, run in laid), load)
            self._cost.observe(load, self._clock() - began, prompts=any(row == ROOT for _, row, _ in laid))
        return True

    def _lay(self, frontier: list[tuple[DraftSequence, int, int]]) -> list[tuple[DraftSequence, int, Run]]:
        """Pages for what is to be grown, prefixes first: branches give way to them. What finds none waits."""
        laid = []
        for sequence, row, chunk in sorted(frontier, key=lambda item: item[1] != ROOT):
            while row == ROOT or sequence.may_grow(row):
                try:
                    laid.append((sequence, row, sequence.run(row, chunk)))
                except OutOfPages as out:
                    if row == ROOT and self._shed():
                        continue
                    if row == ROOT:
                        self._drop(sequence.key)
                        reason = f"the draft's KV is full: {out}"
                        self._emit(sequence.link, Refused(sequence.seq, reason, True, sequence.traceparent))
                break
        return laid

    def _shed(self) -> bool:
        """Whoever has most branches gives them up. False if nobody has any."""
        most = max(self._sequences.values(), key=lambda sequence: sequence.branches)
        if not most.branches:
            return False
        most.shed()
        return True

    def _refuse_sick(self, sequence: DraftSequence) -> None:
        """Its logits are no numbers: others must not meet them in KV."""
        del self._sequences[sequence.key]
        sequence.close(poisoned=True)
        reason = "the draft's logits for this sequence are not numbers"
        self._emit(sequence.link, Refused(sequence.seq, reason, traceparent=sequence.traceparent))

    def _begin_again(self, lost: GroupLost) -> None:
        log.error("a rank of this draft is lost: %s; starting the group again", lost)
        self._model.restart()
        for sequence in self._sequences.values():
            sequence.lose_kv()

    def _choose_frontier(self) -> list[tuple[DraftSequence, int, int]]:
        """(sequence, node, rows it may take): every sequence's best node, then the best others while they pay."""
        firsts: list[tuple[float, DraftSequence, int]] = []
        others: list[tuple[float, DraftSequence, int]] = []
        for sequence in self._sequences.values():
            ranked = [(reach, sequence, row) for reach, row in sequence.candidates(self._config.width)]
            firsts += ranked[:1]
            others += ranked[1:]
        others = heapq.nlargest(max(0, self._config.width - len(firsts)), others, key=lambda item: item[0])
        best = firsts + others[: self._paying(firsts, others)]
        best.sort(key=lambda item: item[1].debt)  # what costs one row goes first, prompts share the rest
        chosen, left = [], self._config.row_budget
        for _, sequence, row in best:
            rows = min(max(1, sequence.debt), self._config.prefill_chunk, left)
            if rows:
                chosen.append((sequence, row, rows))
                left -= rows
        return chosen

    def _paying(
        self, firsts: list[tuple[float, DraftSequence, int]], others: list[tuple[float, DraftSequence, int]]
    ) -> int:
        """How many of `others`, best first, to grow beside `firsts`: what is most worth for the time it takes."""
        chunk, budget = self._config.prefill_chunk, self._config.row_budget
        rows = min(budget, sum(min(chunk, max(1, sequence.debt)) for _, sequence, _ in firsts))
        load = Load(rows, branches=sum(row != ROOT for _, _, row in firsts))
        tiles = np.zeros(len(others), dtype=np.int64)  # of short contexts: what they cost beside the rest says little
        seconds = self._cost.along(load, tiles, np.ones(len(others), dtype=np.bool_))
        if not firsts or seconds[0] <= 0.0:
            return min(len(others), UNKNOWN_WIDTH)
        reached = np.cumsum([sum(reach for reach, _, _ in firsts), *(reach for reach, _, _ in others)])
        return int(np.argmax(reached / seconds))
