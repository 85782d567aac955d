"""Noise is a function of (seed, domain, position, token): the same everywhere, and independent across each."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from forerun.core.noise import Domain, _mix, exponential, uniform, uniforms

IDS = np.arange(64, dtype=np.int64)
seeds = st.integers(0, 2**64 - 1)
positions = st.integers(0, 2**31)
domains = st.sampled_from(list(Domain))

MASK = 2**64 - 1
GOLDEN = 0x9E3779B97F4A7C15


class SplitMix64:
    """The published generator, as state, in plain integers."""

    def __init__(self, state: int) -> None:
        self.state = state & MASK

    def next(self) -> int:
        self.state = (self.state + GOLDEN) & MASK
        z = self.state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
        return z ^ (z >> 31)


def expected_uniforms(seed: int, position: int, count: int, domain: Domain) -> list[float]:
    """The stated construction: two keyed steps pick the stream, the token id counts its draws."""
    keyed = SplitMix64(seed + domain * GOLDEN - GOLDEN).next()
    stream = SplitMix64(SplitMix64(keyed + position * GOLDEN).next())
    return [((stream.next() >> 32) + 0.5) / 2**32 for _ in range(count)]


def test_mixing_is_that_of_the_published_generator() -> None:
    """Reference output of splitmix64.c for the seed 1234567."""
    published = [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]
    generator = SplitMix64(1234567)
    assert [generator.next() for _ in published] == published
    assert [_mix((1234567 + step * GOLDEN) & MASK) for step in range(1, 6)] == published


@settings(max_examples=200, deadline=None, derandomize=True)
@given(seeds, positions, domains)
def test_uniforms_follow_the_stated_construction(seed: int, position: int, domain: Domain) -> None:
    """In plain integers, so that no platform or numpy version can change a text."""
    assert uniforms(seed, position, IDS, domain).tolist() == expected_uniforms(seed, position, len(IDS), domain)
    assert uniform(seed, position, domain) == expected_uniforms(seed, position, 1, domain)[0]


def test_values_that_a_seed_has_promised() -> None:
    """Changing these changes the text of every stored (request, seed) pair."""
    hashes = (uniforms(42, 7, np.array([0, 1, 49_151]), Domain.COUPLED) * 2.0**32 - 0.5).astype(np.uint64)
    assert hashes.tolist() == [34220269, 400568672, 937855894]
    assert [(domain.name, int(domain)) for domain in Domain] == [
        ("COUPLED", 1),
        ("DRAFT", 2),
        ("ACCEPT", 3),
        ("RESIDUAL", 4),
    ]


@settings(max_examples=100, deadline=None, derandomize=True)
@given(seeds, positions, domains, st.permutations(range(16)))
def test_a_number_depends_on_its_key_alone(seed: int, position: int, domain: Domain, order: list[int]) -> None:
    """Not on which other tokens are asked for, in which order, or how often."""
    together = uniforms(seed, position, IDS[:16], domain)
    assert uniforms(seed, position, np.array(order), domain).tolist() == together[order].tolist()
    for token in order[:4]:
        assert uniforms(seed, position, np.array([token]), domain)[0] == together[token]
    assert uniforms(seed, position, IDS[:16], domain).tolist() == together.tolist()


@settings(max_examples=100, deadline=None, derandomize=True)
@given(seeds, positions, domains)
def test_uniforms_never_reach_0_or_1(seed: int, position: int, domain: Domain) -> None:
    values = np.append(uniforms(seed, position, IDS, domain), uniform(seed, position, domain))
    assert values.dtype == np.float64
    assert (values >= 2.0**-33).all() and (values <= 1.0 - 2.0**-33).all()
    steps = values * 2.0**32 - 0.5
    assert (steps == np.floor(steps)).all()  # 32 bits each


@settings(max_examples=100, deadline=None, derandomize=True)
@given(seeds, positions, domains)
def test_exponentials_are_positive_and_finite(seed: int, position: int, domain: Domain) -> None:
    times = exponential(uniforms(seed, position, IDS, domain))
    assert times.dtype == np.float64
    assert (times > 0.0).all() and (times < 33.0 * math.log(2.0)).all()
    expected = [-math.log1p(-u) for u in uniforms(seed, position, IDS, domain)]
    assert times.tolist() == pytest.approx(expected, rel=1e-14)


def test_large_seeds_and_ids_do_not_overflow() -> None:
    ids = np.array([0, 2**31 - 1, 2**31, 2**62], dtype=np.int64)
    values = uniforms(2**64 - 1, 2**31, ids)
    assert len(set(values.tolist())) == 4
    assert uniforms(0, 0, np.array([], dtype=np.int64)).shape == (0,)


def test_domains_have_their_own_numbers() -> None:
    assert len(set(Domain)) == 4
    values = [uniforms(3, 5, IDS, domain) for domain in Domain]
    assert len(set(np.concatenate(values).tolist())) == 4 * len(IDS)


# --- independence ----------------------------------------------------------------------------------------

COUNT = 40_000
START = np.random.default_rng(5).integers(0, 2**63, COUNT).tolist()

Axis = Callable[[int], float]


def token_0(seed: int, position: int, domain: Domain = Domain.COUPLED, token: int = 0) -> float:
    return float(uniforms(seed, position, np.array([token]), domain)[0])


def column(axis: Axis) -> NDArray[np.float64]:
    return np.array([axis(index) for index in range(COUNT)])


@pytest.fixture(scope="module")
def base() -> NDArray[np.float64]:
    """Consecutive seeds, one position, one token: what a client that counts its seeds up uses."""
    return column(lambda i: token_0(i, 9))


def dependence(one: NDArray[np.float64], other: NDArray[np.float64]) -> float:
    """Chi-square of the 8 x 8 table of octiles, minus its mean (49), in standard deviations."""
    table = np.zeros((8, 8))
    np.add.at(table, ((one * 8).astype(int), (other * 8).astype(int)), 1)
    expected = np.outer(table.sum(1), table.sum(0)) / len(one)
    return float((((table - expected) ** 2 / expected).sum() - 49.0) / math.sqrt(98.0))


def assert_uniform(values: NDArray[np.float64]) -> None:
    counts = np.bincount((values * 64).astype(int), minlength=64)
    expected = len(values) / 64
    assert abs(((counts - expected) ** 2 / expected).sum() - 63.0) < 5.0 * math.sqrt(126.0)
    assert abs(values.mean() - 0.5) < 5.0 * math.sqrt(1.0 / 12.0 / len(values))


def test_uniform_over_seeds_positions_and_tokens(base: NDArray[np.float64]) -> None:
    assert_uniform(base)
    assert_uniform(column(lambda i: token_0(9, i)))
    assert_uniform(uniforms(9, 9, np.arange(COUNT)))
    assert_uniform(column(lambda i: uniform(i, 9, Domain.ACCEPT)))


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(lambda i: token_0(i + 1, 9), id="next seed"),
        pytest.param(lambda i: token_0(i, 10), id="next position"),
        pytest.param(lambda i: token_0(i + 1, 8), id="next seed, previous position"),
        pytest.param(lambda i: token_0(i, 9, token=1), id="next token"),
        pytest.param(lambda i: token_0(i, 8, token=1), id="previous position, next token"),
        pytest.param(lambda i: token_0(i, 9, Domain.DRAFT), id="draft"),
        pytest.param(lambda i: token_0(i, 9, Domain.RESIDUAL), id="residual"),
        pytest.param(lambda i: uniform(i, 9, Domain.ACCEPT), id="acceptance"),
    ],
)
def test_neighbours_share_nothing(base: NDArray[np.float64], other: Axis) -> None:
    assert abs(dependence(base, column(other))) < 5.0


def test_acceptance_is_independent_of_the_draft() -> None:
    """The bias a shared noise would bring, in the pair where it would matter."""
    accept = np.array([uniform(seed, 3, Domain.ACCEPT) for seed in START])
    for domain in (Domain.DRAFT, Domain.RESIDUAL, Domain.COUPLED):
        for token in (0, 1):
            drawn = np.array([token_0(seed, 3, domain, token) for seed in START])
            assert abs(dependence(accept, drawn)) < 5.0


def test_dependence_is_seen(base: NDArray[np.float64]) -> None:
    """The measure above fails for what it is meant to find."""
    assert dependence(base, base) > 100.0
    assert dependence(base, (base + column(lambda i: token_0(i, 10)) * 4.0) % 1.0) < 5.0
    assert dependence(base, np.minimum(base * 0.3 + column(lambda i: token_0(i, 10)) * 0.7, 1.0)) > 5.0


def test_exponentials_have_the_law_they_are_named_for() -> None:
    times = np.concatenate([exponential(uniforms(seed, 1, IDS)) for seed in range(1_000)])
    assert_uniform(-np.expm1(-times))
    assert times.mean() == pytest.approx(1.0, abs=5.0 / math.sqrt(len(times)))
