"""The target's answer is its own, whatever is hinted: tiny float32 models, every kind of draft, faults."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch
from cluster import Cluster, ScriptedDraft, asks, level
from models import tiny_model
from transformers import AutoModelForCausalLM

from coordinator.session import Session
from draft_worker.engine import DraftConfig, DraftEngine
from forerun.core.params import Source, Verification
from forerun.rpc.fakes import Faults
from forerun.runtime.forward import TransformersModel
from forerun.runtime.models import load_causal_lm
from target_worker.engine import TargetConfig, TargetEngine

VOCAB, CONTEXT = 256, 512
N = 40


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("models")
    return {
        "target": tiny_model(root / "target", layers=3, seed=1),
        "other": tiny_model(root / "other", seed=2),
    }


@pytest.fixture(scope="module")
def models(folders: dict[str, str]) -> dict[str, TransformersModel]:
    torch.set_num_threads(1)

    def load(name: str, layers: int | None = None, dtype: str = "float32") -> TransformersModel:
        return TransformersModel(load_causal_lm(folders[name], dtype, layers), CONTEXT)

    half = load("target", dtype="bfloat16")
    return {"same": load("target"), "near": load("target", 1), "other": load("other"), "bfloat16": half}


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    rng = random.Random(5)
    return [[rng.randrange(VOCAB) for _ in range(length)] for length in (1, 2, 5, 17, 40, 64, 130, 200)]


@pytest.fixture(scope="module")
def reference(folders: dict[str, str], prompts: list[list[int]]) -> list[list[int]]:
    """What transformers itself says, greedily."""
    model = AutoModelForCausalLM.from_pretrained(folders["target"], dtype=torch.float32)
    answers = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=N, do_sample=False)
        answers.append(out[0, len(prompt) :].tolist())
    return answers


def target(models: dict[str, TransformersModel], name: str = "same") -> Any:
    models[name].pages.forget()  # what tests before knew
    return lambda emit: TargetEngine(models[name], VOCAB, TargetConfig(), emit, **level())


def draft(model: TransformersModel, **config: Any) -> Any:
    return lambda emit: DraftEngine(model, VOCAB, DraftConfig(**config), emit)


def texts(sessions: list[Session]) -> list[list[int]]:
    return [session.ledger.completion for session in sessions]


def tokens_per_pass(sessions: list[Session]) -> float:
    counts = [session.counts(len(session.ledger.completion)) for session in sessions]
    return sum(len(session.ledger.completion) for session in sessions) / sum(count.passes for count in counts)


def acceptance(sessions: list[Session]) -> float:
    counts = [session.counts(len(session.ledger.completion)) for session in sessions]
    return sum(count.accepted for count in counts) / sum(count.drafted for count in counts)


@pytest.mark.parametrize("chosen", ["same", "near", "other"])
@pytest.mark.parametrize("lookahead", [1, 2, 4, 8])
async def test_drafts_do_not_change_greedy_text(
    models: dict[str, TransformersModel],
    prompts: list[list[int]],
    reference: list[list[int]],
    chosen: str,
    lookahead: int,
) -> None:
    cluster = Cluster()
    cluster.attach_target(target(models))
    cluster.attach_draft(draft(models[chosen]))
    asked = asks(N, sources=[Source.MODEL], lookahead=lookahead)
    sessions = await cluster.answer(*((prompt, asked) for prompt in prompts))
    assert texts(sessions) == reference
    if chosen == "same":
        assert acceptance(sessions) == 1.0
        assert tokens_per_pass(sessions) > 1.2


@pytest.mark.parametrize("sources", [[], [Source.NGRAM], [Source.MODEL], [Source.MODEL, Source.NGRAM]])
async def test_sources_do_not_change_greedy_text(
    models: dict[str, TransformersModel], prompts: list[list[int]], reference: list[list[int]], sources: list[Source]
) -> None:
    cluster = Cluster()
    cluster.attach_target(target(models))
    cluster.attach_draft(draft(models["near"]))
    sessions = await cluster.answer(*((prompt, asks(N, sources=sources)) for prompt in prompts))
    assert texts(sessions) == reference
    drafted = [session.counts(N).drafted for session in sessions]
    assert any(drafted) == bool(sources)


WRONG = {
    "always": lambda position: True,
    "never": lambda position: False,
    "sometimes": lambda position: position % 3 == 0,
}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize(
    "faults",
    [Faults(), Faults(delay=(0, 1)), Faults(drop=0.3, repeat=0.3, delay=(0, 1))],
    ids=["clean", "delayed", "lossy"],
)
async def test_wrong_late_and_lost_hints(
    models: dict[str, TransformersModel],
    prompts: list[list[int]],
    reference: list[list[int]],
    wrong: str,
    faults: Faults,
) -> None:
    answers = {tuple(prompt): answer for prompt, answer in zip(prompts, reference, strict=True)}
    cluster = Cluster(faults)
    cluster.attach_target(target(models))
    cluster.attach_draft(lambda emit: ScriptedDraft(emit, answers, WRONG[wrong]))
    sessions = await cluster.answer(*((prompt, asks(N, sources=[Source.MODEL])) for prompt in prompts))
    assert texts(sessions) == reference
    if wrong == "always":  # when late, such a hint has been overtaken: it is not even checked
        assert sum(session.counts(N).accepted for session in sessions) == 0
        assert faults.delay != (0, 0) or sum(session.counts(N).drafted for session in sessions) > 0
    if wrong == "never":
        assert acceptance(sessions) == 1.0
        assert tokens_per_pass(sessions) > 1.2


async def test_draft_killed_in_the_middle_and_another_comes(
    models: dict[str, TransformersModel], prompts: list[list[int]], reference: list[list[int]]
) -> None:
    cluster = Cluster(Faults(delay=(0, 1)))
    cluster.attach_target(target(models))
    first = cluster.attach_draft(draft(models["same"]))

    def fault(tick: int) -> None:
        if tick == 5:
            first.kill()
        if tick == 12:
            cluster.attach_draft(draft(models["same"]))

    sessions = await cluster.answer(*((p, asks(N, sources=[Source.MODEL])) for p in prompts), after_tick=fault)
    assert texts(sessions) == reference
    assert tokens_per_pass(sessions) > 1.1  # the time without a draft included


async def test_target_killed_in_the_middle_and_another_goes_on(
    models: dict[str, TransformersModel], prompts: list[list[int]], reference: list[list[int]]
) -> None:
    cluster = Cluster()
    first = cluster.attach_target(target(models))
    cluster.attach_target(target(models))
    cluster.attach_draft(draft(models["same"]))

    def fault(tick: int) -> None:
        if tick == 6:
            first.kill()

    sessions = await cluster.answer(*((p, asks(N, sources=[Source.MODEL])) for p in prompts), after_tick=fault)
    assert texts(sessions) == reference
    assert not any(session.not_exact for session in sessions)


@pytest.mark.parametrize("precision", ["same", "bfloat16"])
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.3])
async def test_batches_and_speculation_do_not_change_seeded_text(
    models: dict[str, TransformersModel], prompts: list[list[int]], temperature: float, precision: str
) -> None:
    """Coupled picks: batch 1, 4 and 16, on and off, the same ids, in float32 and in bfloat16."""
    asked = [(prompts[i % len(prompts)], i) for i in range(16)]

    async def answers(batch: int, sources: list[Source]) -> list[list[int]]:
        cluster = Cluster()
        cluster.attach_target(target(models, precision))
        cluster.attach_draft(draft(models[precision]))
        found: list[list[int]] = []
        for at in range(0, len(asked), batch):
            wanted = (
                (prompt, asks(24, sources=sources, temperature=temperature, seed=seed, top_p=0.95))
                for prompt, seed in asked[at : at + batch]
            )
            sessions = await cluster.answer(*wanted)
            if sources:
                assert tokens_per_pass(sessions) > 1.2
            found.extend(texts(sessions))
        return found

    plain = await answers(1, [])
    for batch in (1, 4, 16):
        assert await answers(batch, [Source.MODEL]) == plain
    assert await answers(16, []) == plain
    assert len({tuple(answer) for answer in plain}) >= len(prompts)


async def test_draft_equal_to_target_is_accepted_fully_under_sampling(
    models: dict[str, TransformersModel], prompts: list[list[int]]
) -> None:
    for verification in (Verification.COUPLED, Verification.REJECTION):
        cluster = Cluster()
        cluster.attach_target(target(models))
        cluster.attach_draft(draft(models["same"]))
        asked = asks(N, sources=[Source.MODEL], temperature=1.0, seed=3, top_k=20, verification=verification)
        sessions = await cluster.answer(*((prompt, asked) for prompt in prompts))
        # Rejection sends q rounded to float32, so a ratio may fall short of 1 by as much.
        assert acceptance(sessions) == 1.0
        assert tokens_per_pass(sessions) > 1.2


async def test_a_missing_kv_cut_is_seen(
    models: dict[str, TransformersModel],
    prompts: list[list[int]],
    reference: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Negative control: rejected rows stay in the KV and what follows is computed after them."""
    from target_worker.sequence import TargetSequence

    lay, commit = TargetSequence.lay, TargetSequence.commit
    uncut: dict[Any, int] = {}

    def lay_after_uncut(self: Any, share: Any) -> Any:
        at, rejected = self.kv.cached_len, uncut.get(self, 0)
        self.text.tokens[at:at] = [0] * rejected
        self.kv.cached_len += rejected
        runs = lay(self, share)
        del self.text.tokens[at : at + rejected]
        self.kv.cached_len -= rejected
        return runs

    def commit_without_cut(self: Any, decided: Any, checked: Any, now: float) -> Any:
        uncut[self] = uncut.get(self, 0) + len(checked) - decided.accepted
        return commit(self, decided, checked, now)

    monkeypatch.setattr(TargetSequence, "lay", lay_after_uncut)
    monkeypatch.setattr(TargetSequence, "commit", commit_without_cut)
    answers = {tuple(prompt): answer for prompt, answer in zip(prompts, reference, strict=True)}
    cluster = Cluster()
    cluster.attach_target(target(models))
    cluster.attach_draft(lambda emit: ScriptedDraft(emit, answers, WRONG["sometimes"]))
    sessions = await cluster.answer(*((prompt, asks(N, sources=[Source.MODEL])) for prompt in prompts))
    assert texts(sessions) != reference


@pytest.mark.parametrize("bad", [190, 200, 230])
async def test_hints_that_turn_good_pay_again_within_twenty_passes(
    models: dict[str, TransformersModel], bad: int
) -> None:
    """Wrong for 200 tokens, right from then on: nine tenths of the gain are back within 20 passes, rests and all."""
    prompt, good = [3, 1, 4], 200
    cluster = Cluster()
    cluster.attach_target(target(models))
    (plain,) = texts(await cluster.answer((prompt, asks(bad + good, sources=[]))))
    cluster = Cluster()
    worker = cluster.attach_target(target(models))
    turn = len(prompt) + bad
    cluster.attach_draft(lambda emit: ScriptedDraft(emit, {tuple(prompt): plain}, lambda position: position < turn))
    lengths: list[int] = []

    def note(_: int) -> None:
        lengths.append(cluster.sessions[0].ledger.committed_len)

    (session,) = await cluster.answer((prompt, asks(bad + good, sources=[Source.MODEL], lookahead=8)), after_tick=note)
    assert session.ledger.completion == plain
    turned = next(tick for tick, length in enumerate(lengths) if length >= turn)
    steps = [after - before for before, after in itertools.pairwise(lengths)]
    steady = max(sum(steps[at : at + 10]) / 10 for at in range(turned, len(steps) - 10))
    assert steady > 3.0, "such hints are worth something"
    back = min(at for at in range(turned, len(steps) - 5) if sum(steps[at : at + 5]) / 5 >= 1 + 0.9 * (steady - 1))
    assert back - turned <= 20
    assert sum(steps[:turned]) / turned < 1.05, "and before they were worth nothing"
    assert worker.engine.passes == len([step for step in steps if step]) + 1
