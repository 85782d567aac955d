"""What overlap is worth, in virtual time: the real engines, a pass of 20 ms, nothing else takes longer than stated."""

from __future__ import annotations

import pytest
from virtual import decode

from forerun.core.formulas import possible_waiting_share
from forerun.core.hits import waiting_share


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


@pytest.mark.parametrize(("accept", "least"), [(0.7, 1.4), (0.6, 1.15)])
async def test_a_weak_draft_over_a_slow_network_is_not_given_up(accept: float, least: float) -> None:
    """Its first hints come late, and a probe has to reach beyond the passes that begin before it is heard."""
    assert (await decode(accept, 0.1, 0.3, hop_s=0.005)).rate >= least


async def test_many_streams_are_never_slower_than_plain() -> None:
    plain = await decode(0.8, 0.1, 0.7, streams=32, answers=1, draft=False)
    seen = await decode(0.8, 0.1, 0.7, streams=32, answers=1)
    assert plain.rate == pytest.approx(32.0, rel=0.05)
    assert seen.rate > 1.5 * plain.rate


async def test_a_useless_draft_costs_next_to_nothing() -> None:
    plain, seen = await decode(0.0, 0.1, 0.0, draft=False), await decode(0.0, 0.1, 0.0)
    assert seen.rate >= 0.97 * plain.rate
