"""Predictions follow the machine: a curve that was not known, a pace that changes, contexts that grow; not outliers."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.core.cost import Load, PassCost

KNOTS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
NOISE = 0.1


def stepped(rows: int) -> float:
    """Padded to tiles of 4 rows."""
    return 0.04 + 0.01 * -(-rows // 4)


def measured(truth: Callable[[int], float] = stepped) -> PassCost:
    return PassCost([(rows, truth(rows)) for rows in KNOTS])


def observe(cost: PassCost, load: Load, seconds: float, rng: random.Random) -> None:
    cost.observe(load, seconds * rng.gauss(1.0, NOISE))


def test_loads_add_up() -> None:
    assert Load(3, 2, 6) + Load(1, 1, 1) == Load(4, 3, 7)
    assert Load.of_run(3, 125) == Load(3, 1, 3)
    assert Load.of_run(3, 126) == Load(3, 2, 6)
    assert Load.of_run(0, 126) == Load(0)


def test_what_was_measured_is_read() -> None:
    cost = PassCost([(8, 0.06), (1, 0.04)], tile_s=0.001, row_tile_s=0.0001)
    assert cost.seconds(Load(1)) == pytest.approx(0.04)
    assert cost.seconds(Load(8)) == pytest.approx(0.06)
    assert cost.seconds(Load(8, 5, 40)) == pytest.approx(0.06 + 0.005 + 0.004)
    assert 0.04 < cost.seconds(Load(4)) < 0.06


def test_beyond_the_last_knot_it_goes_on_straight() -> None:
    cost = PassCost([(1, 1.0), (128, 2.0), (256, 4.0)])
    assert cost.seconds(Load(512)) == pytest.approx(8.0)


def test_a_row_measured_cheaper_than_fewer_is_noise() -> None:
    cost = PassCost([(1, 0.05), (2, 0.04), (4, 0.06)])
    assert cost.seconds(Load(1)) <= cost.seconds(Load(2)) <= cost.seconds(Load(4))


def test_nothing_known_costs_nothing_until_a_pass_was_seen() -> None:
    cost = PassCost()
    assert not cost.known and cost.seconds(Load(8)) == 0.0
    assert cost.along(Load(1), np.array([1, 1]), np.array([False, True])).tolist() == [0.0, 0.0, 0.0]
    assert cost.describe() == "not measured"
    cost.observe(Load(8), 0.1)
    assert cost.known and cost.seconds(Load(8)) == pytest.approx(0.1)
    assert 0.0 < cost.seconds(Load(1)) < 0.1 < cost.seconds(Load(64))


@pytest.mark.parametrize("cost", [PassCost(), measured()], ids=["unknown", "measured"])
def test_a_staircase_is_learned_under_noise(cost: PassCost) -> None:
    """The steps between the knots that were measured, too."""
    rng = random.Random(5)
    for _ in range(1500):
        rows = rng.randint(1, 64)
        observe(cost, Load(rows), stepped(rows), rng)
    pace = sum(cost.seconds(Load(rows)) / stepped(rows) for rows in range(1, 33)) / 32
    assert pace == pytest.approx(1.0, abs=0.1)
    for rows in range(1, 33):  # relative to each other: that is what plans are made of
        assert cost.seconds(Load(rows)) == pytest.approx(pace * stepped(rows), rel=0.1)
    assert cost.seconds(Load(5)) / cost.seconds(Load(4)) > 1.1 > 1.04 > cost.seconds(Load(4)) / cost.seconds(Load(2))


def test_a_badly_measured_knot_is_corrected() -> None:
    rng = random.Random(6)
    cost = PassCost([(rows, stepped(rows) * (2.0 if rows == 8 else 1.0)) for rows in KNOTS])
    for _ in range(1500):
        rows = rng.choice(KNOTS)
        observe(cost, Load(rows), stepped(rows), rng)
    for rows in KNOTS:
        assert cost.seconds(Load(rows)) == pytest.approx(stepped(rows), rel=0.15)


def test_a_slower_machine_is_followed_within_twenty_passes_and_back() -> None:
    rng, cost = random.Random(7), measured()
    for pace in (1.0, 1.4, 1.0, 1.4):
        for _ in range(20):
            rows = rng.randint(1, 16)
            observe(cost, Load(rows), pace * stepped(rows), rng)
        for rows in KNOTS:  # also those that were not seen
            assert cost.seconds(Load(rows)) == pytest.approx(pace * stepped(rows), rel=0.12)


def test_a_thousand_passes_of_one_kind_keep_the_shape() -> None:
    rng, cost = random.Random(8), measured()
    shape = cost.seconds(Load(64)) / cost.seconds(Load(1))
    for turn in range(1000):
        observe(cost, Load(1), (1.4 if turn > 100 else 1.0) * stepped(1), rng)
    assert cost.seconds(Load(1)) == pytest.approx(1.4 * stepped(1), rel=0.12)
    assert cost.seconds(Load(64)) / cost.seconds(Load(1)) == pytest.approx(shape, rel=0.1)


def test_outliers_move_little_and_are_forgotten() -> None:
    rng, cost = random.Random(9), measured()
    for _ in range(50):
        observe(cost, Load(4), stepped(4), rng)
    before = cost.seconds(Load(4))
    cost.observe(Load(4), 20.0 * stepped(4))
    assert cost.seconds(Load(4)) < 1.15 * before
    for turn in range(500):
        observe(cost, Load(4), stepped(4) * (20.0 if turn % 50 == 0 else 1.0), rng)
    assert cost.seconds(Load(4)) == pytest.approx(stepped(4), rel=0.15)
    cost.observe(Load(0), 1.0)
    cost.observe(Load(4), 0.0)
    assert cost.seconds(Load(4)) == pytest.approx(stepped(4), rel=0.15)


def test_long_contexts_are_learned() -> None:
    """Decoding at all lengths, and now and then a chunk of a prompt."""

    def truth(load: Load) -> float:
        return stepped(load.rows) + 2e-4 * load.tiles + 2e-5 * load.row_tiles

    rng, cost = random.Random(10), measured()
    for _ in range(400):
        load = Load(0)
        for _ in range(4):
            load += Load.of_run(1, rng.randint(0, 4000))
        if rng.random() < 0.3:
            load += Load.of_run(rng.choice((16, 64, 128)), rng.randint(0, 4000))
        observe(cost, load, truth(load), rng)
    for load in (Load.of_run(1, 0), Load.of_run(1, 4000), Load.of_run(128, 0), Load.of_run(128, 4000)):
        assert cost.seconds(load) == pytest.approx(truth(load), rel=0.15)


def test_the_cost_along_nodes_is_that_of_each_load() -> None:
    cost = PassCost([(rows, stepped(rows)) for rows in KNOTS], tile_s=0.001, row_tile_s=0.0003, branch_s=0.004)
    tiles = np.array([1, 5, 2] * 100)
    apart = np.array([False, True, True, False] * 75)
    start = Load(3, 4, 12, branches=2)
    along = cost.along(start, tiles, apart)
    assert len(along) == 301
    for count in (0, 1, 2, 30, 300):
        read = int((tiles * apart)[:count].sum())
        load = start + Load(count, read, int(tiles[:count].sum()), branches=int(apart[:count].sum()))
        assert along[count] == pytest.approx(cost.seconds(load))


def test_what_a_branch_costs_is_learned() -> None:
    rng = random.Random(5)
    cost = measured()
    for turn in range(300):
        load = Load(4, branches=turn % 4)
        observe(cost, load, stepped(4) + 0.004 * load.branches, rng)
    assert cost.seconds(Load(4, branches=3)) - cost.seconds(Load(4)) == pytest.approx(0.012, rel=0.35)


def test_the_line_for_the_log() -> None:
    line = measured().describe()
    assert "\n" not in line
    assert line.startswith("1: 50 ms, 2: 50 ms, 4: 50 ms, 8: 60 ms") and "256: 680 ms" in line
    slow = PassCost([(1, 2.5)], tile_s=1.75e-3, row_tile_s=2e-7).describe()
    assert slow.startswith("1: 2.5 s, ") and slow.endswith("; a tile: 1.75 ms, by row: 0.2 us; a branch: 0 us")
    assert PassCost([(1, 1.0)], tile_s=0.9996e-3).describe().endswith("a tile: 1 ms, by row: 0 us; a branch: 0 us")


observations = st.lists(
    st.tuples(st.integers(1, 600), st.integers(0, 400), st.integers(0, 5000), st.floats(1e-6, 1e3)), max_size=40
)
curves = st.dictionaries(st.integers(1, 600), st.floats(1e-5, 10.0), max_size=9)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(curves, observations)
def test_more_work_never_costs_less(curve: dict[int, float], seen: list[tuple[int, int, int, float]]) -> None:
    """Whatever was measured and observed: finite, not negative, never falling in anything."""
    cost = PassCost(list(curve.items()))
    for rows, tiles, row_tiles, seconds in seen:
        cost.observe(Load(rows, tiles, row_tiles), seconds)
    by_rows = [cost.seconds(Load(rows)) for rows in range(1, 700)]
    assert np.isfinite(by_rows).all() and min(by_rows) >= 0.0
    assert all(more >= less * (1 - 1e-12) for less, more in pairwise(by_rows))
    assert cost.seconds(Load(9, 0, 0)) <= cost.seconds(Load(9, 7, 0)) <= cost.seconds(Load(9, 7, 50))
    assert not cost.known or by_rows[0] > 0.0


def test_what_decoding_takes_is_not_learned_from_passes_that_prompts_prolong() -> None:
    """A long prompt costs twice what was predicted, for as long as it is read; then the machine is slower for all."""
    cost = PassCost([(1, 1.0), (4, 1.0), (16, 1.2), (64, 3.0)], tile_s=0.01, row_tile_s=0.001)
    decoding = Load(4, tiles=12, row_tiles=12)
    before = cost.alone(decoding)
    assert before == cost.seconds(decoding)
    reading = decoding + Load(8, tiles=31, row_tiles=248, mixed=True)
    for _ in range(300):
        cost.observe(reading, 4.0, prompts=True)
    assert cost.seconds(decoding) > 1.5 * before
    assert cost.alone(decoding) < 1.5 * before
    for _ in range(40):
        cost.observe(decoding, 1.5 * before)
    assert cost.alone(decoding) == cost.seconds(decoding) == pytest.approx(1.5 * before, rel=0.1)


def test_a_plan_reads_the_curve_as_a_pass_does() -> None:
    """Also after it has bent, and beyond its last knot."""
    cost = PassCost([(1, 1.0), (8, 1.5), (64, 3.0)], tile_s=0.01, row_tile_s=0.002)
    for _ in range(3):
        for rows in (1, 5, 250):
            along = cost.along(Load.of_run(rows, 100), np.ones(12, np.int64), np.zeros(12, np.bool_))
            loads = [Load.of_run(rows, 100) + Load(k, 0, k) for k in range(13)]
            assert along == pytest.approx([cost.seconds(load) for load in loads])
        cost.observe(Load.of_run(6, 10), 2.5)
