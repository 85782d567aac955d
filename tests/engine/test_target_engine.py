"""The target by itself: KV runs out, prefixes are shared, trees are checked, a group is lost; the text stays."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from cluster import level
from models import tiny_model
from numpy.typing import NDArray

from forerun.core.acceptance import Calibration
from forerun.core.cost import PassCost
from forerun.core.errors import GroupLost
from forerun.core.hits import Hit
from forerun.core.messages import Emit, Hinted, Refused, Start, Stop, TargetParams
from forerun.core.pages import TILE
from forerun.core.params import Sampling, SeqId, Source
from forerun.core.plan import FEWEST_PROMPT_ROWS
from forerun.core.sequence import TAIL, Hint
from forerun.core.tree import ROOT, TokenTree
from forerun.runtime.forward import TransformersModel
from forerun.runtime.models import load_causal_lm
from forerun.runtime.passes import Model, Run
from forerun.runtime.sim import SimModel, SimSpec
from forerun.runtime.tiled import TiledAttention
from target_worker.engine import TargetConfig, TargetEngine

VOCAB, CONTEXT, N = 256, 512, 30


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_model(tmp_path_factory.mktemp("models") / "target", layers=2, seed=1)


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def model_of(folder: str, dtype: str = "float32", pages: int = 64, kind: Any = TransformersModel) -> TransformersModel:
    torch.set_num_threads(1)
    model: TransformersModel = kind(load_causal_lm(folder, dtype), CONTEXT, pages)
    return model


class Told:
    """An engine and what it said."""

    def __init__(self, model: Model, config: TargetConfig | None = None, **more: Any) -> None:
        self.events: list[Any] = []
        self.engine = TargetEngine(
            model, VOCAB, config or TargetConfig(), lambda link, event: self.events.append(event), **(level() | more)
        )
        self.serial = 0

    def start(self, prompt: Sequence[int], max_tokens: int = N, **params: Any) -> SeqId:
        self.serial += 1
        seq = SeqId(f"r{self.serial}")
        sampling = params.pop("sampling", Sampling(temperature=0.0))
        asked = TargetParams(sampling, max_tokens, logits_digest=True, **params)
        self.engine.handle("link", Start(seq, len(prompt), tuple(prompt), asked))
        return seq

    def settle(self) -> int:
        passes = 0
        while self.engine.step():
            passes += 1
            assert passes < 5000, "the engine has no end"
        return passes

    def emits(self, seq: SeqId) -> list[Emit]:
        return [event for event in self.events if isinstance(event, Emit) and event.seq == seq]

    def answer(self, seq: SeqId) -> tuple[list[int], list[int]]:
        """Tokens and digests."""
        emits = self.emits(seq)
        return [t for emit in emits for t in emit.tokens], [d for emit in emits for d in emit.digests]


def prompts(count: int, length: int, seed: int = 5) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(VOCAB) for _ in range(length)] for _ in range(count)]


def alone(folder: str, dtype: str, asked: Sequence[Sequence[int]], **params: Any) -> list[tuple[list[int], list[int]]]:
    """Each prompt by itself, plainly, with room for everything."""
    model = model_of(folder, dtype)
    answers = []
    for prompt in asked:
        model.pages.forget()
        told = Told(model)
        seq = told.start(prompt, **params)
        told.settle()
        answers.append(told.answer(seq))
    return answers


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_preempted_sequences_go_on_with_the_same_bits(folder: str, dtype: str, temperature: float) -> None:
    """Six that need three pages each in the end, and eight pages: they take turns, and nobody notices."""
    asked = prompts(6, 2 * TILE - 40)
    sampling = Sampling(temperature=temperature, seed=7)
    told = Told(model_of(folder, dtype, pages=8))
    seqs = [told.start(prompt, 60, sampling=sampling) for prompt in asked]
    told.settle()
    assert [told.answer(seq) for seq in seqs] == alone(folder, dtype, asked, max_tokens=60, sampling=sampling)
    assert told.engine.lineup.preemptions > 0
    assert sum(emit.preempted for seq in seqs for emit in told.emits(seq)) == told.engine.lineup.preemptions
    assert told.engine._model.pages.held == 0


def test_without_room_sequences_wait_and_what_can_never_fit_is_refused(folder: str) -> None:
    told = Told(model_of(folder, pages=3))
    seqs = [told.start(prompt, 20) for prompt in prompts(5, 2 * TILE)]
    hopeless = told.start(prompts(1, 3 * TILE)[0], 20)
    (refused,) = (event for event in told.events if isinstance(event, Refused))
    assert refused.seq == hopeless
    assert f"the context limit is {3 * TILE - 1}" in refused.reason
    told.settle()
    assert all(len(told.answer(seq)[0]) == 20 for seq in seqs)


def test_a_shared_prefix_is_computed_once(folder: str) -> None:
    model = model_of(folder)
    system, (first, second) = prompts(1, 300)[0], prompts(2, 20, seed=6)
    expected = alone(folder, "float32", [system + first, system + second])
    told = Told(model)
    one = told.start(system + first)
    told.settle()
    two = told.start(system + second)
    told.settle()
    assert [told.answer(one), told.answer(two)] == expected
    assert [emit.cached for emit in told.emits(one)] == [0] * N
    assert told.emits(two)[0].cached == 300
    assert sum(emit.cached for emit in told.emits(two)) == 300, "told once"


def test_two_that_run_share_their_prefix_and_one_may_end(folder: str) -> None:
    system = prompts(1, 300)[0]
    tails = prompts(3, 9, seed=8)
    expected = alone(folder, "float32", [system + tail for tail in tails])
    told = Told(model_of(folder))
    seqs = [told.start(system + tails[0])]
    for _ in range(4):  # its prompt is in KV
        told.engine.step()
    seqs += [told.start(system + tail) for tail in tails[1:]]
    told.engine.step()
    told.engine.handle("link", Stop(seqs[0]))
    told.settle()
    assert [told.answer(seq) for seq in seqs[1:]] == expected[1:]
    assert told.engine._model.pages.held == 0


def hint_of(prefix: Sequence[int], paths: Sequence[Sequence[tuple[int, float]]]) -> Hint:
    """A tree of these lines of (token, score)."""
    tree = TokenTree(prefix[-1])
    for path in paths:
        node = ROOT
        for token, score in path:
            node = tree.add(node, token, score, Source.MODEL)
    return Hint(len(prefix), tuple(prefix[-TAIL:]), tree)


@pytest.mark.parametrize("length", [20, TILE - 3, TILE - 1, TILE])
def test_a_correction_among_the_siblings_is_accepted_in_the_same_pass(folder: str, dtype: str, length: int) -> None:
    """The likelier line is wrong at its second token; the branch there is right, and holds on for three more."""
    (prompt,) = prompts(1, length)
    ((right, digests),) = alone(folder, dtype, [prompt])
    told = Told(model_of(folder, dtype))
    seq = told.start(prompt, sources=(Source.MODEL,), max_draft_tokens=16)
    wrong = [(token + 1) % VOCAB for token in right]
    lines = [
        [(right[0], 0.9), (wrong[1], 0.6), (wrong[2], 0.6), (wrong[3], 0.6)],
        [(right[0], 0.9), (right[1], 0.3), (right[2], 0.9), (right[3], 0.9), (right[4], 0.9)],
        [(wrong[0], 0.1), (wrong[5], 0.2)],
    ]
    told.engine.handle("link", Hinted(seq, hint_of(prompt, lines)))
    told.settle()
    first = told.emits(seq)[0]
    assert (first.accepted, first.tokens, first.branched) == (5, tuple(right[:6]), 1)
    assert first.windows == (10,)
    assert first.drafted == 5, "positions, not nodes"
    assert told.answer(seq) == (right, digests)
    assert told.engine._model.pages.held == 0


def test_trees_give_way_when_pages_are_short(folder: str) -> None:
    """Guesses are a luxury: without a page for a branch it is not checked, and nobody is preempted for it."""
    (prompt,) = prompts(1, 2 * TILE - 50)
    ((right, digests),) = alone(folder, "float32", [prompt])
    told = Told(model_of(folder, pages=2))
    seq = told.start(prompt, sources=(Source.MODEL,), max_draft_tokens=16)
    lines = [[(right[0], 0.9)], [((right[0] + 1) % VOCAB, 0.5)], [((right[0] + 2) % VOCAB, 0.4)]]
    told.engine.handle("link", Hinted(seq, hint_of(prompt, lines)))
    told.settle()
    first = told.emits(seq)[0]
    assert (first.accepted, first.branched) == (1, 0)
    assert told.answer(seq) == (right, digests)
    assert told.engine.lineup.preemptions == 0


def test_a_guess_takes_no_page_from_a_neighbour(folder: str) -> None:
    """Every page is held, its own ends in 8 columns, and 16 tokens are guessed: 8 are checked, nobody gives way."""
    first, second = prompts(1, 100)[0], prompts(1, 10, seed=9)[0]
    ((right, digests),) = alone(folder, "float32", [first], max_tokens=60)
    told = Told(model_of(folder, pages=4))
    seq = told.start(first, 60, sources=(Source.MODEL,), max_draft_tokens=16)
    neighbour = told.start(second, 100)
    sequence = told.engine.lineup.get(("link", seq))
    assert sequence is not None
    while sequence.text.committed_len < TILE - 8:
        told.engine.step()
    pages = told.engine._model.pages
    others = [pages.take() for _ in range(pages.available)]
    done = sequence.text.committed_len - len(first)
    line = [[(token, 0.95) for token in right[done : done + 16]]]
    told.engine.handle("link", Hinted(seq, hint_of(sequence.text.tokens, line)))
    told.engine.step()
    assert told.emits(seq)[-1].windows == (8,)
    assert told.engine.lineup.preemptions == 0
    pages.release(others)
    told.settle()
    assert told.answer(seq) == (right, digests)
    assert len(told.answer(neighbour)[0]) == 100


def test_a_prompt_that_gives_way_goes_on_behind_the_pages_it_had_filled(folder: str) -> None:
    told = Told(model_of(folder))
    told.start(prompts(1, 450)[0], 5)
    for _ in range(3):
        told.engine.step()
    told.engine.lineup._preempt_last()
    told.engine.step()
    (sequence,) = told.engine.lineup
    assert sequence.kv.cached_len == 450, "three pages were found again, and the rest is one chunk"


def test_saturated_passes_check_nothing(folder: str) -> None:
    """Where every row costs as much as a token brings, hints are left alone; where rows are free they are taken."""
    (prompt,) = prompts(1, 1)
    ((right, _),) = alone(folder, "float32", [prompt])
    line = [[(token, 0.8) for token in right[:8]]]
    checked = {}
    for name, cost in (("free", PassCost([(1, 1.0), (256, 1.0)])), ("dear", PassCost([(1, 1.0), (256, 256.0)]))):
        told = Told(model_of(folder), cost=cost)
        seq = told.start(prompt, sources=(Source.MODEL,), max_draft_tokens=16)
        told.engine.handle("link", Hinted(seq, hint_of(prompt, line)))
        told.settle()
        checked[name] = told.emits(seq)[0].windows
    assert checked == {"free": (8,), "dear": (0,)}


def test_a_long_prompt_shares_passes_with_those_that_decode(folder: str) -> None:
    """Every pass gives every decoding sequence its token, and the prompt as many rows as it may be prolonged by."""
    told = Told(model_of(folder), cost=PassCost([(1, 1.0), (256, 64.0)]))
    decoding = [told.start(prompt, 100) for prompt in prompts(3, 4)]
    told.engine.step()
    newcomer = told.start(prompts(1, 300)[0], 5)
    passes = 0
    while not told.emits(newcomer):
        before = [len(told.emits(seq)) for seq in decoding]
        told.engine.step()
        passes += 1
        assert [len(told.emits(seq)) - had for seq, had in zip(decoding, before, strict=True)] == [1, 1, 1]
    assert 300 / 128 + 1 < passes <= 300 / FEWEST_PROMPT_ROWS + 1
    told.settle()


class Failing(TransformersModel):
    """Loses its group once, in the pass before which `fail` was set."""

    fail = False
    lost = 0

    def forward(self, runs: Sequence[Run]) -> list[NDArray[np.float32]]:
        if self.fail:
            self.fail = False
            self.lost += 1
            raise GroupLost("rank 1 was ended by SIGKILL")
        return super().forward(runs)

    def restart(self) -> None:
        self.attention = self._paged_attention()  # other memory: nothing of the old is there
        super().restart()


def test_a_lost_group_costs_time_and_no_token(folder: str, dtype: str) -> None:
    asked = [*prompts(2, 20), *prompts(2, 200)]
    model = model_of(folder, dtype, kind=Failing)
    assert isinstance(model, Failing)
    told = Told(model)
    seqs = [told.start(prompt) for prompt in asked]
    for steps in (1, 6, 3):  # in the prefill, between tokens, and again
        for _ in range(steps):
            told.engine.step()
        model.fail = True
    told.settle()
    assert model.lost == 3
    assert [told.answer(seq) for seq in seqs] == alone(folder, dtype, asked)


class Poisoned(TransformersModel):
    """What follows token 13 is not a number, in KV and logits, once `armed`."""

    armed = False

    def forward(self, runs: Sequence[Run]) -> list[NDArray[np.float32]]:
        logits = super().forward(runs)
        for run, rows in zip(runs, logits, strict=True):
            if self.armed and 13 in run.tokens:
                at = run.tokens.index(13)
                tile, column = divmod(run.start + at, TILE)
                for page in run.path.pages[tile:]:
                    self.attention._keys[:, page, :, :, column:] = float("nan")  # type: ignore[attr-defined]
                    self.attention._values[:, page, :, column:] = float("nan")  # type: ignore[attr-defined]
                rows[max(0, at - (len(run.tokens) - len(rows))) :] = float("nan")
        return logits


class Unwell(TransformersModel):
    """The row after one token is no numbers."""

    sick_after = -1

    def forward(self, runs: Sequence[Run]) -> list[NDArray[np.float32]]:
        logits = super().forward(runs)
        for run, rows in zip(runs, logits, strict=True):
            for row in range(len(rows)):
                if run.tokens[len(run.tokens) - len(rows) + row] == self.sick_after:
                    rows[row] = float("nan")
        return logits


@pytest.mark.parametrize("length", [3, 300])
def test_what_is_not_a_number_ends_one_sequence_and_leaves_nothing_behind(folder: str, length: int) -> None:
    """A short prompt, and one whose full pages are known by the time its logits are looked at."""
    healthy = [token + (token == 13) for token in prompts(1, 300)[0]]
    ((right, digests),) = alone(folder, "float32", [healthy])
    model = model_of(folder, pages=4, kind=Poisoned)
    model.armed = True  # type: ignore[attr-defined]
    told = Told(model)
    sick = told.start([13, *healthy[: length - 2], 13])
    told.settle()
    (refused,) = (event for event in told.events if isinstance(event, Refused))
    assert refused.seq == sick
    assert "not numbers" in refused.reason
    assert model.pages.idle == 0, "nobody finds them"
    for _ in range(2):  # in every page there is
        seq = told.start(healthy, 12)
        told.settle()
        assert told.answer(seq) == (right[:12], digests[:12])
        model.pages.forget()


class Hollow(TransformersModel):
    """Token 13 is not a number from its embedding on, once it was proven at start."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        with torch.no_grad():
            self._model.get_input_embeddings().weight[13] = float("nan")  # type: ignore[index]


@pytest.mark.parametrize("length", [40, TILE - 2, TILE - 1, TILE])
@pytest.mark.parametrize("branch", [False, True])
def test_a_guess_without_numbers_in_the_roots_page_ends_nobody(folder: str, length: int, branch: bool) -> None:
    """It weighs 0 for the root, and 0 times no number is none: what the pass said is computed again without it."""
    healthy = [token + (token == 13) for token in prompts(1, length)[0]]
    ((right, digests),) = alone(folder, "float32", [healthy])
    assert 13 not in right
    told = Told(model_of(folder, kind=Hollow))
    seq = told.start(healthy, sources=(Source.MODEL,), max_draft_tokens=8)
    company = told.start([token + (token == 13) for token in prompts(1, 60, seed=8)[0]], 20)
    told.engine.step()
    lines = [[(13, 0.9), (7, 0.9)], [(right[1], 0.05)]] if not branch else [[(right[1], 0.9)], [(13, 0.3), (7, 0.9)]]
    told.engine.handle("link", Hinted(seq, hint_of([*healthy, right[0]], lines)))
    told.settle()
    assert not [event for event in told.events if isinstance(event, Refused)]
    assert told.answer(seq) == (right, digests)
    assert len(told.answer(company)[0]) == 20
    assert told.engine._model.pages.held == 0


def test_a_sick_request_takes_no_known_prefix_from_others(folder: str) -> None:
    system, tails = prompts(1, 300, seed=2)[0], prompts(3, 20)
    system, *tails = ([token + (token == 13) for token in part] for part in (system, *tails))
    told = Told(model_of(folder, kind=Hollow))
    found = []
    for tail in (tails[0], [13], tails[1]):
        seq = told.start([*system, *tail], 3)
        told.settle()
        found.append([emit.cached for emit in told.emits(seq)][:1])
    assert found == [[0], [], [300]]


def test_what_is_not_a_number_does_not_reach_who_shares_its_pass(folder: str) -> None:
    """Of unequal length: where the shorter one has no page, scores of the other stand in its place."""
    long, short = ([token + (token == 13) for token in prompt] for prompt in (prompts(1, 480)[0], prompts(1, 200)[0]))
    ((right, digests),) = alone(folder, "float32", [short], max_tokens=12)
    model = model_of(folder, kind=Hollow)
    told = Told(model, TargetConfig(prefill_chunk=480, row_budget=1024))
    sick = told.start([*long[:-1], 13])
    seq = told.start(short, 12)
    told.engine.step()
    assert len(told.events) == 2, "both were in that pass"
    told.settle()
    assert [event.seq for event in told.events if isinstance(event, Refused)] == [sick]
    assert told.answer(seq) == (right, digests)


def test_a_sick_prompt_in_chunks_leaves_its_company_alone(folder: str) -> None:
    """Its pages are no numbers long before its logits are looked at."""
    long, short = ([token + (token == 13) for token in prompt] for prompt in (prompts(1, 480)[0], prompts(1, 200)[0]))
    ((right, digests),) = alone(folder, "float32", [short], max_tokens=12)
    model = model_of(folder, kind=Poisoned)
    model.armed = True  # type: ignore[attr-defined]
    told = Told(model)
    sick = told.start([13, *long[1:]])
    told.engine.step()
    seq = told.start(short, 12)
    told.settle()
    assert [event.seq for event in told.events if isinstance(event, Refused)] == [sick]
    assert told.answer(seq) == (right, digests)


def test_a_sick_prompt_that_is_cancelled_leaves_nothing_behind(folder: str) -> None:
    """Nobody ever looked at its logits: its pages are scrubbed before somebody else has them."""
    long, healthy = ([token + (token == 13) for token in prompt] for prompt in prompts(2, 300))
    right = alone(folder, "float32", [healthy], max_tokens=12)
    model = model_of(folder, pages=4, kind=Poisoned)
    model.armed = True  # type: ignore[attr-defined]
    told = Told(model)
    sick = told.start([13, *long])
    told.engine.step()
    told.engine.step()
    told.engine.handle("link", Stop(sick))
    assert model.pages.idle == 0, "nobody finds them"
    for _ in range(2):
        seq = told.start(healthy, 12)
        told.settle()
        assert [told.answer(seq)] == right
        model.pages.forget()


def test_a_prompt_that_nobody_has_judged_is_shared_with_nobody(folder: str) -> None:
    """Its beginning is that of a healthy one, its page is sick behind that."""
    shared, tail, rest = ([token + (token == 13) for token in p] for p in prompts(3, 400))
    healthy = shared[:60] + tail[:40]
    right = alone(folder, "float32", [healthy], max_tokens=12)
    model = model_of(folder, kind=Poisoned)
    model.armed = True  # type: ignore[attr-defined]
    told = Told(model)
    told.start([*shared[:60], 13, *rest])
    told.engine.step()
    told.engine.step()
    seq = told.start(healthy, 12)
    told.settle()
    assert [told.answer(seq)] == right


def test_tokens_before_a_sick_row_are_told_with_hints_as_without(folder: str) -> None:
    """A right guess whose own row is no number ends the walk before it, not the request before its time."""
    prompt = [token + (token == 13) for token in prompts(1, 40)[0]]
    ((plain, _),) = alone(folder, "float32", [prompt], max_tokens=12)
    at = 5
    answers = []
    for hinted in (False, True):
        model = model_of(folder, kind=Unwell)
        model.sick_after = plain[at]  # type: ignore[attr-defined]
        told = Told(model)
        seq = told.start(prompt, 12, sources=(Source.MODEL,), max_draft_tokens=8)
        if hinted:
            told.engine.step()
            told.engine.handle(
                "link", Hinted(seq, hint_of([*prompt, plain[0]], [[(token, 0.95) for token in plain[1:]]]))
            )
        told.settle()
        assert any(isinstance(event, Refused) for event in told.events)
        answers.append(told.answer(seq)[0])
    assert plain.index(plain[at]) == at, "the token is met for the first time"
    assert answers[0] == plain[: at + 1] == answers[1]


def test_prompts_take_turns_and_a_short_one_does_not_wait_for_a_long_one() -> None:
    """A prompt of 32 tokens behind one of 4,000, beside 14 that decode; then two long ones side by side."""
    spec = SimSpec.parse("sim:pass=20ms,row=0.5ms,vocab=1000,context=8192")
    cost = PassCost([(rows, spec.pass_of(rows)) for rows in (1, 2, 4, 8, 16, 32, 64, 128, 256)])
    first = {}
    for others in ([("long", 4_000), ("short", 32)], [("one", 1_000), ("two", 1_000)]):
        told = Told(SimModel(spec, False, sleep=lambda seconds: None), TargetConfig(ngram=False), cost=cost)
        for prompt in prompts(14, 10):
            told.start(prompt, 2_000)
        for _ in range(3):
            told.engine.step()
        seqs = {name: told.start(prompts(1, length, seed=length)[0], 2_000) for name, length in others}
        for passes in range(1, 700):
            told.engine.step()
            first.update({name: passes for name, seq in seqs.items() if name not in first and told.emits(seq)})
        told.events.clear()
    assert first["short"] <= 2 * 32 / FEWEST_PROMPT_ROWS, "every other pass is its own"
    assert abs(first["one"] - first["two"]) <= 2, first


@pytest.mark.parametrize("length", [40, TILE - 1, TILE])
def test_a_guess_that_is_not_a_number_costs_nothing_but_the_guess(folder: str, length: int) -> None:
    """Hinted on the main line and on a branch: the answer is the plain one, bit for bit."""
    healthy = [token + (token == 13) for token in prompts(1, length)[0]]
    ((right, digests),) = alone(folder, "float32", [healthy])
    assert 13 not in right
    model = model_of(folder, kind=Poisoned)
    model.armed = True  # type: ignore[attr-defined]
    for lines in ([[(13, 0.9), (5, 0.9)]], [[(right[0], 0.9), (right[1], 0.9)], [(13, 0.4)]]):
        model.pages.forget()
        told = Told(model)
        seq = told.start(healthy, sources=(Source.MODEL,), max_draft_tokens=16)
        told.engine.handle("link", Hinted(seq, hint_of(healthy, lines)))
        told.settle()
        assert told.emits(seq)[0].windows != (0,)
        assert told.answer(seq) == (right, digests)
        assert model.pages.held == 0


def test_who_waits_copies_nothing_and_is_told_what_was_found_when_it_began(folder: str) -> None:
    model = model_of(folder, pages=5)
    system, (first, second) = prompts(1, 200)[0], prompts(2, 60, seed=6)
    told = Told(model)
    told.start(system + first, 100)
    for _ in range(5):
        told.engine.step()
    waiting = told.start(system + second, 100)
    assert isinstance(model.attention, TiledAttention)
    before = model.attention.bytes_moved
    while told.engine.lineup.waiting_len:
        told.engine.step()
        if told.engine.lineup.waiting_len:
            assert model.attention.bytes_moved == before
    told.settle()
    assert told.emits(waiting)[0].cached == 200


class Dying(Failing):
    """Its group dies in every pass."""

    fail = True

    def restart(self) -> None:
        super().restart()
        self.fail = True


def test_a_group_that_dies_in_every_pass_ends_the_worker(folder: str) -> None:
    model = model_of(folder, kind=Failing)
    told = Told(model)
    told.start([1, 2, 3])
    model.__class__ = Dying
    model.fail = True
    with pytest.raises(GroupLost, match="SIGKILL"):
        told.settle()
    assert isinstance(model, Failing)
    assert model.lost == 4


@pytest.mark.parametrize("source", [None, Source.NGRAM, Source.EARLY_EXIT])
def test_hints_of_a_source_that_was_not_asked_for_are_not_kept(folder: str, source: Source | None) -> None:
    (prompt,) = prompts(1, 20)
    told = Told(model_of(folder))
    seq = told.start(prompt, sources=(Source.MODEL, Source.NGRAM), max_draft_tokens=16)
    hint = hint_of(prompt, [[(1, 0.9), (2, 0.9)]])
    hint.tree.sources[1:] = [source, source]
    told.engine.handle("link", Hinted(seq, hint))
    told.settle()
    assert told.emits(seq)[0].windows == (0,)


class Traced(Told):
    """Also keeps what its spans say of hits, pass by pass."""

    def __init__(self, model: Model, **more: Any) -> None:
        self.spans: list[str] = []
        super().__init__(model, record=self._record, **more)

    def _record(self, traceparent: str, name: str, start_ns: int, end_ns: int, attributes: Any) -> None:
        causes = [key.removeprefix("forerun.") for key in attributes if key.removeprefix("forerun.") in CAUSES]
        self.spans.append(causes[0] if causes else "-")

    def hint(self, seq: SeqId, known: list[int], lines: list[list[tuple[int, float]]]) -> None:
        self.engine.handle("link", Hinted(seq, hint_of(known, lines)))


CAUSES = [hit.name.lower() for hit in Hit]


def test_what_was_known_when_a_pass_needed_it_is_told_by_emits_and_spans(folder: str) -> None:
    prompt = prompts(1, 20)[0]
    ((right, _),) = alone(folder, "float32", [prompt])
    other = [(token + 1) % VOCAB for token in right]
    told = Traced(model_of(folder))
    seq = told.start(prompt, 12, sources=(Source.MODEL,), max_draft_tokens=2)
    told.engine.step()  # the prompt: nobody could know anything
    told.hint(seq, prompt + right[:1], [[(right[1], 0.9), (right[2], 0.9), (right[3], 0.9), (right[4], 0.9)]])
    told.engine.step()  # awaited; 2 of 4 are checked, and the third is the token after them
    told.engine.step()  # continued: the fourth; then the tree ends
    told.engine.step()  # nothing is known
    told.hint(seq, prompt + right[:6], [[(right[6], 0.9), (right[7], 0.9)]])  # it would have served that pass
    told.engine.step()  # what is left of it serves this one
    told.hint(seq, prompt + right[:8], [[(other[8], 0.9), (9, 0.9)], [(right[8], 0.1), (right[9], 0.9)]])
    told.engine.step()
    told.settle()
    sums = [sum(emit.hits[hit] if emit.hits else 0 for emit in told.emits(seq)) for hit in Hit]
    assert told.answer(seq)[0] == right[:12]
    assert told.spans == ["-", "awaited", "continued", "late", "awaited", "awaited", "-"]  # no room for a guess
    assert sums == [told.spans.count(cause) for cause in CAUSES]


def test_a_branch_that_holds_the_correction_is_a_hit(folder: str) -> None:
    """One node is checked: the likelier, wrong one; the runner-up was right and goes on."""
    prompt = prompts(1, 20)[0]
    ((right, _),) = alone(folder, "float32", [prompt])
    wrong = (right[1] + 1) % VOCAB
    told = Traced(model_of(folder))
    seq = told.start(prompt, 8, sources=(Source.MODEL,), max_draft_tokens=1)
    told.engine.step()
    told.hint(seq, prompt + right[:1], [[(wrong, 0.9)], [(right[1], 0.3), (right[2], 0.9)]])
    told.engine.step()
    told.engine.step()
    told.settle()
    assert told.spans[1:3] == ["awaited", "branch"]
    assert told.answer(seq)[0] == right[:8]


def test_a_pass_that_a_lost_rank_ended_is_counted_once(folder: str) -> None:
    (prompt,) = prompts(1, 20)
    ((right, _),) = alone(folder, "float32", [prompt])
    model = model_of(folder, kind=Failing)
    assert isinstance(model, Failing)
    told = Traced(model)
    seq = told.start(prompt, sources=(Source.MODEL,), max_draft_tokens=16)
    told.engine.step()
    told.engine.step()  # nothing is known: open
    told.hint(seq, [*prompt, *right[:2]], [[(right[2], 0.9)]])
    for _ in range(3):
        model.fail = True
        told.engine.step()
    told.settle()
    assert model.lost == 3
    assert sum(sum(emit.hits) for emit in told.emits(seq)) <= len(told.emits(seq))
    assert all(sum(emit.hits) <= emit.passes + 1 for emit in told.emits(seq))


def test_waiting_has_an_end_whatever_comes(folder: str) -> None:
    """Hints that never say anything new, at any pace, hold a pass back by less than a pass."""
    (prompt,) = prompts(1, 20)
    ((right, _),) = alone(folder, "float32", [prompt])
    now = [0.0]
    told = Told(Timed(model_of(folder), now), clock=lambda: now[0])
    seq = told.start(prompt, sources=(Source.MODEL,), max_draft_tokens=16)
    known = list(prompt)
    for token in right[:6]:  # punctual until now
        told.engine.step()
        known.append(token)
        now[0] += 0.01
        told.engine.handle("link", Hinted(seq, hint_of(known, [[(0, 0.9)]])))
    told.engine.step()
    ended, waited = now[0], 0
    while told.engine.hold_until() is not None:
        now[0] += 0.01
        waited += 1
        branch = [[(waited % VOCAB, 0.01)]]
        told.engine.handle("link", Hinted(seq, hint_of([*known, right[6]], branch)))
        assert now[0] - ended < 1.0, "a pass takes a second"
    assert waited > 0


def test_a_draft_that_is_not_heard_is_waited_for_once(folder: str) -> None:
    """Also if the share of a pass that may be waited is over before its hint is overdue."""
    (prompt,) = prompts(1, 20)
    ((right, _),) = alone(folder, "float32", [prompt])
    now = [0.0]
    told = Told(Timed(model_of(folder), now), clock=lambda: now[0])
    seq = told.start(prompt, sources=(Source.MODEL,), max_draft_tokens=16)
    for _ in range(4):
        told.engine.step()
        said = [token for emit in told.emits(seq) for token in emit.tokens]
        now[0] += 0.4  # until it is heard; it is overdue after as long again
        told.engine.handle("link", Hinted(seq, hint_of([*prompt, *said], [[(right[len(said)], 0.9)]])))
    waited = []
    for _ in range(4):
        told.engine.step()
        began = now[0]
        while (until := told.engine.hold_until()) is not None:
            now[0] = until
            told.engine.held_in_vain()
        waited.append(now[0] - began)
    assert waited == [pytest.approx(0.75), 0.0, 0.0, 0.0]


class Timed:
    """A pass of another model takes a second."""

    def __init__(self, model: Model, now: list[float]) -> None:
        self._model, self._now = model, now

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def forward(self, runs: Sequence[Run]) -> list[NDArray[np.float32]]:
        self._now[0] += 1.0
        return self._model.forward(runs)


def test_what_a_draft_says_after_lookup_is_the_drafts(folder: str) -> None:
    """Both say the same, and right: passes find it waiting, and each source is judged by what is its own."""
    (prompt,) = prompts(1, 60)
    ((right, _),) = alone(folder, "float32", [prompt], max_tokens=20)
    causes = []
    for sources in ((Source.MODEL,), (Source.MODEL, Source.NGRAM)):
        told = Traced(model_of(folder))
        seq = told.start(prompt, 20, sources=sources, max_draft_tokens=3, trace_detail=True)
        told.engine.step()
        while (sequence := told.engine.lineup.get(("link", seq))) is not None:
            text = list(sequence.text.tokens)
            guess = right[len(text) - len(prompt) : -1][:3]  # none can follow the last token
            if Source.NGRAM in sources:
                looked_up, node = sequence.text.tree, ROOT
                for token in guess:
                    node = looked_up.add(node, token, 0.5, Source.NGRAM)
            if guess:
                told.hint(seq, text, [[(token, 0.6) for token in guess]])
                tree = sequence.text.tree
                assert {(tree.sources[node], tree.scores[node]) for node in tree.descend(guess)} == {
                    (Source.MODEL, 0.6)
                }
                thanks_to_it = 0 if Source.NGRAM in sources else len(guess)
                assert sequence._brought(list(tree.descend(guess))) == thanks_to_it
            told.engine.step()
        causes.append(told.spans)
    assert causes[0] == causes[1]
    assert told.engine._trust[Source.NGRAM].chance(0.5, 1) > Calibration().chance(0.5, 1), "it was right too"
    assert "awaited" in causes[0]
