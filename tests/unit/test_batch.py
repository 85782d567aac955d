"""A pass as integers: where rows go, what they read, and the same bytes on every rank."""

from __future__ import annotations

from dataclasses import fields

import numpy as np

from forerun.core.pages import KV, TILE, Pages
from forerun.runtime.batch import Batch, lower
from forerun.runtime.passes import Run


def example() -> tuple[Batch, list[Run]]:
    """Three columns are cached; a trunk of four rows, a branch after its second and one off that branch."""
    pages = Pages(8)
    kv = KV(pages)
    kv.extend(3)
    kv.commit([9, 9, 9], 3)
    trunk = Run(kv.extend(4), (1, 2, 3, 4), 3, 2)
    side = Run(kv.branch(trunk.path, 5, 2), (5, 6), 5, 2, parent=trunk)
    twig = Run(kv.branch(side.path, 6, 1), (7,), 6, 1, parent=side)
    return lower([trunk, side, twig], pages.take_copies()), [trunk, side, twig]


def test_rows_positions_and_wanted_logits() -> None:
    batch, _ = example()
    assert batch.tokens.tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert batch.positions.tolist() == [3, 4, 5, 6, 5, 6, 6]
    assert batch.firsts.tolist() == [0, 4, 6, 7]
    assert batch.wanted.tolist() == [2, 3, 4, 5, 6]


def test_a_branch_s_own_page_gets_its_ancestors_of_this_pass() -> None:
    batch, (trunk, side, twig) = example()
    (a,), (b,), (c,) = trunk.path.pages, side.path.pages, twig.path.pages
    assert batch.tables.tolist() == [[a], [b], [c]]
    assert sorted(batch.copies.tolist()) == sorted([[a, b], [a, c]]), "what was cached before, from where it lies"
    written = {(row, page, column) for row, page, column in batch.writes.tolist()}
    own = {(0, a, 3), (1, a, 4), (2, a, 5), (3, a, 6), (4, b, 5), (5, b, 6), (6, c, 6)}
    assert written == own | {(0, b, 3), (1, b, 4), (0, c, 3), (1, c, 4), (4, c, 5)}


def test_ancestors_in_earlier_pages_are_shared_not_written_again() -> None:
    pages = Pages(8)
    kv = KV(pages)
    kv.extend(TILE - 2)
    kv.commit(list(range(TILE - 2)), TILE - 2)
    trunk = Run(kv.extend(5), (1, 2, 3, 4, 5), TILE - 2, 1)
    side = Run(kv.branch(trunk.path, TILE + 1, 1), (6,), TILE + 1, 1, parent=trunk)
    batch = lower([trunk, side], pages.take_copies())
    assert side.path.pages[0] == trunk.path.pages[0]
    own = side.path.pages[1]
    assert sorted(w for w in batch.writes.tolist() if w[1] == own) == [[2, own, 0], [5, own, 1]]


def test_other_ranks_get_the_same() -> None:
    batch, _ = example()
    again = Batch.from_bytes(batch.to_bytes())
    for field in fields(Batch):
        mine, theirs = getattr(batch, field.name), getattr(again, field.name)
        assert mine.shape == theirs.shape
        assert np.array_equal(mine, theirs)
        assert theirs.flags.writeable, "torch warns of arrays that are not"
    empty = lower([Run(KV(Pages(2)).extend(2), (1, 2), 0, 0)], [])
    assert Batch.from_bytes(empty.to_bytes()).copies.shape == (0, 2)
