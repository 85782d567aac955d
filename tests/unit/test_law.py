"""Filters against a plain-Python oracle, and draws from them against their own probabilities."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from forerun.core import law as law_module
from forerun.core.formulas import acceptance, coupled_acceptance_bound
from forerun.core.law import (
    Law,
    as_law,
    draft_law,
    filtered,
    greedy,
    judge,
    likeliest,
    point_mass,
    residual,
)
from forerun.core.noise import Domain, exponential, uniform, uniforms
from forerun.core.params import Sampling
from forerun.core.tree import NodeLaw

often = settings(max_examples=300, deadline=None, derandomize=True)


def row(*logits: float) -> NDArray[np.float32]:
    return np.array(logits, dtype=np.float32)


def oracle(logits: NDArray[np.float32], sampling: Sampling) -> dict[int, float]:
    order = sorted((t for t in range(len(logits)) if logits[t] > -np.inf), key=lambda t: (-float(logits[t]), t))
    peak = float(logits[order[0]])
    weight = {t: math.exp((float(logits[t]) - peak) / sampling.temperature) for t in order}
    order = [t for t in order if weight[t] > 0.0]
    if sampling.top_k:
        order = order[: sampling.top_k]
    if sampling.top_p < 1.0:
        mass = sum(weight[t] for t in order)
        kept, reached = [], 0.0
        for t in order:
            kept.append(t)
            reached += weight[t]
            if reached >= sampling.top_p * mass:
                break
        order = kept
    order = [t for t in order if weight[t] >= sampling.min_p]
    mass = math.fsum(weight[t] for t in order)
    return {t: weight[t] / mass for t in order}


def as_dict(law: Law) -> dict[int, float]:
    return dict(zip(law.ids.tolist(), law.probabilities.tolist(), strict=True))


def vector(law: Law, size: int) -> NDArray[np.float64]:
    return np.array([law.of(token) for token in range(size)])


# Eighths, as bfloat16 would have them: ties are frequent.
logit_rows = st.lists(st.integers(-24, 24).map(lambda n: n / 8) | st.just(-np.inf), min_size=1, max_size=12).filter(
    lambda logits: max(logits) > -np.inf
)
samplings = st.builds(
    Sampling,
    temperature=st.sampled_from([0.05, 0.3, 0.7, 1.0, 1.7, 4.0]),
    top_k=st.integers(0, 14),
    top_p=st.sampled_from([1.0, 0.97, 0.83, 0.5, 0.11, 1e-9]),
    min_p=st.sampled_from([0.0, 0.031, 0.23, 1.0]),
)


@often
@given(logit_rows, samplings)
def test_filtered_is_the_documented_order_of_filters(logits: list[float], sampling: Sampling) -> None:
    law = filtered(row(*logits), sampling)
    expected = oracle(row(*logits), sampling)
    assert set(law.ids.tolist()) == set(expected)
    assert as_dict(law) == pytest.approx(expected, rel=1e-12)


@often
@given(logit_rows, samplings)
def test_a_law_is_a_law(logits: list[float], sampling: Sampling) -> None:
    law = filtered(row(*logits), sampling)
    assert law.ids.dtype == np.int64 and law.probabilities.dtype == np.float64
    assert len(set(law.ids.tolist())) == len(law.ids) >= 1
    assert (law.probabilities > 0.0).all()
    assert law.probabilities.sum() == pytest.approx(1.0, abs=1e-12)
    assert all(logits[token] > -np.inf for token in law.ids)
    assert greedy(row(*logits)) in law.ids  # no filter cuts the likeliest


@often
@given(logit_rows, samplings, st.integers(-4, 4))
def test_filters_do_not_see_a_shift_of_the_row(logits: list[float], sampling: Sampling, shift: int) -> None:
    one, other = filtered(row(*logits), sampling), filtered(row(*logits) + np.float32(shift), sampling)
    assert one.ids.tolist() == other.ids.tolist()
    assert one.probabilities.tolist() == pytest.approx(other.probabilities.tolist(), rel=1e-12)


def test_filtered_does_not_touch_the_row() -> None:
    logits = row(1.0, 2.0, 3.0)
    logits.flags.writeable = False
    filtered(logits, Sampling(temperature=0.5, top_k=2, top_p=0.9, min_p=0.1))
    assert logits.tolist() == [1.0, 2.0, 3.0]


@pytest.mark.parametrize(
    ("sampling", "kept"),
    [
        (Sampling(), {0, 1, 2, 3, 4}),
        (Sampling(top_k=1), {1}),
        (Sampling(top_k=2), {1, 2}),  # 1, 2 and 4 tie: ids ascending
        (Sampling(top_k=3), {1, 2, 4}),
        (Sampling(top_k=4), {0, 1, 2, 4}),
        (Sampling(top_k=99), {0, 1, 2, 3, 4}),
        (Sampling(top_p=0.2), {1}),  # 0.25 each for the three that tie
        (Sampling(top_p=0.4), {1, 2}),
        (Sampling(top_p=0.6), {1, 2, 4}),
        (Sampling(top_p=0.9), {0, 1, 2, 4}),
        (Sampling(top_p=0.0), {1}),
        (Sampling(min_p=1.0), {1, 2, 4}),
        (Sampling(min_p=0.7), {1, 2, 4}),
        (Sampling(min_p=0.6), {0, 1, 2, 4}),
        (Sampling(min_p=0.6, temperature=0.5), {1, 2, 4}),  # the ratio 2/3 becomes 4/9
        (Sampling(top_k=2, top_p=0.6), {1, 2}),  # of the two that top_k left, 0.5 is not enough
        (Sampling(top_k=2, top_p=0.45), {1}),
        (Sampling(top_k=4, top_p=0.7), {1, 2, 4}),  # 0.75 / 0.9167 of what top_k left
        (Sampling(top_p=0.9, min_p=0.7), {1, 2, 4}),
    ],
)
def test_cuts_fall_exactly(sampling: Sampling, kept: set[int]) -> None:
    """Probabilities 1/6, 1/4, 1/4, 1/12, 1/4."""
    logits = row(*np.log([2.0, 3.0, 3.0, 1.0, 3.0]))
    assert set(filtered(logits, sampling).ids.tolist()) == kept


@pytest.mark.parametrize("peak", [0.0, 3e4, -3e4])
@pytest.mark.parametrize("temperature", [1e-4, 1.0, 1e6])
def test_extreme_rows_stay_finite(peak: float, temperature: float) -> None:
    law = filtered(row(peak, peak - 1.0, -1e30, peak), Sampling(temperature=temperature))
    assert np.isfinite(law.probabilities).all() and law.of(0) == law.of(3) > 0.0


@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("spread", [0.02, 1.0, 6.0])
@pytest.mark.parametrize("top_k", [0, 1_500])
def test_long_rows(top_p: float, spread: float, top_k: int) -> None:
    """A nucleus inside what is sorted first, and one that is not: a flat row needs more than 1,024 tokens."""
    logits = np.round(np.random.default_rng(3).normal(0.0, spread, 3_000) * 8.0).astype(np.float32) / np.float32(8.0)
    sampling = Sampling(top_p=top_p, top_k=top_k)
    law, expected = filtered(logits, sampling), oracle(logits, sampling)
    assert set(law.ids.tolist()) == set(expected)
    assert as_dict(law) == pytest.approx(expected, rel=1e-9)
    if spread == 0.02 and top_p >= 0.5 and not top_k:
        assert len(expected) > law_module._NEAR


@often
@given(logit_rows, st.integers(1, 14))
def test_order_is_logit_then_id(logits: list[float], count: int) -> None:
    expected = sorted(range(len(logits)), key=lambda t: (-logits[t], t))[:count]
    assert law_module._ordered(row(*logits), count).tolist() == expected


@often
@given(logit_rows)
def test_greedy_and_runner_up_follow_the_one_order(logits: list[float]) -> None:
    order = sorted((t for t in range(len(logits)) if logits[t] > -np.inf), key=lambda t: (-logits[t], t))
    assert greedy(row(*logits)) == order[0]
    for count in range(1, 6):
        assert likeliest(row(*logits), count) == order[:count]  # a banned token is nobody's second choice


# --- races ---------------------------------------------------------------------------------------------


@often
@given(logit_rows, samplings, st.integers(0, 2**64 - 1), st.integers(0, 10_000))
def test_a_race_is_the_argmin_of_time(logits: list[float], sampling: Sampling, seed: int, position: int) -> None:
    law = filtered(row(*logits), sampling)
    first, second = law.race(seed, position)
    times = {t: float(exponential(uniforms(seed, position, np.array([t])))[0]) / law.of(t) for t in law.ids.tolist()}
    order = sorted(times, key=times.__getitem__)
    assert first == order[0]
    assert second == (order[1] if len(order) > 1 else None)
    assert law.race(seed, position) == (first, second)  # nothing was kept
    assert [law.finish(seed, position, count) for count in range(1, 6)] == [order[:count] for count in range(1, 6)]


@often
@given(logit_rows, samplings, st.integers(0, 2**32), st.randoms(use_true_random=False))
def test_a_race_does_not_depend_on_how_the_law_is_listed(
    logits: list[float], sampling: Sampling, seed: int, shuffler: object
) -> None:
    law = filtered(row(*logits), sampling)
    order = list(range(len(law.ids)))
    shuffler.shuffle(order)  # type: ignore[attr-defined]
    assert Law(law.ids[order], law.probabilities[order]).race(seed, 3) == law.race(seed, 3)


def test_the_runner_up_wins_when_the_winner_is_banned() -> None:
    """Which is why it is the likeliest correction."""
    law = Law(np.arange(4), np.array([0.4, 0.3, 0.2, 0.1]))
    for seed in range(500):
        first, second = law.race(seed, 1)
        rest = law.ids != first
        left = Law(law.ids[rest], law.probabilities[rest] / law.probabilities[rest].sum())
        assert left.race(seed, 1)[0] == second


def test_a_race_draws_from_the_law() -> None:
    law = Law(np.array([7, 2, 5, 11]), np.array([0.5, 0.3, 0.15, 0.05]))
    draws = 20_000
    for domain in (Domain.COUPLED, Domain.DRAFT, Domain.RESIDUAL):
        winners = [law.race(seed, 4, domain)[0] for seed in range(draws)]
        for token, chance in as_dict(law).items():
            assert abs(winners.count(token) - draws * chance) < 4.5 * math.sqrt(draws * chance * (1.0 - chance))
        assert set(winners) <= set(law.ids.tolist())


LAWS = [np.random.default_rng(i).dirichlet(np.full(6, concentration)) for i, concentration in enumerate((1, 0.3, 3))]


@pytest.mark.parametrize(("one", "other"), [(0, 1), (0, 2), (1, 2)])
@pytest.mark.parametrize("mixed", [0.0, 0.5, 0.9])
def test_two_races_on_one_noise_agree_as_often_as_promised(one: int, other: int, mixed: float) -> None:
    """(1 - TV) / (1 + TV) <= P(agree) <= 1 - TV (Daliri et al. 2024)."""
    p = LAWS[one]
    q = mixed * p + (1.0 - mixed) * LAWS[other]
    target, draft = Law(np.arange(6), p), Law(np.arange(6), q)
    draws = 10_000
    agreed = sum(target.race(seed, 5)[0] == draft.race(seed, 5)[0] for seed in range(draws)) / draws
    noise = 4.5 * math.sqrt(0.25 / draws)
    assert coupled_acceptance_bound(p, q) - noise <= agreed <= acceptance(p, q) + noise


def test_races_on_different_noise_agree_less() -> None:
    """The bound above is not met by luck: independent races agree with chance sum p q."""
    p = LAWS[0]
    law = Law(np.arange(6), p)
    draws = 10_000
    agreed = sum(law.race(seed, 5)[0] == law.race(seed, 5, Domain.DRAFT)[0] for seed in range(draws)) / draws
    assert abs(agreed - float((p * p).sum())) < 4.5 * math.sqrt(0.25 / draws)
    assert agreed < coupled_acceptance_bound(p, p) - 0.2


@pytest.mark.parametrize("step", [(1, 0), (0, 1), (1, -1)], ids=["seeds", "positions", "both"])
def test_neighbouring_races_are_independent(step: tuple[int, int]) -> None:
    p = np.array([0.5, 0.3, 0.2])
    law = Law(np.arange(3), p)
    draws = 10_000
    pairs = np.zeros((3, 3))
    for seed in range(draws):
        pairs[law.race(seed, 5)[0], law.race(seed + step[0], 5 + step[1])[0]] += 1
    expected = np.outer(p, p) * draws
    assert ((pairs - expected) ** 2 / expected).sum() < 32.0  # chi-square with 8 degrees: p = 1e-4


# --- the draft's law on the wire, and judging by it ------------------------------------------------------


@often
@given(logit_rows, samplings, st.integers(1, 14))
def test_the_law_that_travels_is_the_renormalised_top_k(logits: list[float], sampling: Sampling, k: int) -> None:
    law = filtered(row(*logits), sampling)
    sent = draft_law(law, k)
    best = sorted(as_dict(law), key=lambda t: (-law.of(t), t))[:k]
    mass = sum(law.of(t) for t in best)
    assert all(isinstance(t, int) for t in sent.tokens)
    assert all(chance == float(np.float32(chance)) > 0.0 for chance in sent.probabilities)  # as they travel
    assert dict(zip(sent.tokens, sent.probabilities, strict=True)) == pytest.approx(
        {t: law.of(t) / mass for t in best if np.float32(law.of(t) / mass) > 0}, rel=1e-6
    )
    read = as_law(sent)
    assert read.probabilities.sum() == pytest.approx(1.0, abs=1e-15)
    assert read.ids.tolist() == list(sent.tokens)


def test_ties_at_the_cut_of_a_draft_law_go_by_id() -> None:
    assert draft_law(filtered(row(1.0, 3.0, 1.0, 1.0), Sampling()), 3).tokens == (1, 0, 2)


def test_as_law_normalises_weights() -> None:
    read = as_law(NodeLaw((4, 2), (0.75, 0.75)))
    assert as_dict(read) == {4: 0.5, 2: 0.5}


def test_point_mass() -> None:
    assert as_dict(point_mass(5)) == {5: 1.0}
    assert point_mass(5).race(1, 1) == (5, None)
    assert point_mass(5).of(4) == 0.0


def law_of(*probabilities: float) -> Law:
    ids = np.flatnonzero(np.array(probabilities))
    return Law(ids, np.array(probabilities)[ids])


@pytest.mark.parametrize(
    ("p", "q", "left"),
    [
        ((0.3, 0.5, 0.2), (0.4, 0.4, 0.2), {1: 1.0}),
        ((0.5, 0.5, 0.0), (0.0, 0.5, 0.5), {0: 1.0}),
        ((0.5, 0.25, 0.25), (1.0, 0.0, 0.0), {1: 0.5, 2: 0.5}),
        ((0.5, 0.25, 0.25), (0.0, 0.0, 0.0, 1.0), {0: 0.5, 1: 0.25, 2: 0.25}),
        ((0.0, 0.25, 0.75), (0.5, 0.25, 0.25), {2: 1.0}),
    ],
)
def test_residual(p: tuple[float, ...], q: tuple[float, ...], left: dict[int, float]) -> None:
    assert as_dict(residual(law_of(*p), law_of(*q))) == left


laws = (
    st.lists(st.integers(0, 20), min_size=5, max_size=5)
    .filter(any)
    .map(lambda weights: law_of(*(np.array(weights) / sum(weights))))
)


@often
@given(laws, laws)
def test_acceptance_and_residual_add_up_to_the_target(target: Law, draft: Law) -> None:
    """Leviathan's identity, exactly: sum_x q(x) P(x becomes y) = p(y)."""
    p, q = vector(target, 5), vector(draft, 5)
    kept = np.minimum(p, q)
    left = vector(residual(target, draft), 5)
    assert kept + (1.0 - kept.sum()) * left == pytest.approx(p, abs=1e-12)
    assert (left[kept < p - 1e-12] > 0.0).all()


@often
@given(laws, laws, st.integers(0, 2**64 - 1), st.integers(0, 1_000))
def test_judge_is_the_ratio_test(target: Law, draft: Law, seed: int, position: int) -> None:
    drawn, _ = draft.race(seed, position, Domain.DRAFT)
    p, q = target.of(drawn), draft.of(drawn)
    token = judge(target, draft, drawn, seed, position)
    if uniform(seed, position, Domain.ACCEPT) * q < p:
        assert token == drawn
    else:
        assert token == residual(target, draft).race(seed, position, Domain.RESIDUAL)[0]
        assert target.of(token) > draft.of(token)
    assert target.of(token) > 0.0


@often
@given(laws, st.integers(0, 2**64 - 1))
def test_an_equal_draft_is_accepted_always(law: Law, seed: int) -> None:
    drawn, _ = law.race(seed, 3, Domain.DRAFT)
    assert judge(law, law, drawn, seed, 3) == drawn


def test_a_token_that_the_target_excludes_is_never_accepted() -> None:
    target = filtered(row(2.0, 1.0, 0.0), Sampling(top_k=2))
    assert all(judge(target, point_mass(2), 2, seed, 3) in (0, 1) for seed in range(500))


def test_a_deterministic_hint_is_accepted_with_the_chance_of_its_token() -> None:
    target = law_of(0.3, 0.6, 0.1)
    draws = 10_000
    kept = sum(judge(target, point_mass(0), 0, seed, 3) == 0 for seed in range(draws))
    assert abs(kept - 0.3 * draws) < 4.5 * math.sqrt(draws * 0.21)


def test_sampling_parameters_do_not_leak_between_calls() -> None:
    logits = row(1.0, 2.0, 3.0, 4.0)
    plain = as_dict(filtered(logits, Sampling()))
    for change in ({"top_k": 1}, {"top_p": 0.1}, {"min_p": 0.9}, {"temperature": 0.1}):
        filtered(logits, replace(Sampling(), **change))
        assert as_dict(filtered(logits, Sampling())) == plain


def test_a_chance_of_next_to_nothing_overflows_nothing() -> None:
    law = filtered(row(0.0, -14.8, -14.8), Sampling(temperature=0.02))
    assert 0.0 < law.of(1) < 1e-300
    assert law.finish(3, 7, 3)[0] == 0 and sorted(law.finish(3, 7, 3)) == [0, 1, 2]


def test_what_vanishes_is_left_out_and_nothing_else() -> None:
    """Most of a row far below its peak, at a finite distance."""
    logits = np.full(3000, -800.0, dtype=np.float32)
    logits[[5, 1000, 2999]] = [0.0, -1.0, -700.0]
    law = filtered(logits, Sampling(temperature=1.0))
    assert law.ids.tolist() == [5, 1000, 2999]
    assert law.of(2999) == pytest.approx(math.exp(-700.0) / (1.0 + math.exp(-1.0)))
