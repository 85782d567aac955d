"""Lookup against the slow obvious version of itself."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.core.ngram import LONGEST, RECENT, SCORES, NgramIndex


def obvious(tokens: list[int], limit: int) -> tuple[list[int], float]:
    """Longest suffix of 2 to LONGEST tokens that stood before, at its latest place; its text, read on
    over the end into the proposal itself."""
    for size in range(min(LONGEST, len(tokens)), 1, -1):
        suffix = tokens[len(tokens) - size :]
        for end in range(len(tokens) - 1, size - 1, -1):
            if tokens[end - size : end] == suffix and limit > 0:
                text = list(tokens)
                for step in range(limit):
                    text.append(text[end + step])
                return text[len(tokens) :], SCORES[size]
    return [], 0.0


@pytest.mark.parametrize(
    ("tokens", "limit", "guess", "size"),
    [
        ([], 4, [], 0),
        ([1], 4, [], 0),
        ([1, 2, 3], 4, [], 0),
        ([1, 2, 3, 1], 4, [], 0),  # one token matched is not enough
        ([1, 2, 3, 1, 2], 2, [3, 1], 2),
        ([1, 2, 3, 1, 2], 1, [3], 2),
        ([1, 2, 3, 1, 2], 0, [], 0),
        ([1, 2, 3, 1, 2], -1, [], 0),
        ([1, 2, 3, 1, 2], 7, [3, 1, 2, 3, 1, 2, 3], 2),  # a loop is followed round
        ([1, 2, 7, 5, 1, 2, 8, 1, 2], 1, [8], 2),  # the latest place
        ([9, 1, 2, 7, 1, 2, 8, 9, 1, 2], 1, [7], 3),  # but a longer match before a later one
        ([5, 5, 5], 4, [5, 5, 5, 5], 2),
        ([1, 2, 3, 4, 5, 6, 0, 1, 2, 3, 4, 5], 1, [6], 5),
        ([0, 1, 2, 3, 4, 5, 6, 9, 0, 1, 2, 3, 4, 5], 1, [6], 5),  # no more than LONGEST is compared
    ],
)
def test_propose(tokens: list[int], limit: int, guess: list[int], size: int) -> None:
    assert NgramIndex(tokens).propose(limit) == (guess, SCORES.get(size, 0.0))


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 2), max_size=40), st.integers(0, 12))
def test_propose_agrees_with_the_obvious_search(tokens: list[int], limit: int) -> None:
    assert NgramIndex(tokens).propose(limit) == obvious(tokens, limit)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.lists(st.sampled_from([0, 1, 1 << 16, 1 + (1 << 16)]), max_size=40), st.integers(0, 4))
def test_pairs_of_one_hash_are_told_apart(tokens: list[int], limit: int) -> None:
    assert NgramIndex(tokens).propose(limit) == obvious(tokens, limit)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.lists(st.lists(st.integers(0, 2), max_size=6), max_size=8), st.integers(0, 12))
def test_pieces_make_no_difference(pieces: list[list[int]], limit: int) -> None:
    index = NgramIndex()
    for piece in pieces:
        index.extend(piece)
        index.propose(limit)  # asking changes nothing
    assert index.propose(limit) == NgramIndex([token for piece in pieces for token in piece]).propose(limit)


def one_by_one(tokens: list[int]) -> NgramIndex:
    index = NgramIndex()
    index.extend(tokens)
    return index


@pytest.mark.parametrize("vocab", [2, 3, 30])
def test_a_sorted_prompt_proposes_what_one_entered_token_by_token_does(vocab: int) -> None:
    """Also where a pair stood so often that the recent places do not decide."""
    draw = random.Random(vocab)
    for _ in range(20):
        prompt = [draw.randrange(vocab) for _ in range(8 * RECENT)]
        rare = [vocab, *(draw.randrange(vocab) for _ in range(LONGEST - 1))]  # a run that stood once, long ago
        prompt[10 : 10 + LONGEST] = rare
        sorted_at_once, entered = NgramIndex(prompt), one_by_one(prompt)
        for token in [*rare, *(draw.randrange(vocab) for _ in range(30))]:
            assert sorted_at_once.propose(6) == entered.propose(6)
            sorted_at_once.extend([token])
            entered.extend([token])


def test_a_long_prompt_is_not_entered_token_by_token() -> None:
    draw = random.Random(0)
    prompt = [draw.randrange(50_000) for _ in range(1 << 15)]

    def seconds(build: Callable[[list[int]], NgramIndex]) -> float:
        began = time.perf_counter()
        build(prompt)
        return time.perf_counter() - began

    assert min(seconds(NgramIndex) for _ in range(5)) < min(seconds(one_by_one) for _ in range(2)) / 8


def test_a_longer_match_scores_higher() -> None:
    assert sorted(SCORES) == list(range(2, LONGEST + 1))
    assert [SCORES[size] for size in sorted(SCORES)] == sorted(SCORES.values())
    assert all(0.0 < score < 1.0 for score in SCORES.values())
