"""What a pass costs: seconds by its load, measured at start and learned while serving.

    seconds = pace * (curve(rows) + mixed_s if mixed) + tile_s * tiles + row_tile_s * row_tiles + branch_s * branches

`pace` follows the machine as a whole (a draft that starts to compute next door slows every pass) within
some ten passes; a knot of the curve moves slowly, by what pace and tiles leave unexplained, so passes of
one kind alone keep the curve's shape. Nothing here reads a clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from forerun.core.pages import TILE

Floats = NDArray[np.float64]

KNOTS = (*range(1, 33), 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256)
"""Rows at which the curve may bend: each one where passes are padded to small tiles of rows."""

UNKNOWN_SLOPE = 0.04
"""Of a pass of one row, by every further one: presumed where nothing was measured."""

NOISE = 0.1
"""Relative deviation of one pass from its mean; an observation beyond OUTLIER deviations counts as that far off."""
OUTLIER = 3.0

PACE_DRIFT = 0.025
"""Relative deviation by which the pace wanders from one pass to the next: it makes pace follow in about ten."""
PACE_DOUBT = 0.2
TILE_DOUBT, ROW_TILE_DOUBT, BRANCH_DOUBT = 0.01, 0.002, 0.02
"""Deviation of an unmeasured tile_s, row_tile_s and branch_s around 0, in passes of one row."""

CALM_DRIFT = 0.002
"""How far a pass with prompts moves what is thought of those without: where there is always a prompt, in the end."""

MEASURED, PRESUMED, SURE = 10.0, 2.0, 50.0
"""Observations that a measured knot, one in between, and the best known one are worth."""


@dataclass(frozen=True, slots=True)
class Load:
    """What makes a pass long."""

    rows: int  # computed, before padding
    tiles: int = 0  # of KV that are read, summed over the runs
    row_tiles: int = 0  # rows x tiles, summed over the runs
    mixed: bool = False  # runs of one row and longer ones: they are not computed together
    branches: int = 0  # runs beside the first of their sequence: each copies a page and attends for itself

    def __add__(self, other: Load) -> Load:
        return Load(
            self.rows + other.rows,
            self.tiles + other.tiles,
            self.row_tiles + other.row_tiles,
            self.mixed or other.mixed,
            self.branches + other.branches,
        )

    @classmethod
    def of_run(cls, rows: int, cached_len: int) -> Load:
        """Of `rows` new rows behind `cached_len` tokens that have KV."""
        tiles = -(-(cached_len + rows) // TILE) if rows else 0
        return cls(rows, tiles, rows * tiles)


class PassCost:
    """A Kalman filter over (pace, tile_s, row_tile_s, branch_s), and the knots of the curve beside it.

    `curve` holds measured (rows, seconds), in any order; without it nothing is known, `seconds` is 0
    and the first pass observed sets the scale. What is read never falls with rows, tiles or row_tiles.
    """

    __slots__ = ("_calm", "_covariance", "_curve", "_doubt", "_knots", "_mixed_s", "_read", "_seen", "_state")

    def __init__(
        self,
        curve: Sequence[tuple[int, float]] = (),
        tile_s: float = 0.0,
        row_tile_s: float = 0.0,
        mixed_s: float = 0.0,
        branch_s: float = 0.0,
    ) -> None:
        self._mixed_s = mixed_s
        measured = {rows: seconds for rows, seconds in curve if rows > 0 and seconds > 0.0}
        self._knots: Floats = np.array(sorted({*KNOTS, *measured}), dtype=np.float64)
        self._curve = _fill(self._knots, sorted(measured.items()))  # [knots] seconds at pace 1, as learned
        self._seen = np.array([MEASURED if rows in measured else PRESUMED for rows in self._knots])  # [knots]
        self._state: Floats = np.array([1.0, max(tile_s, 0.0), max(row_tile_s, 0.0), max(branch_s, 0.0)])
        self._calm = self._state.copy()  # as it was in the last pass without prompts
        self._read: Floats | None = None  # [rows] the curve as read, at 0, 1, ... rows: never falling
        self._settle_doubt()

    @property
    def known(self) -> bool:
        """Something was measured or observed."""
        return bool(self._curve[0] > 0.0)

    def seconds(self, load: Load) -> float:
        """Predicted duration; 0 while nothing is known."""
        return float(self._features(load) @ self._state) if self.known else 0.0

    def alone(self, load: Load) -> float:
        """Predicted duration of a pass without prompts, by such passes; 0 while nothing is known.

        What prompts may prolong a pass to is measured by this: were it learned from the prolonged passes, a long
        prompt that costs more than predicted would be allowed more and more.
        """
        return float(self._features(load) @ self._calm) if self.known else 0.0

    def along(
        self, load: Load, node_tiles: NDArray[np.int64], branches: NDArray[np.bool_], *, mixing: bool = False
    ) -> Floats:
        """Predicted duration of `load` and the first k of these further rows, for k = 0, 1, ..., len(node_tiles).

        Args:
            node_tiles: [nodes], tiles that each of them attends to.
            branches: [nodes], whether it is a run of its own.
            mixing: with the first of them the pass is a mixed one.
        """
        pace, tile_s, row_tile_s, branch_s = self._state
        row_tiles = load.row_tiles + np.concatenate(([0], np.cumsum(node_tiles)))
        if not self.known:
            return np.zeros(len(row_tiles))
        seconds: Floats = pace * self._by_rows(load.rows, len(row_tiles)) + tile_s * load.tiles
        seconds += row_tile_s * row_tiles
        seconds += pace * self._mixed_s * load.mixed + branch_s * load.branches
        seconds[1:] += np.cumsum(branches * (branch_s + tile_s * node_tiles))
        if mixing and not load.mixed:
            seconds[1:] += pace * self._mixed_s
        return seconds

    def observe(self, load: Load, seconds: float, *, prompts: bool = False) -> None:
        """A pass of this load took so long. prompts: rows of prompts were among it."""
        if load.rows < 1 or seconds <= 0.0:
            return
        if not self.known:
            self._curve = _fill(self._knots, [(load.rows, seconds)])
            self._read = None
            self._settle_doubt()
        features, near = self._features(load), self._near(load.rows)
        expected = float(features @ self._state)
        noise = (NOISE * expected) ** 2 * (1.0 + sum(share * 5.0 / self._seen[knot] for knot, share in near))
        left = self._follow(features, seconds - expected, noise)
        self._bend(near, features[0] - self._mixed_s * load.mixed + left / self._state[0])
        self._calm = self._calm + (CALM_DRIFT if prompts else 1.0) * (self._state - self._calm)

    def describe(self) -> str:
        """One line: "1: 42 ms, 2: 42 ms, 4: 43 ms, ...", for the log at start."""
        if not self.known:
            return "not measured"
        rows = [int(knot) for knot in self._knots if int(knot) & (int(knot) - 1) == 0]
        costs = ", ".join(f"{count}: {_told(self.seconds(Load(count)))}" for count in rows)
        tile, row_tile, branch = map(_told, self._state[1:])
        return f"{costs}; a tile: {tile}, by row: {row_tile}; a branch: {branch}"

    def _features(self, load: Load) -> Floats:
        """What the state is multiplied with, [4]."""
        curve = self._by_rows(load.rows, 1)[0] + self._mixed_s * load.mixed
        return np.array([curve, load.tiles, load.row_tiles, load.branches])

    def _by_rows(self, rows: int, count: int) -> Floats:
        """[count] seconds at pace 1 of `rows` rows and of each number after it."""
        if self._read is None:  # once, until the curve bends: a draft asks before each of its steps
            never_falling = _never_falling(self._curve, self._seen)
            self._read = np.interp(np.arange(self._knots[-1] + 1.0), self._knots, never_falling)
        if rows + count <= len(self._read):
            return self._read[rows : rows + count]
        known = np.arange(len(self._read), dtype=np.float64)
        return _interpolate(rows + np.arange(count, dtype=np.float64), known, self._read)

    def _near(self, rows: int) -> list[tuple[int, float]]:
        """(knot, share) of the one or two knots that say what `rows` cost."""
        after = int(np.searchsorted(self._knots, rows))
        if after == len(self._knots):
            return [(after - 1, 1.0)]
        if self._knots[after] == rows:
            return [(after, 1.0)]
        share = float((rows - self._knots[after - 1]) / (self._knots[after] - self._knots[after - 1]))
        return [(after - 1, 1.0 - share), (after, share)]

    def _settle_doubt(self) -> None:
        """How far the state may be off: at first, and at most (what is never observed must not grow beyond)."""
        unmeasured = np.array([TILE_DOUBT, ROW_TILE_DOUBT, BRANCH_DOUBT]) * self._curve[0]
        doubts = np.where(self._state[1:] > 0.0, 0.5 * self._state[1:], unmeasured)
        self._doubt: Floats = np.array([PACE_DOUBT, *doubts])
        self._covariance: Floats = np.diag(self._doubt**2)

    def _follow(self, features: Floats, error: float, noise: float) -> float:
        """One step of the filter; returns the part of the (clipped) error that it did not take."""
        wander = np.array([PACE_DRIFT * self._state[0], *(0.01 * self._doubt[1:])])
        covariance = self._covariance + np.diag(wander**2)
        across = covariance @ features
        variance = float(features @ across) + noise
        reach = OUTLIER * variance**0.5
        error = min(max(error, -reach), reach)
        gain = across / variance
        before = self._state
        self._state = np.maximum(before + gain * error, [0.05 * before[0], 0.0, 0.0, 0.0])
        covariance = covariance - np.outer(gain, across)
        shrink = np.minimum(1.0, self._doubt / np.sqrt(np.maximum(np.diag(covariance), 1e-300)))
        self._covariance = covariance * np.outer(shrink, shrink)
        return error - float(features @ (self._state - before))

    def _bend(self, near: list[tuple[int, float]], seen_s: float) -> None:
        """The curve was `seen_s` seconds high between these knots."""
        for knot, share in near:
            old = self._curve[knot]
            step = share / (1.0 + min(self._seen[knot], SURE))
            self._curve[knot] = max(old + step * (seen_s - old), 0.5 * old)
            self._seen[knot] = min(self._seen[knot] + share, SURE)
        self._read = None


def _told(seconds: float) -> str:
    """Three digits and their unit."""
    for unit, scale in (("s", 1.0), ("ms", 1e3)):
        if seconds * scale >= 0.9995:  # the next unit would show 1000
            return f"{seconds * scale:.3g} {unit}"
    return f"{round(seconds * 1e6, 3):.3g} us"


def _interpolate(rows: Floats, knots: Floats, values: Floats) -> Floats:
    """Linear between the knots, level before the first; beyond the last on as between half of it and it."""
    inside: Floats = np.interp(rows, knots, values)
    half = 0.5 * knots[-1]
    slope = (values[-1] - np.interp(half, knots, values)) / (knots[-1] - half)
    beyond: Floats = inside + np.maximum(rows - knots[-1], 0.0) * slope
    return beyond


def _fill(knots: Floats, measured: Sequence[tuple[int, float]]) -> Floats:
    """The curve at every knot, by what was measured at some; zeros if that is nothing."""
    if not measured:
        return np.zeros(len(knots))
    rows, seconds = np.array(measured, dtype=np.float64).T
    if len(measured) > 1:
        return _interpolate(knots, rows, np.maximum.accumulate(seconds))
    presumed: Floats = 1.0 + UNKNOWN_SLOPE * (knots - 1.0)
    scaled: Floats = presumed * (seconds[0] / np.interp(rows[0], knots, presumed))
    return scaled


def _never_falling(values: Floats, weights: Floats) -> Floats:
    """The nearest curve that never falls (isotonic regression): where it would, neighbours share their mean."""
    pools: list[tuple[float, float, int]] = []  # (mean, weight, knots)
    for value, weight in zip(values.tolist(), weights.tolist(), strict=True):
        mean, total, count = value, weight, 1
        while pools and pools[-1][0] > mean:
            above, heavier, more = pools.pop()
            mean = (mean * total + above * heavier) / (total + heavier)
            total, count = total + heavier, count + more
        pools.append((mean, total, count))
    return np.repeat([mean for mean, _, _ in pools], [count for _, _, count in pools])
