"""committed_len = base_len + accepted + 1, and the logits that judge a node are those of its parent."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.core.tree import ROOT, TokenTree
from forerun.core.walk import Walk, walk

END = 9


def tree_abc() -> TokenTree:
    """Row by path: 1: (1,), 2: (2,), 3: (1, 3), 4: (1, 4), 5: (1, 3, 5), 6: (2, 3)."""
    return TokenTree.from_columns([0, 1, 2, 3, 4, 5, 3], [-1, 0, 0, 1, 1, 3, 2])


ALL = frozenset(range(1, 7))


def says(*tokens: int) -> Callable[[int, int, int | None], int]:
    """A target whose text is known: the token depends on how deep the walk is, as plain decoding's would."""
    return lambda _row, depth, _proposal: tokens[depth]


@pytest.mark.parametrize(
    ("text", "checked", "room", "expected"),
    [
        pytest.param((7,), ALL, 8, Walk((7,), (), False), id="nothing right: one token"),
        pytest.param((1, 7), ALL, 8, Walk((1, 7), (1,), False), id="one right"),
        pytest.param((1, 4, 7), ALL, 8, Walk((1, 4, 7), (1, 4), False), id="a sibling branch"),
        pytest.param((2, 3, 7), ALL, 8, Walk((2, 3, 7), (2, 6), False), id="the other branch"),
        pytest.param((1, 3, 5, 7), ALL, 8, Walk((1, 3, 5, 7), (1, 3, 5), False), id="all right: one more"),
        pytest.param((1, 3, 5), set(), 8, Walk((1,), (), False), id="nothing checked"),
        pytest.param((1, 3, 5), {1}, 8, Walk((1, 3), (1,), False), id="known, but not checked: not accepted"),
        pytest.param((1, 3, 5), {1, 2, 5, 6}, 8, Walk((1, 3), (1,), False), id="a gap in what was checked"),
        pytest.param((1, 3, 5), {2, 6}, 8, Walk((1,), (), False), id="checked elsewhere"),
        pytest.param((1, 3, 5, 7), ALL, 1, Walk((1,), (1,), False), id="room for one"),
        pytest.param((1, 3, 5, 7), ALL, 3, Walk((1, 3, 5), (1, 3, 5), False), id="room ends at the leaf"),
        pytest.param((1, 3, 5, 7), ALL, 4, Walk((1, 3, 5, 7), (1, 3, 5), False), id="room just enough"),
    ],
)
def test_walk(text: tuple[int, ...], checked: frozenset[int], room: int, expected: Walk) -> None:
    got = walk(tree_abc(), checked, says(*text), {END}, room)
    assert got == expected
    assert got.accepted == len(expected.path)


@pytest.mark.parametrize(
    ("tokens", "ends", "expected"),
    [
        pytest.param((1, 3), {1}, Walk((1,), (1,), True), id="an accepted end token stops above what follows"),
        pytest.param((1, END), {END}, Walk((1, END), (1,), True), id="an end token as the correction"),
        pytest.param((END,), {END}, Walk((END,), (), True), id="at once"),
        pytest.param((1, 3, 5, END), {END}, Walk((1, 3, 5, END), (1, 3, 5), True), id="as the bonus"),
    ],
)
def test_an_end_token_ends_the_walk(tokens: tuple[int, ...], ends: set[int], expected: Walk) -> None:
    assert walk(tree_abc(), ALL, says(*tokens), ends, 8) == expected


def test_an_end_token_that_fills_the_room_is_an_end() -> None:
    assert walk(tree_abc(), ALL, says(1, END), {END}, 2) == Walk((1, END), (1,), True)


def test_each_node_is_judged_at_its_parent() -> None:
    """Asked once a committed token, with the row whose logits judge, its depth, and the checked child."""
    asked: list[tuple[int, int, int | None]] = []

    def pick(row: int, depth: int, proposal: int | None) -> int:
        asked.append((row, depth, proposal))
        return (1, 4, 7)[depth]

    walk(tree_abc(), {1, 4}, pick, (), 8)
    assert asked == [(ROOT, 0, 1), (1, 1, 4), (4, 2, None)]


def test_the_proposal_is_the_first_checked_child() -> None:
    asked: list[int | None] = []

    def pick(_row: int, _depth: int, proposal: int | None) -> int:
        asked.append(proposal)
        return 7

    walk(tree_abc(), {2, 6}, pick, (), 8)
    walk(tree_abc(), ALL, pick, (), 8)
    walk(tree_abc(), (), pick, (), 8)
    assert asked == [2, 1, None]


@st.composite
def trees(draw: st.DrawFn) -> TokenTree:
    tree = TokenTree(0)
    for _ in range(draw(st.integers(0, 14))):
        tree.add(draw(st.integers(0, len(tree) - 1)), draw(st.integers(0, 2)), 0.5)
    return tree


@settings(max_examples=300, deadline=None, derandomize=True)
@given(trees(), st.lists(st.integers(0, 3), min_size=20, max_size=20), st.integers(1, 12), st.data())
def test_walk_commits_a_prefix_of_the_target_text(
    tree: TokenTree, text: list[int], room: int, data: st.DataObject
) -> None:
    """Whatever is in the tree and whatever was checked: the text is the target's, only the length differs."""
    tips = data.draw(st.sets(st.integers(0, len(tree) - 1)))
    checked = {row for tip in tips for row in tree.path(tip)}
    got = walk(tree, checked, says(*text), {3}, room)
    assert list(got.tokens) == text[: len(got.tokens)]
    assert 1 <= len(got.tokens) <= room
    assert 3 not in got.tokens[:-1] and got.ended == (got.tokens[-1] == 3)
    assert set(got.path) <= checked
    assert [tree.tokens[row] for row in got.path] == list(got.tokens[: got.accepted])
    assert got.path == () or tree.path(got.path[-1]) == list(got.path)
    if not got.ended and len(got.tokens) < room:
        assert len(got.tokens) == got.accepted + 1
        after = tree.child(got.path[-1] if got.path else ROOT, got.tokens[-1])
        assert after is None or after not in checked  # it went as far as it could
