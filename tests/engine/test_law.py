"""20,000 answers of the real engines, over the wire and with faults, follow the target's exact law.

tests/unit/test_distribution.py covers settings; here the loop itself is on trial: the target's judging,
the draft's growing, laws in float32 on the wire, late and lost hints, batches.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from cluster import Cluster, asks, level

from draft_worker.engine import DraftConfig, DraftEngine
from forerun.core.law import filtered
from forerun.core.params import Sampling, Source, Verification
from forerun.rpc.fakes import Faults
from forerun.runtime.sim import SimModel, SimSpec
from target_worker.engine import TargetConfig, TargetEngine
from tests.statistics_oracle import LEVEL, g_test, total_variation, variation_bound

VOCAB, PROMPT, LENGTH, DRAWS, BATCH = 4, (1, 2), 3, 20_000, 250
FAULTS = Faults(drop=0.1, repeat=0.1, delay=(0, 1))


class Table(SimModel):
    """Logits are a function of the last two tokens."""

    def __init__(self, seed: int, near: np.ndarray | None = None) -> None:
        super().__init__(SimSpec(pass_s=0.0, step_s=0.0, vocab=VOCAB, context=64), draft=False, pages=8 * BATCH)
        noise = np.random.default_rng(seed).normal(0.0, 1.2, (VOCAB, VOCAB, VOCAB))
        self.table = (noise if near is None else near + 0.5 * noise).astype(np.float32)

    def _rows(self, prefixes: list[Any]) -> Any:
        if not prefixes:
            return np.zeros((0, VOCAB), np.float32)
        return np.stack([self.table[prefix[-2], prefix[-1]] for prefix in prefixes])


TARGET = Table(1)
DRAFT = Table(2, near=TARGET.table)


def exact(sampling: Sampling) -> dict[tuple[int, ...], float]:
    """Joint law of the first LENGTH tokens."""
    found: dict[tuple[int, ...], float] = {}

    def follow(prefix: Sequence[int], chance: float) -> None:
        if len(prefix) == len(PROMPT) + LENGTH:
            found[tuple(prefix[len(PROMPT) :])] = chance
            return
        law = filtered(TARGET.table[prefix[-2], prefix[-1]], sampling)
        for token, probability in zip(law.ids, law.probabilities, strict=True):
            follow((*prefix, int(token)), chance * float(probability))

    follow(PROMPT, 1.0)
    return found


@pytest.mark.timeout(400)
@pytest.mark.parametrize("verification", [Verification.COUPLED, Verification.REJECTION])
async def test_engines_follow_the_exact_law(verification: Verification) -> None:
    sampling = {"temperature": 0.9, "top_p": 0.95, "verification": verification}
    counts: Counter[tuple[int, ...]] = Counter()
    accepted = 0
    for first in range(0, DRAWS, BATCH):
        cluster = Cluster(FAULTS, seed=first)
        config = TargetConfig(max_sequences=BATCH // 5)  # those that wait their turn are drafted for meanwhile
        cluster.attach_target(lambda emit, config=config: TargetEngine(TARGET, VOCAB, config, emit, **level()))
        grows = DraftConfig(max_sequences=BATCH, width=2 * BATCH, row_budget=10_000)
        cluster.attach_draft(lambda emit, grows=grows: DraftEngine(DRAFT, VOCAB, grows, emit), steps=2)
        asked = (asks(LENGTH + 1, sources=[Source.MODEL], seed=first + n, **sampling) for n in range(BATCH))
        sessions = await cluster.answer(*((PROMPT, params) for params in asked))
        counts.update(tuple(session.ledger.completion[:LENGTH]) for session in sessions)
        accepted += sum(session.counts(LENGTH + 1).accepted for session in sessions)
    law = exact(Sampling(**sampling))
    assert sum(counts.values()) == DRAWS
    assert set(counts) <= set(law), "a token without probability was drawn"
    assert total_variation(counts, law) < variation_bound(law, DRAWS)
    assert g_test(counts, law) > LEVEL
    assert accepted > DRAWS // 4, "speculation took place"
