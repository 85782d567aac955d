"""The draft's own duties: re-root, roll back, say what is missing, refuse by name, free what it held."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from draft_worker.engine import DraftConfig, DraftEngine
from forerun.core.messages import Close, DraftParams, Gap, Hinted, Refused, Sync
from forerun.core.params import Sampling, SeqId, Source, Verification
from forerun.core.tree import ROOT
from forerun.runtime.sim import SimModel, SimSpec

SEQ = SeqId("r", 1)
GREEDY = DraftParams(Sampling(temperature=0.0), remaining=100)
SPEC = SimSpec(step_s=0.0, accept=1.0, vocab=50, context=64)


class Told:
    """An engine and what it said."""

    def __init__(self, **config: Any) -> None:
        self.events: list[Any] = []
        self.engine = DraftEngine(
            SimModel(SPEC, draft=True), 50, DraftConfig(**config), lambda link, event: self.events.append(event)
        )

    def sync(self, base_len: int, tokens: tuple[int, ...], want: int = 8, params: Any = None, seq: SeqId = SEQ) -> None:
        self.engine.handle("link", Sync(seq, base_len, tokens, want, params))

    def settle(self) -> int:
        """Steps until nothing is worth growing."""
        steps = 0
        while self.engine.step():
            steps += 1
            assert steps < 500, "growth has no end"
        return steps

    @property
    def hints(self) -> list[Hinted]:
        return [event for event in self.events if isinstance(event, Hinted)]

    @property
    def sequence(self) -> Any:
        return self.engine._sequences["link", SEQ]

    def main_path(self) -> list[int]:
        tree, node, tokens = self.sequence.text.tree, ROOT, []
        while children := list(tree.children(node)):
            node = children[0]
            tokens.append(tree.tokens[node])
        return tokens


def truth(prefix: tuple[int, ...], count: int) -> list[int]:
    """What the simulated target says."""
    model = SimModel(SPEC, draft=False)
    tokens = list(prefix)
    for _ in range(count):
        tokens.append(model._hashed(np.array(tokens, dtype=np.uint32))[0])
    return tokens[len(prefix) :]


def test_grows_to_what_is_wanted_and_stops() -> None:
    told = Told()
    told.sync(0, (1, 2, 3), want=10, params=GREEDY)
    told.settle()
    tree = told.sequence.text.tree
    assert 10 <= tree.node_count < 10 + 2 * DraftConfig().width  # a step adds two children to each
    assert told.main_path() == truth((1, 2, 3), len(told.main_path()))
    assert any(len(list(tree.children(row))) == 2 for row in range(len(tree))), "no runner-up was prepared"
    sent = {tuple(event.hint.tree.tokens) for event in told.hints}
    assert sent, "new nodes leave as they are grown"
    assert all(event.hint.base_len == 3 and event.hint.tail == (1, 2, 3) for event in told.hints)


def test_want_0_stops_and_want_resumes() -> None:
    told = Told()
    told.sync(0, (1, 2, 3), want=0, params=GREEDY)
    assert told.settle() == 0
    told.sync(3, (), want=6)
    assert told.settle() > 0


def test_the_branch_that_won_keeps_its_kv() -> None:
    told = Told()
    told.sync(0, (1, 2, 3), want=12, params=GREEDY)
    told.settle()
    right = truth((1, 2, 3), 2)
    before, kept = told.engine.steps, told.main_path()[2:]
    told.sync(3, tuple(right), want=12)
    assert told.sequence.kv.cached_len == 5, "nothing is computed again"
    assert told.main_path() == kept
    told.settle()
    assert told.engine.steps > before
    assert told.main_path() == truth((1, 2, 3, *right), len(told.main_path()))


def test_a_correction_leaves_the_tree() -> None:
    told = Told()
    told.sync(0, (1, 2, 3), want=12, params=GREEDY)
    told.settle()
    wrong = (truth((1, 2, 3), 1)[0] + 7) % 50
    told.sync(3, (wrong,), want=12)
    told.settle()
    assert told.main_path() == truth((1, 2, 3, wrong), len(told.main_path()))


@pytest.mark.parametrize(("base_len", "tokens"), [(2, (9, 8)), (1, (2, 9)), (3, ()), (2, (3, 4, 5, 6))])
def test_sync_rolls_back_and_recovers(base_len: int, tokens: tuple[int, ...]) -> None:
    """Whatever was held before, afterwards the prefix is held[:base_len] + tokens."""
    told = Told()
    told.sync(0, (1, 2, 3, 4, 5), want=12, params=GREEDY)
    told.settle()
    told.sync(base_len, tokens, want=12)
    expected = (1, 2, 3, 4, 5)[:base_len] + tokens
    assert tuple(told.sequence.text.tokens) == expected
    told.settle()
    assert told.main_path() == truth(expected, len(told.main_path())) != []


def test_one_gap_outstanding() -> None:
    told = Told()
    told.sync(4, (5,))
    told.sync(5, (6,))
    assert told.events == [Gap(SEQ, 0)]
    told.sync(0, (1, 2, 3), params=GREEDY)
    told.sync(7, (8,))
    told.sync(8, (9,))
    assert told.events == [Gap(SEQ, 0), Gap(SEQ, 3)]
    told.sync(3, (4, 5))
    told.settle()
    assert told.hints[-1].hint.base_len == 5


REFUSED: dict[str, Callable[[Told], None]] = {
    "params": lambda told: told.sync(0, (1, 2)),
    "prefix": lambda told: told.sync(0, (), params=GREEDY),
    "vocabulary of 50": lambda told: told.sync(0, (1, 50), params=GREEDY),
    "context limit is 64": lambda told: told.sync(0, (1,) * 64, params=GREEDY),
}


@pytest.mark.parametrize("named", REFUSED)
def test_refuses_one_sequence_by_name(named: str) -> None:
    told = Told()
    told.sync(0, (1, 2), params=GREEDY, seq=SeqId("other"))
    REFUSED[named](told)
    (refused,) = (event for event in told.events if isinstance(event, Refused))
    assert named in refused.reason
    assert told.engine.sequence_count == 1
    assert told.settle() > 0


def test_full_is_retryable() -> None:
    told = Told(max_sequences=1)
    told.sync(0, (1, 2), params=GREEDY)
    told.sync(0, (1, 2), params=GREEDY, seq=SeqId("second"))
    (refused,) = (event for event in told.events if isinstance(event, Refused))
    assert (refused.seq.request_id, refused.retryable) == ("second", True)


def test_nothing_below_an_end_or_beyond_what_remains() -> None:
    ending = truth((1, 2, 3), 3)[2]
    told = Told()
    told.sync(0, (1, 2, 3), want=40, params=DraftParams(GREEDY.sampling, 100, frozenset({ending})))
    told.settle()
    tree = told.sequence.text.tree
    below = [row for row in range(1, len(tree)) if tree.tokens[tree.parents[row]] == ending]
    assert ending in tree.tokens
    assert below == []
    short = Told()
    short.sync(0, (1, 2, 3), want=40, params=DraftParams(GREEDY.sampling, remaining=4))
    short.settle()
    tree = short.sequence.text.tree
    assert max(tree.depth(row) for row in range(len(tree))) == 3, "the token after the last guess needs room too"


def test_an_end_token_is_not_guessed_where_it_may_not_stand() -> None:
    ending = truth((1, 2, 3), 1)[0]
    for ends_from, first in ((0, True), (4, False)):
        told = Told()
        told.sync(0, (1, 2, 3), params=DraftParams(GREEDY.sampling, 100, frozenset({ending}), ends_from))
        told.settle()
        assert (told.main_path()[0] == ending) is first


def test_rejection_drafts_one_chain_with_laws() -> None:
    told = Told()
    sampling = Sampling(temperature=1.0, seed=5, verification=Verification.REJECTION)
    told.sync(0, (1, 2, 3), want=8, params=DraftParams(sampling, 100))
    told.settle()
    tree = told.sequence.text.tree
    assert all(len(list(tree.children(row))) <= 1 for row in range(len(tree)))
    for row in range(1, len(tree)):
        law = tree.laws[row]
        assert law is not None
        assert tree.tokens[row] in law.tokens


def test_hints_say_their_source_and_close_frees() -> None:
    told = Told(source=Source.EARLY_EXIT)
    told.sync(0, (1, 2, 3), want=8, params=GREEDY)
    told.settle()
    assert {source for event in told.hints for source in event.hint.tree.sources[1:]} == {Source.EARLY_EXIT}
    pages = told.engine._model.pages
    assert pages.held > 1, "branches have tails of their own"
    told.engine.handle("link", Close(SEQ))
    assert told.engine.sequence_count == 0
    assert pages.held == 0
    told.sync(0, (1, 2), params=GREEDY)
    told.sync(9, (3,), params=GREEDY, seq=SeqId("gap"))
    told.engine.drop_link("link")
    assert told.engine.sequence_count == 0
    assert told.engine._gaps == {}


def test_branches_give_way_to_a_prefix() -> None:
    """Each branch holds a page: one sequence must not keep others from being drafted for."""
    events: list[Any] = []
    model = SimModel(replace(SPEC, context=256), draft=True, pages=8)
    engine = DraftEngine(model, 50, DraftConfig(), lambda link, event: events.append(event))
    engine.handle("one", Sync(SEQ, 0, tuple(range(1, 20)), 100, GREEDY))
    for _ in range(20):
        engine.step()
    assert model.pages.available == 0, "the first has taken all there was"
    engine.handle("two", Sync(SEQ, 0, tuple(range(5, 30)), 8, GREEDY))
    for _ in range(20):
        engine.step()
    assert not [event for event in events if isinstance(event, Refused)]
    assert {len(event.hint.tail) for event in events if isinstance(event, Hinted)} == {8}
    assert engine._sequences["two", SEQ].have_len == 25
    assert engine._sequences["two", SEQ].text.tree.node_count > 0
