"""Re-rooting, rollback, and hints that are late, early, repeated or from another history."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.core.sequence import TAIL, Advance, Hint, Landing, TokenSequence
from forerun.core.tree import ROOT, Bounds, TokenTree

PROMPT = (4, 5, 6)


def branches(root: int, *paths: tuple[int, ...]) -> TokenTree:
    tree = TokenTree(root)
    for path in paths:
        node = ROOT
        for token in path:
            node = tree.add(node, token, 0.5)
    return tree


def held(tree: TokenTree) -> set[tuple[int, ...]]:
    return {tuple(tree.tokens[row] for row in tree.path(node)) for node in range(1, len(tree))}


def hint(sequence: TokenSequence, *paths: tuple[int, ...]) -> Hint:
    return Hint(sequence.committed_len, sequence.tail, branches(sequence.tokens[-1], *paths))


def test_a_sequence_is_rooted_at_its_last_token() -> None:
    sequence = TokenSequence(PROMPT)
    assert sequence.committed_len == 3
    assert sequence.tail == PROMPT
    assert sequence.tree.tokens == [6]
    assert TokenSequence(range(20)).tail == tuple(range(20 - TAIL, 20))


def test_an_empty_sequence_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one token"):
        TokenSequence([])


def test_a_sequence_keeps_its_own_tokens() -> None:
    prompt = list(PROMPT)
    sequence = TokenSequence(prompt)
    prompt.append(1)
    sequence.advance([7])
    assert sequence.tokens == [4, 5, 6, 7] and prompt == [4, 5, 6, 1]


def test_advance_along_the_tree_keeps_what_lies_below() -> None:
    sequence = TokenSequence(PROMPT)
    sequence.land(hint(sequence, (1, 2, 3), (1, 9), (8,)))  # rows 1: 1, 2: 1-2, 3: 1-2-3, 4: 1-9, 5: 8
    moved = sequence.advance([1, 2])
    assert moved == Advance((1, 2), {2: ROOT, 3: 1})
    assert sequence.tokens == [4, 5, 6, 1, 2]
    assert sequence.tree.tokens == [2, 3]


def test_advance_out_of_the_tree_drops_every_guess() -> None:
    sequence = TokenSequence(PROMPT)
    sequence.land(hint(sequence, (1, 2, 3), (8,)))
    moved = sequence.advance([1, 7])
    assert moved == Advance((1,), {})  # the accepted node is still named: its KV stays
    assert sequence.tokens == [4, 5, 6, 1, 7]
    assert sequence.tree.tokens == [7] and sequence.tree.node_count == 0


def test_advance_to_the_correction_that_was_prepared() -> None:
    sequence = TokenSequence(PROMPT)
    sequence.land(hint(sequence, (1, 2), (8, 3)))
    assert sequence.advance([8]).path == (3,)
    assert held(sequence.tree) == {(3,)}


def test_advance_by_nothing_moves_nothing() -> None:
    sequence = TokenSequence(PROMPT)
    sequence.land(hint(sequence, (1, 2)))
    assert sequence.advance([]) == Advance((), {0: 0, 1: 1, 2: 2})
    assert held(sequence.tree) == {(1,), (1, 2)} and sequence.tokens == list(PROMPT)


def test_rewind_forgets_tokens_and_guesses() -> None:
    sequence = TokenSequence(PROMPT)
    sequence.advance([7, 8])
    sequence.land(hint(sequence, (1,)))
    sequence.rewind(4)
    assert sequence.tokens == [4, 5, 6, 7]
    assert sequence.tree.tokens == [7]
    assert sequence.land(Hint(5, (7, 8), branches(8, (1,)))) is Landing.AHEAD
    sequence.rewind(1)
    assert sequence.tokens == [4] and sequence.tree.tokens == [4]


# --- landing -------------------------------------------------------------------------------------------


def test_a_hint_lands_once() -> None:
    sequence = TokenSequence(PROMPT)
    one = hint(sequence, (1, 2))
    assert sequence.land(one) is Landing.MERGED
    assert sequence.land(one) is Landing.KNOWN
    assert sequence.land(hint(sequence, (1,))) is Landing.KNOWN
    assert sequence.land(hint(sequence)) is Landing.KNOWN
    assert sequence.land(hint(sequence, (1, 3))) is Landing.MERGED
    assert held(sequence.tree) == {(1,), (1, 2), (1, 3)}


def test_landing_does_not_touch_the_hint() -> None:
    sequence = TokenSequence(PROMPT)
    one = hint(sequence, (1, 2))
    sequence.land(one)
    sequence.land(hint(sequence, (1, 5)))
    assert held(one.tree) == {(1,), (1, 2)}


def test_a_late_hint_is_walked_through_what_was_committed_since() -> None:
    sequence = TokenSequence(PROMPT)
    late = hint(sequence, (1, 2, 3), (1, 2, 4), (9,))
    sequence.advance([1, 2])
    assert sequence.land(late) is Landing.MERGED
    assert held(sequence.tree) == {(3,), (4,)}
    assert sequence.land(late) is Landing.KNOWN


def test_a_late_hint_that_names_just_what_was_committed_is_known() -> None:
    sequence = TokenSequence(PROMPT)
    late = hint(sequence, (1,))
    sequence.advance([1])
    assert sequence.land(late) is Landing.KNOWN


@pytest.mark.parametrize("committed", [[7], [1, 7], [1, 2, 3, 7]])
def test_a_late_hint_that_the_text_has_left_is_overtaken(committed: list[int]) -> None:
    sequence = TokenSequence(PROMPT)
    late = hint(sequence, (1, 2, 3))
    sequence.advance(committed)
    assert sequence.land(late) is Landing.OVERTAKEN
    assert sequence.tree.node_count == 0


def test_a_hint_for_a_longer_prefix_is_ahead() -> None:
    sequence = TokenSequence(PROMPT)
    assert sequence.land(Hint(4, (6, 1), branches(1, (2,)))) is Landing.AHEAD
    assert sequence.tree.node_count == 0


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(Hint(3, (5, 7), branches(7, (1,))), id="another last token"),
        pytest.param(Hint(3, (4, 9, 6), branches(6, (1,))), id="another token before"),
        pytest.param(Hint(2, (5, 6), branches(6, (1,))), id="the same tail elsewhere"),
        pytest.param(Hint(3, (3, 4, 5, 6), branches(6, (1,))), id="a tail longer than the prefix"),
        pytest.param(Hint(3, (5, 6), branches(7, (1,))), id="a tree rooted elsewhere"),
        pytest.param(Hint(0, (6,), branches(6, (1,))), id="no prefix"),
    ],
)
def test_a_hint_from_another_history_is_recognised_by_content(other: Hint) -> None:
    sequence = TokenSequence(PROMPT)
    assert sequence.land(other) is Landing.OTHER_TAIL
    assert sequence.tree.node_count == 0


@pytest.mark.parametrize("base_len", [0, 2, 3])
def test_a_hint_without_a_tail_is_not_ours(base_len: int) -> None:
    """It proves nothing about its prefix. It must not end the worker either."""
    sequence = TokenSequence(PROMPT)
    assert sequence.land(Hint(base_len, (), branches(6, (1,)))) is Landing.OTHER_TAIL


def test_landing_respects_depth_and_bounds() -> None:
    sequence = TokenSequence(PROMPT, Bounds(most_nodes=3, vocab_size=10, ends=frozenset({2})))
    sequence.land(hint(sequence, (1, 3, 5), (2, 3), (11,)), depth=2)
    assert held(sequence.tree) == {(1,), (1, 3), (2,)}
    sequence.land(hint(sequence, (7,)))
    assert (7,) not in held(sequence.tree)


def test_depth_counts_from_the_present_root() -> None:
    sequence = TokenSequence(PROMPT)
    late = hint(sequence, (1, 2, 3, 4))
    sequence.advance([1])
    sequence.land(late, depth=2)
    assert held(sequence.tree) == {(2,), (2, 3)}


@pytest.mark.parametrize(
    ("committed", "led"),
    [
        ([], True),  # nothing was left
        ([1], True),
        ([1, 2], True),
        ([9], False),
        ([1, 7], False),
        ([9, 3], False),  # its only child, but the branch before it was not the likeliest
    ],
)
def test_a_hint_led_if_the_text_stayed_on_its_likeliest_line(committed: list[int], led: bool) -> None:
    """Of equals the first is the likeliest."""
    sequence = TokenSequence(PROMPT)
    late = hint(sequence, (1, 2, 4), (9, 3, 4), (1, 7, 4))
    sequence.advance(committed)
    assert sequence.land(late) is Landing.MERGED
    assert sequence.led(late) == led


def test_a_hint_leads_by_its_own_scores() -> None:
    sequence = TokenSequence(PROMPT)
    late = hint(sequence, (1, 2), (8, 3))
    sequence.land(hint(sequence, (8,)))  # was known before, and stands first in the sequence's tree
    late.tree.scores[late.tree.likeliest(ROOT) or 0] = 0.4
    sequence.advance([8])
    assert sequence.led(late)


def test_one_draw_for_a_position_outlives_a_commit() -> None:
    sequence = TokenSequence(PROMPT, Bounds(one_child=True))
    sequence.land(hint(sequence, (1, 2)))
    late = hint(sequence, (1, 3))
    sequence.advance([1])
    assert sequence.land(late) is Landing.KNOWN  # the node after 1 was drawn already
    assert held(sequence.tree) == {(2,)}


token_lists = st.lists(st.integers(0, 2), max_size=4)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.lists(token_lists.filter(bool), min_size=1, max_size=8), st.lists(token_lists, max_size=6), st.data())
def test_hints_of_any_age_give_the_same_tree(
    paths: list[list[int]], commits: list[list[int]], data: st.DataObject
) -> None:
    """A hint may land at once or any number of commits later: what it holds below the present root is there."""
    prompt, lates = TokenSequence(PROMPT), TokenSequence(PROMPT)
    late: list[Hint] = []
    for tokens in commits:
        sent = hint(prompt, *(tuple(path) for path in paths))
        assert prompt.land(sent) is not Landing.AHEAD
        late.append(sent)
        prompt.advance(tokens)
        lates.advance(tokens)
        if data.draw(st.booleans()):
            for sent in data.draw(st.permutations(late)):
                lates.land(sent)
            late.clear()
    for sent in late:
        lates.land(sent)
    assert lates.tokens == prompt.tokens
    assert held(lates.tree) == held(prompt.tree)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.lists(token_lists.filter(bool), max_size=6), token_lists)
def test_advance_names_old_rows_of_what_it_met_and_kept(paths: list[list[int]], tokens: list[int]) -> None:
    sequence = TokenSequence(PROMPT)
    sequence.land(hint(sequence, *(tuple(path) for path in paths)))
    old = sequence.tree
    moved = sequence.advance(tokens)
    assert sequence.tokens == [*PROMPT, *tokens]
    assert sequence.tree.tokens[ROOT] == sequence.tokens[-1]
    assert [old.tokens[row] for row in moved.path] == tokens[: len(moved.path)]
    inside = len(moved.path) == len(tokens)
    assert bool(moved.rows) == inside
    expected = {path[len(tokens) :] for path in held(old) if path[: len(tokens)] == tuple(tokens)} - {()}
    assert held(sequence.tree) == expected
    for before, after in moved.rows.items():
        assert old.tokens[before] == sequence.tree.tokens[after]
        assert old.depth(before) == sequence.tree.depth(after) + len(tokens)
