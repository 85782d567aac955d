"""Measures what a pass costs before the first request: rows, KV tiles, and with them the workspace it needs."""

from __future__ import annotations

import time
from collections.abc import Callable

from forerun.core.cost import Load, PassCost
from forerun.core.pages import KV, TILE, Path
from forerun.runtime.passes import Model, Run

ROWS = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
OTHER_ROWS = (40, 56, 80, 112, 144, 160, 176, 208, 224, 240)
"""What passes are padded to beside those (forward.py): each number of rows has code of its own, some megabytes that
are compiled and kept at its first pass. That belongs to the start and to the memory that is stated then."""

LOGIT_ROWS = 32
"""Up to so many rows are timed as nodes, which are all judged; more as a prompt's. Rows of logits have code too."""

FAR = 8
"""Tiles of the longest context that is tried."""

BRANCHES = 3
"""Nodes apart that are timed against as many in a line."""

MIXED = 8
"""Runs of a pass of single rows and one longer run, against as many rows in runs of the same length."""

REPEATS = 2
LONGEST_S = 6.0
"""For all of it: a slow model is measured more coarsely."""


def measure(model: Model, row_budget: int, clock: Callable[[], float] = time.perf_counter) -> PassCost:
    """A cost curve of this model on this machine, as it is now; a few seconds. Nothing is left in KV."""
    try:
        return _measure(model, row_budget, clock)
    finally:
        model.pages.forget()


def _measure(model: Model, row_budget: int, clock: Callable[[], float]) -> PassCost:
    began = clock()
    reach = min(FAR, model.pages.count, model.context_limit // TILE)
    kv = KV(model.pages)
    path = kv.extend(max(reach, 1) * TILE)

    def run_of(rows: int, start: int, where: Path, judged: int = LOGIT_ROWS) -> Run:
        tokens = tuple(at * 31 % model.vocab_size for at in range(rows))
        return Run(where, tokens, start, rows if rows <= judged else 1)

    def seconds(rows: int, start: int) -> float:
        return best_of([run_of(rows, start, path)])

    def best_of(runs: list[Run], repeats: int = REPEATS) -> float:
        """The best of some: what disturbs a pass only makes it longer."""
        best = float("inf")
        for _ in range(repeats):
            at = clock()
            model.forward(runs)
            best = min(best, clock() - at)
            if clock() - began > LONGEST_S:
                break
        return best

    room = len(path.pages) * TILE
    most = min(row_budget, room, model.context_limit - 1)
    seconds(most, 0)  # the largest first: it sizes the workspace, and warms up
    curve = [(rows, seconds(rows, 0)) for rows in ROWS if rows <= most]
    for rows in (*OTHER_ROWS, *(rows for rows in ROWS if rows > LOGIT_ROWS)):
        if rows <= most and clock() - began < LONGEST_S:
            model.forward([run_of(rows, 0, path, rows)])
    tile_s = row_tile_s = 0.0
    far = max(reach - 1, 0) * TILE
    if far > TILE and curve[-1][0] >= 64:
        near = dict(curve)
        # A run of r rows after `far` columns reads as many more tiles as there are in them.
        one = max(0.0, seconds(1, far) - near[1]) / (reach - 1)
        many = max(0.0, seconds(64, far) - near[64]) / (reach - 1)
        row_tile_s = max(0.0, many - one) / 63
        tile_s = max(0.0, one - row_tile_s)
    mixed_s = 0.0
    if model.pages.available >= MIXED and most >= 2 * MIXED:
        paths = [KV(model.pages).extend(MIXED + 1) for _ in range(MIXED)]
        alike = [run_of(2, 0, where) for where in paths]
        mixed = [run_of(1 if number else MIXED + 1, 0, where) for number, where in enumerate(paths)]
        mixed_s = max(0.0, best_of(mixed) - best_of(alike))
    branch_s = 0.0
    if model.pages.available >= BRANCHES and most >= 2 + BRANCHES:
        apart = float("inf")
        for _ in range(REPEATS):
            forks = [kv.branch(path, 2, 1) for _ in range(BRANCHES)]
            apart = min(apart, best_of([run_of(1, 1, path), *(run_of(1, 2, fork) for fork in forks)], 1))
            for fork in forks:
                kv.drop(fork)
        branch_s = max(0.0, (apart - seconds(1 + BRANCHES, 1)) / BRANCHES - tile_s)
    return PassCost(
        [(rows, max(took - _tiles(rows, tile_s, row_tile_s), 1e-9)) for rows, took in curve],
        tile_s,
        row_tile_s,
        mixed_s,
        branch_s,
    )


def _tiles(rows: int, tile_s: float, row_tile_s: float) -> float:
    load = Load.of_run(rows, 0)
    return tile_s * load.tiles + row_tile_s * load.row_tiles
