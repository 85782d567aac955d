"""What overlap is worth, in virtual time: the real engines, a pass of 20 ms, nothing else takes longer than stated."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
from cluster import asks
from virtual import VirtualCluster

from forerun.core.formulas import possible_waiting_share
from forerun.core.hits import added, waiting_share
from forerun.core.params import Source
from forerun.runtime.sim import SimSpec

PASS_S = 0.020
TOKENS = 400


@dataclass(frozen=True)
class Seen:
    """What some answers took."""

    rate: float  # tokens per pass-time: plain decoding is 1
    tokens_per_pass: float
    hits: tuple[int, ...]
    depth: float  # positions guessed per pass


async def decode(
    accept: float,
    step: float,
    branch: float,
    *,
    streams: int = 1,
    answers: int = 4,
    hop_s: float = 80e-6,
    draft: bool = True,
    chains: bool = True,
) -> Seen:
    """step: of the draft, in passes."""
    spec = SimSpec(PASS_S, 0.0, step * PASS_S, accept, branch)
    rng = random.Random(1)
    tokens = passes = drafted = 0
    seconds, hits = 0.0, ()
    for _ in range(answers):
        cluster = VirtualCluster(hop_s)
        cluster.attach_sim(spec, draft=False, chains=chains, max_sequences=streams)
        if draft:
            cluster.attach_sim(spec, draft=True)
        asked = asks(TOKENS, sources=[Source.MODEL] if draft else [], lookahead=8)
        prompts = [[rng.randrange(spec.vocab) for _ in range(30)] for _ in range(streams)]
        for session in await cluster.answer_all(*((prompt, asked) for prompt in prompts)):
            counts = session.counts(TOKENS)
            tokens, passes, drafted = tokens + TOKENS, passes + counts.passes, drafted + counts.drafted
            hits = added(hits, counts.hits)
        seconds += cluster.now
    return Seen(tokens * PASS_S / seconds, tokens / passes, hits, drafted / passes)


@pytest.mark.parametrize(
    ("accept", "step", "branch", "alternating", "least"),
    [
        (0.8, 0.1, 0.7, 2.41, 3.3),
        (0.7, 0.1, 0.7, 1.94, 2.4),
        (0.9, 0.1, 0.7, 3.36, 4.5),
        (0.8, 0.2, 0.7, 1.83, 2.6),
        (0.6, 0.1, 0.3, 1.5, 1.6),
        (0.8, 0.1, 0.3, 2.41, 2.7),
    ],
)
async def test_overlap_beats_drafting_in_turn(
    accept: float, step: float, branch: float, alternating: float, least: float
) -> None:
    """alternating: what drafting and verifying in turn could reach at best."""
    seen = await decode(accept, step, branch)
    assert seen.rate >= least > alternating
    possible = possible_waiting_share(accept, seen.depth, branch)
    assert waiting_share(seen.hits) >= 0.9 * possible


async def test_trees_are_worth_no_less_than_chains() -> None:
    chains, trees = await decode(0.7, 0.1, 0.7), await decode(0.7, 0.1, 0.7, chains=False)
    assert trees.rate > chains.rate


async def test_a_slow_network_is_overlapped_too() -> None:
    """A hint is a pass behind: what would alternate waits for 20 ms in every round."""
    assert (await decode(0.8, 0.1, 0.7, hop_s=0.005)).rate >= 2.4


async def test_many_streams_are_never_slower_than_plain() -> None:
    plain = await decode(0.8, 0.1, 0.7, streams=32, answers=1, draft=False)
    seen = await decode(0.8, 0.1, 0.7, streams=32, answers=1)
    assert plain.rate == pytest.approx(32.0, rel=0.05)
    assert seen.rate > 1.5 * plain.rate


async def test_a_useless_draft_costs_next_to_nothing() -> None:
    plain, seen = await decode(0.0, 0.1, 0.0, draft=False), await decode(0.0, 0.1, 0.0)
    assert seen.rate >= 0.97 * plain.rate
