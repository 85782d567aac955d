"""The token tree against the obvious model of it: a set of paths with a score each."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.core.errors import MalformedMessage
from forerun.core.params import Source
from forerun.core.tree import ROOT, Bounds, NodeLaw, TokenTree

exhaustive = settings(max_examples=200, deadline=None, derandomize=True)

Paths = dict[tuple[int, ...], float]


def paths(tree: TokenTree, start: int = ROOT) -> Paths:
    """Score by token path below `start`: what a tree means, whatever its row order."""
    found: Paths = {}
    for row in range(1, len(tree)):
        rows = tree.path(row)
        if start == ROOT or start in rows[:-1]:
            below = rows if start == ROOT else rows[rows.index(start) + 1 :]
            found[tuple(tree.tokens[r] for r in below)] = tree.scores[row]
    return found


def assert_sound(tree: TokenTree) -> None:
    """The invariants of the columns, and an index of children that agrees with them."""
    count = len(tree)
    assert {len(tree.parents), len(tree.scores), len(tree.sources), len(tree.laws)} == {count}
    assert tree.parents[0] == -1
    assert all(0 <= tree.parents[row] < row for row in range(1, count))
    assert tree.node_count == count - 1
    for row in range(count):
        children = [child for child in range(1, count) if tree.parents[child] == row]
        assert list(tree.children(row)) == children
        assert len({tree.tokens[child] for child in children}) == len(children)
        assert all(tree.child(row, tree.tokens[child]) == child for child in children)


@st.composite
def trees(draw: st.DrawFn, root: int = 9, most: int = 12) -> TokenTree:
    tree = TokenTree(root)
    for _ in range(draw(st.integers(0, most))):
        parent = draw(st.integers(0, len(tree) - 1))
        tree.add(parent, draw(st.integers(0, 3)), draw(st.floats(0.0, 1.0)))
    return tree


def chain(root: int, *tokens: int) -> TokenTree:
    tree = TokenTree(root)
    node = ROOT
    for token in tokens:
        node = tree.add(node, token, 0.5)
    return tree


def test_a_new_tree_is_its_root() -> None:
    tree = TokenTree(7)
    assert_sound(tree)
    assert (tree.tokens, tree.parents, tree.scores, tree.node_count) == ([7], [-1], [1.0], 0)
    assert tree.path(ROOT) == [] and tree.depth(ROOT) == 0 and tree.reach(ROOT) == 1.0


def test_add_returns_the_row_and_keeps_first_law_and_its_sources_best_score() -> None:
    tree = TokenTree(7)
    law, other = NodeLaw((3, 4), (0.5, 0.5)), NodeLaw((3,), (1.0,))
    row = tree.add(ROOT, 3, 0.4, Source.MODEL, law)
    assert row == 1
    assert tree.add(ROOT, 3, 0.95, Source.NGRAM, other) == 1
    assert tree.add(ROOT, 3, 0.97) == 1
    assert (tree.scores[1], tree.sources[1]) == (0.4, Source.MODEL)
    assert tree.add(ROOT, 3, 0.9, Source.MODEL, other) == 1
    assert tree.add(ROOT, 3, 0.2, Source.MODEL, other) == 1
    assert (tree.scores[1], tree.sources[1], tree.laws[1], tree.node_count) == (0.9, Source.MODEL, law, 1)
    assert tree.add(1, 3, 0.5) == 2  # the same token elsewhere is another node
    assert_sound(tree)


def test_a_draft_takes_over_what_lookup_found_and_lookup_takes_nothing() -> None:
    tree, found, drafted = TokenTree(7), TokenTree(7), TokenTree(7)
    found.add(found.add(ROOT, 1, 0.9, Source.NGRAM), 2, 0.9, Source.NGRAM)
    drafted.add(drafted.add(ROOT, 1, 0.3, Source.MODEL), 5, 0.3, Source.MODEL)
    lookups = Bounds(sources=frozenset({Source.NGRAM}))
    for new in (2, 0):
        assert tree.graft(found) == new
        assert tree.graft(drafted, bounds=lookups) == 0, "a source that was not asked for takes over nothing"
    assert tree.sources[1:] == [Source.NGRAM, Source.NGRAM]
    assert tree.graft(drafted) == 2
    assert tree.graft(drafted) == tree.graft(found) == 0
    assert (tree.sources[1:], tree.scores[1:]) == ([Source.MODEL, Source.NGRAM, Source.MODEL], [0.3, 0.9, 0.3])
    assert tree.lookups[1:] == [0.9, 0.9, 0.0], "what lookup said of a node is kept beside the draft's word"
    below, _ = tree.subtree(1)
    assert below.lookups == [0.0, 0.9, 0.0]


def test_path_depth_reach_and_descend() -> None:
    tree = TokenTree(0)
    a = tree.add(ROOT, 1, 0.5)
    b = tree.add(ROOT, 2, 0.25)
    c = tree.add(a, 3, 0.5)
    d = tree.add(b, 3, 1.0)
    e = tree.add(c, 1, 0.5)
    assert tree.path(e) == [a, c, e] and tree.path(d) == [b, d]
    assert [tree.depth(row) for row in (ROOT, a, b, c, d, e)] == [0, 1, 1, 2, 2, 3]
    assert tree.reach(e) == 0.125 and tree.reach(d) == 0.25
    assert list(tree.descend([1, 3, 1, 1])) == [a, c, e]
    assert list(tree.descend([2, 3])) == [b, d]
    assert list(tree.descend([3])) == [] and list(tree.descend([])) == []
    assert list(tree.descend([1, 9, 1])) == [a]  # nothing is met again after the walk has left the tree
    assert tree.child(ROOT, 9) is None and tree.child(e, 1) is None


def test_the_likeliest_child_leads() -> None:
    tree = TokenTree(0)
    low, high, equal = tree.add(ROOT, 1, 0.2), tree.add(ROOT, 2, 0.5), tree.add(ROOT, 3, 0.5)
    only = tree.add(low, 4, 0.0)
    assert tree.likeliest(ROOT) == high, "the first of equals"
    assert tree.likeliest(low) == only and tree.likeliest(only) is None
    assert [tree.leads(node) for node in (low, high, equal, only)] == [False, True, False, True]
    tree.add(ROOT, 1, 0.9)  # it is thought of better now
    assert tree.likeliest(ROOT) == low and not tree.leads(high)


@exhaustive
@given(trees())
def test_derived_values_agree_with_the_columns(tree: TokenTree) -> None:
    assert_sound(tree)
    for row in range(len(tree)):
        rows = tree.path(row)
        assert tree.depth(row) == len(rows)
        assert [tree.parents[r] for r in rows] == [ROOT, *rows][:-1]
        chance = 1.0
        for r in reversed(rows):
            chance *= tree.scores[r]
        assert tree.reach(row) == chance
        assert list(tree.descend(tree.tokens[r] for r in rows)) == rows


@exhaustive
@given(trees())
def test_columns_round_trip(tree: TokenTree) -> None:
    again = TokenTree.from_columns(tree.tokens, tree.parents, tree.scores, tree.sources, tree.laws)
    assert_sound(again)
    for column in ("tokens", "parents", "scores", "sources", "laws"):
        assert getattr(again, column) == getattr(tree, column)


def test_columns_left_out_mean_defaults() -> None:
    tree = TokenTree.from_columns([5, 6, 7], [-1, 0, 0])
    assert tree.scores == [1.0, 0.5, 0.5]
    assert tree.sources == [None] * 3 and tree.laws == [None] * 3


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        (([], []), "at least 1"),
        (([1, 2], [-1]), "1 and 2"),
        (([1], [-1, 0]), "2 and 1"),
        (([1], [0]), "not 0"),
        (([1, 2], [0, -1]), "not 0"),
        (([1, 2], [-1, 1]), r"row 1 must be in \[0, 1\), not 1"),
        (([1, 2], [-1, -1]), "not -1"),
        (([1, 2, 3], [-1, 2, 0]), r"\[0, 1\), not 2"),
        (([1, 2, 2], [-1, 0, 0]), "row 2 repeats token 2 below row 0"),
        (([1, 2], [-1, 0], [1.0]), "scores has 1 rows"),
        (([1, 2], [-1, 0], [1.0, 0.5, 0.5]), "scores has 3 rows"),
        (([1, 2], [-1, 0], [], [None]), "sources has 1 rows"),
        (([1, 2], [-1, 0], [], [], [None]), "laws has 1 rows"),
    ],
)
def test_malformed_columns_are_refused(columns: tuple[Any, ...], said: str) -> None:
    with pytest.raises(MalformedMessage, match=said):
        TokenTree.from_columns(*columns)


@exhaustive
@given(st.lists(st.integers(-2, 4), max_size=8), st.lists(st.integers(-3, 8), max_size=8))
def test_any_columns_make_a_sound_tree_or_are_refused(tokens: list[int], parents: list[int]) -> None:
    try:
        tree = TokenTree.from_columns(tokens, parents)
    except MalformedMessage:
        sound = (
            len(tokens) == len(parents) > 0
            and parents[0] == -1
            and all(0 <= parent < row for row, parent in enumerate(parents) if row)
            and len(set(zip(parents, tokens, strict=True))) == len(tokens)
        )
        assert not sound
    else:
        assert_sound(tree)
        assert (tree.tokens, tree.parents) == (tokens, parents)


# --- graft: union --------------------------------------------------------------------------------------


def union(one: Paths, other: Paths) -> Paths:
    return {path: max(one.get(path, 0.0), other.get(path, 0.0)) for path in one.keys() | other.keys()}


@exhaustive
@given(trees(), trees())
def test_graft_is_the_union(one: TokenTree, other: TokenTree) -> None:
    before, offered = paths(one), paths(other)
    fresh = one.graft(other)
    assert_sound(one)
    assert paths(one) == union(before, offered)
    assert fresh == len(offered.keys() - before.keys())


@exhaustive
@given(trees(), trees(), trees())
def test_graft_is_idempotent_and_needs_no_order(one: TokenTree, two: TokenTree, three: TokenTree) -> None:
    forth, back = TokenTree(9), TokenTree(9)
    for tree in (one, two, three):
        forth.graft(tree)
    for tree in (three, one, two, one):
        back.graft(tree)
    assert paths(forth) == paths(back)
    assert forth.graft(two) == 0
    assert paths(forth) == paths(back)


@exhaustive
@given(trees(), st.data())
def test_graft_from_a_row_takes_what_is_below_it(other: TokenTree, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(other) - 1))
    tree = TokenTree(other.tokens[start])
    tree.graft(other, start)
    assert paths(tree) == paths(other, start)


@exhaustive
@given(trees(), trees(), st.integers(0, 14), st.integers(0, 5))
def test_graft_respects_bounds(one: TokenTree, other: TokenTree, most: int, depth: int) -> None:
    held = paths(one)
    ends = frozenset({2})
    one.graft(other, bounds=Bounds(most_nodes=most, vocab_size=3, ends=ends), depth=depth)
    assert_sound(one)
    fresh = paths(one).keys() - held.keys()
    assert one.node_count <= max(most, len(held))
    assert all(len(path) <= depth for path in fresh)
    assert all(path[-1] < 3 for path in fresh)
    assert all(2 not in path[:-1] for path in fresh)
    assert fresh <= paths(other).keys()


@exhaustive
@given(trees(), st.integers(0, 5))
def test_graft_to_a_depth_takes_everything_down_to_it(other: TokenTree, depth: int) -> None:
    tree = TokenTree(9)
    tree.graft(other, depth=depth)
    assert paths(tree) == {path: score for path, score in paths(other).items() if len(path) <= depth}


@exhaustive
@given(trees(), trees())
def test_graft_with_one_child_keeps_the_first_draw(one: TokenTree, other: TokenTree) -> None:
    bounds = Bounds(one_child=True)
    tree = TokenTree(9)
    tree.graft(one, bounds=bounds)
    first = [tree.tokens[row] for row in range(len(tree))]
    tree.graft(other, bounds=bounds)
    assert_sound(tree)
    assert tree.tokens[: len(first)] == first
    assert all(tree.parents[row] == row - 1 for row in range(1, len(tree)))  # a chain
    assert paths(tree).keys() <= paths(one).keys() | paths(other).keys()


def test_graft_with_one_child_keeps_the_first_law() -> None:
    first, second = NodeLaw((1, 2), (0.5, 0.5)), NodeLaw((1, 2), (0.9, 0.1))
    bounds = Bounds(one_child=True)
    tree, again, other = TokenTree(9), TokenTree(9), TokenTree(9)
    tree.add(ROOT, 1, 0.5, Source.MODEL, first)
    again.add(again.add(ROOT, 1, 0.6, Source.NGRAM, second), 2, 0.5)
    other.add(other.add(ROOT, 2, 0.9), 2, 0.9)
    assert tree.graft(again, bounds=bounds) == 1  # the same draw goes on
    assert tree.laws[1] == first and tree.sources[1] == Source.MODEL
    assert tree.graft(other, bounds=bounds) == 0  # another draw is dropped with all below it
    assert paths(tree).keys() == {(1,), (1, 2)}


def test_graft_carries_sources_and_laws() -> None:
    other = TokenTree(9)
    law = NodeLaw((1,), (1.0,))
    other.add(other.add(ROOT, 1, 0.5, Source.EARLY_EXIT, law), 2, 0.5, Source.NGRAM)
    tree = TokenTree(9)
    tree.graft(other)
    assert tree.sources == [None, Source.EARLY_EXIT, Source.NGRAM]
    assert tree.laws == [None, law, None]


def test_a_full_tree_still_takes_better_scores_of_known_nodes() -> None:
    tree = chain(9, 1)
    other = TokenTree(9)
    other.add(ROOT, 2, 0.9)
    other.add(ROOT, 1, 0.9)
    assert tree.graft(other, bounds=Bounds(most_nodes=1)) == 0
    assert paths(tree) == {(1,): 0.9}


# --- parts ---------------------------------------------------------------------------------------------


@exhaustive
@given(trees(), st.data())
def test_subtree_is_what_lies_below(tree: TokenTree, data: st.DataObject) -> None:
    node = data.draw(st.integers(0, len(tree) - 1))
    below, rows = tree.subtree(node)
    assert_sound(below)
    assert below.tokens[ROOT] == tree.tokens[node]
    assert paths(below) == paths(tree, node)
    assert rows[node] == ROOT
    assert sorted(rows.values()) == list(range(len(below)))
    for old, new in rows.items():
        assert old == node or node in [ROOT, *tree.path(old)]
        assert below.tokens[new] == tree.tokens[old]
        assert new == ROOT or below.parents[new] == rows[tree.parents[old]]


@exhaustive
@given(trees(), st.data())
def test_excerpt_holds_nodes_with_their_ancestors_and_no_more(tree: TokenTree, data: st.DataObject) -> None:
    nodes = data.draw(st.lists(st.integers(0, len(tree) - 1), max_size=5))
    part = tree.excerpt(nodes)
    assert_sound(part)
    wanted = {row for node in nodes for row in tree.path(node)}
    assert paths(part) == {tuple(tree.tokens[r] for r in tree.path(row)): tree.scores[row] for row in wanted}
    assert part.tokens[ROOT] == tree.tokens[ROOT]


def test_parts_carry_sources_and_laws() -> None:
    tree = TokenTree(9)
    law = NodeLaw((2,), (1.0,))
    a = tree.add(ROOT, 1, 0.5)
    b = tree.add(a, 2, 0.4, Source.MODEL, law)
    below, rows = tree.subtree(a)
    part = tree.excerpt([b])
    assert (below.laws[rows[b]], below.sources[rows[b]], below.scores[rows[b]]) == (law, Source.MODEL, 0.4)
    assert (part.laws[2], part.sources[2], part.scores[2]) == (law, Source.MODEL, 0.4)


@exhaustive
@given(trees(), st.data())
def test_parts_are_copies(tree: TokenTree, data: st.DataObject) -> None:
    before = paths(tree)
    below, _ = tree.subtree(data.draw(st.integers(0, len(tree) - 1)))
    part = tree.excerpt(range(len(tree)))
    for copy in (below, part):
        copy.add(ROOT, 77, 0.5)
    assert paths(tree) == before


def test_strands_are_lines_that_leave_one_another() -> None:
    """Main path a-b-c, a branch d-e below a, one f below d, one g below the root; the likelier child goes on."""
    tree = TokenTree(0)
    a = tree.add(ROOT, 1, 0.9)
    b = tree.add(a, 2, 0.6)
    c = tree.add(b, 3, 0.9)
    d = tree.add(a, 4, 0.3)
    e = tree.add(d, 5, 0.8)
    f = tree.add(d, 6, 0.1)
    g = tree.add(ROOT, 7, 0.05)
    assert tree.strands([a, b, c, d, e, f, g]) == [(-1, (a, b, c)), (0, (g,)), (0, (d, e)), (2, (f,))]
    assert tree.strands([a, d]) == [(-1, (a, d))]
    assert tree.strands([]) == [(-1, ())]
    assert tree.depths() == [0, 1, 2, 3, 2, 3, 3, 1]


@given(trees())
def test_strands_hold_every_node_once_below_its_parent(tree: TokenTree) -> None:
    nodes = list(range(1, len(tree)))
    lines = tree.strands(nodes)
    assert sorted(row for _, rows in lines for row in rows) == nodes
    for index, (leaves, rows) in enumerate(lines):
        assert leaves < index
        for above, below in itertools.pairwise(rows):
            assert tree.parents[below] == above
        if rows and leaves >= 0:
            parent = tree.parents[rows[0]]
            assert parent in lines[leaves][1] or (parent == ROOT and leaves == 0)
