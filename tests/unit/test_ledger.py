"""The coordinator's truth: it grows, and a repeated or stale Emit cannot change it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.core.errors import ForerunError, LedgerConflict
from forerun.core.ledger import Ledger

PROMPT = (4, 5, 6)


def test_a_new_ledger_holds_the_prompt() -> None:
    prompt = list(PROMPT)
    ledger = Ledger(prompt)
    prompt.append(9)
    assert (ledger.tokens, ledger.prompt_len, ledger.committed_len, ledger.completion) == ([4, 5, 6], 3, 3, [])


def test_commits_return_what_is_new() -> None:
    ledger = Ledger(PROMPT)
    assert ledger.commit(3, [7, 8]) == [7, 8]
    assert ledger.commit(3, [7, 8]) == []  # repeated
    assert ledger.commit(3, [7]) == []  # an older one
    assert ledger.commit(3, [7, 8, 9]) == [9]  # merged with what was lost
    assert ledger.commit(4, [8, 9, 1]) == [1]
    assert ledger.commit(7, []) == []
    assert ledger.completion == [7, 8, 9, 1]
    assert ledger.committed_len == 7 and ledger.prompt_len == 3


@pytest.mark.parametrize(
    ("base_len", "tokens"),
    [
        pytest.param(6, [1], id="beyond the end"),
        pytest.param(2, [6, 7, 8], id="before the end of the prompt"),
        pytest.param(0, [], id="at the start of the prompt"),
        pytest.param(-1, [8], id="negative"),
        pytest.param(3, [7, 9], id="another token"),
        pytest.param(3, [8], id="another first token"),
        pytest.param(4, [9, 9], id="another last token, with more"),
    ],
)
def test_a_contradiction_is_refused_and_changes_nothing(base_len: int, tokens: list[int]) -> None:
    ledger = Ledger(PROMPT)
    ledger.commit(3, [7, 8])
    with pytest.raises(LedgerConflict, match=f"emit at {base_len} ") as caught:
        ledger.commit(base_len, tokens)
    assert isinstance(caught.value, ForerunError)
    assert ledger.tokens == [4, 5, 6, 7, 8]


def test_the_completion_is_a_copy() -> None:
    ledger = Ledger(PROMPT)
    ledger.commit(3, [7])
    ledger.completion.append(9)
    assert ledger.completion == [7]


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    text=st.lists(st.integers(0, 3), max_size=20),
    emits=st.lists(st.tuples(st.integers(0, 20), st.integers(0, 8)), max_size=20),
)
def test_any_emits_of_one_text_build_that_text(text: list[int], emits: list[tuple[int, int]]) -> None:
    """Repeated, overlapping, out of order: those that touch are taken, what is new is returned once."""
    ledger = Ledger(PROMPT)
    told: list[int] = []
    for start, size in emits:
        before = ledger.committed_len
        part = text[start : start + size]
        if 3 + start > before:
            with pytest.raises(LedgerConflict):
                ledger.commit(3 + start, part)
        else:
            told += ledger.commit(3 + start, part)
        assert ledger.committed_len >= before
        assert ledger.completion == told == text[: len(told)]
