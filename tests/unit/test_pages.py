"""The pool of KV pages: nobody writes into another's columns, nothing leaks, what is known is found again."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.core.pages import KV, LEAST_COPY, TILE, OutOfPages, Pages, Path


def text(count: int, seed: float = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1000) for _ in range(count)]


def test_extend_takes_pages_as_tokens_come() -> None:
    kv = KV(Pages(4))
    kv.extend(1)
    assert len(kv.trunk.pages) == 1
    kv.commit(text(1), 1)
    kv.extend(TILE)
    assert len(kv.trunk.pages) == 2
    kv.commit(text(2), 2)
    assert len(kv.trunk.pages) == 1, "guesses that were not taken give their page back"


def test_out_of_pages_changes_nothing() -> None:
    pages = Pages(3)
    kv, other = KV(pages), KV(pages)
    kv.extend(2 * TILE)
    kv.commit(text(2 * TILE), 2 * TILE)
    other.extend(5)
    other.commit(text(5, 1), 5)
    with pytest.raises(OutOfPages, match="1 pages are needed, 0 are available"):
        kv.extend(1)
    with pytest.raises(OutOfPages):
        other.branch(other.trunk, 3, 1)
    assert len(kv.trunk.pages) == 2
    assert pages.held == 3
    other.release()
    kv.extend(1)


def test_a_branch_has_its_own_tail_and_shares_the_rest() -> None:
    pages = Pages(8)
    kv = KV(pages)
    tokens = text(TILE + 10)
    kv.extend(TILE + 10)
    kv.commit(tokens, TILE + 10)
    kv.extend(4)
    branch = kv.branch(kv.trunk, TILE + 12, 3)
    assert branch.pages[0] == kv.trunk.pages[0]
    assert branch.pages[1] != kv.trunk.pages[1]
    assert pages.take_copies() == [(kv.trunk.pages[1], branch.pages[1])]
    first = kv.branch(kv.trunk, TILE + 14, 1)
    assert first.pages == kv.trunk.pages, "where nobody wrote a branch goes on in place"
    second = kv.branch(kv.trunk, TILE + 14, 1)
    assert second.pages[1] not in (kv.trunk.pages[1], branch.pages[1]), "and the next one finds the columns taken"
    for path in (first, second):
        kv.drop(path)
    kv.commit([*tokens, 1, 2, 3], TILE + 13, branch)
    assert pages.held == 2
    kv.release()
    assert pages.held == 0


def test_a_copy_of_a_copy_comes_from_where_the_content_is() -> None:
    """Both are made before anything is written, and all are read first."""
    pages = Pages(8)
    first = KV(pages)
    first.extend(50)
    first.commit(text(50), 50)
    first.release(text(50))
    again = KV(pages)
    assert again.adopt([*text(50), 7, 8]) == 50
    again.extend(2)
    branch = again.branch(again.trunk, 50, 1)
    assert pages.take_copies() == [(0, again.trunk.pages[0]), (0, branch.pages[0])]


def test_prefixes_are_found_in_whole_pages_and_in_part_of_one() -> None:
    pages = Pages(16)
    tokens = text(3 * TILE + 40)
    first = KV(pages)
    first.extend(len(tokens))
    first.commit(tokens, len(tokens))
    second = KV(pages)
    assert second.adopt([*tokens[: 2 * TILE + 50], *text(100, 1)]) == 2 * TILE + 50
    assert second.trunk.pages[:2] == first.trunk.pages[:2]
    assert second.trunk.pages[2] != first.trunk.pages[2]
    first.release(tokens)
    third = KV(pages)
    assert third.adopt(tokens) == len(tokens) - 1, "the last token's row is always computed"
    fourth = KV(pages)
    assert fourth.adopt(text(300, 2)) == 0
    assert KV(pages).adopt([*tokens[: LEAST_COPY - 1], *text(9, 3)]) == 0, "not worth a copy"
    for kv in (second, third, fourth):
        kv.release()
    assert pages.held == 0
    assert pages.idle == 4


def test_the_same_content_computed_twice_is_kept_once() -> None:
    pages = Pages(8)
    tokens = text(2 * TILE)
    first, second = KV(pages), KV(pages)
    for kv in (first, second):
        kv.extend(2 * TILE)
    for kv in (first, second):
        kv.commit(tokens, 2 * TILE)
    assert first.trunk.pages == second.trunk.pages
    assert pages.held == 2


def test_the_longest_unused_goes_first_and_parents_after_their_children() -> None:
    pages = Pages(6)
    old, new = text(2 * TILE, 1), text(2 * TILE, 2)
    for tokens in (old, new):
        kv = KV(pages)
        kv.extend(2 * TILE)
        kv.commit(tokens, 2 * TILE)
        kv.release(tokens)
    third = KV(pages)
    third.extend(3 * TILE)  # two free pages and one known one
    again = KV(pages)
    assert again.adopt([*old, 1]) == TILE, "the second page of the old text was taken"
    again.release()
    assert KV(pages).adopt([*new, 1]) == 2 * TILE


def test_a_known_page_is_never_written_again() -> None:
    pages = Pages(8)
    tokens = text(TILE + 20)
    kv = KV(pages)
    kv.extend(len(tokens))
    kv.commit(tokens, len(tokens))
    known = kv.trunk.pages[0]
    kv.truncate(60)
    kv.extend(5)
    assert kv.trunk.pages[0] != known, "the tail becomes a copy"
    other = KV(pages)
    assert other.adopt([*tokens[:TILE], 1]) == TILE
    assert other.trunk.pages == [known]


def test_poisoned_pages_are_scrubbed_before_anybody_reads_them() -> None:
    pages = Pages(2)
    kv = KV(pages)
    kv.extend(3)
    kv.commit(text(3), 3)
    kv.release(poisoned=True)
    KV(pages).extend(1)
    assert pages.take_copies() == [(pages.blank, 0)]


def test_a_page_is_scrubbed_once() -> None:
    pages = Pages(1)
    for poisoned in (True, False):
        kv = KV(pages)
        kv.extend(3)
        kv.release(poisoned=poisoned)
    KV(pages).extend(1)
    assert pages.take_copies() == [(pages.blank, 0)], "still to be done, though it went through two hands"
    again = KV(Pages(1))
    again.extend(3)
    assert again.pages.take_copies() == []


# --- columns that nobody judged ------------------------------------------------------------------------


def unjudged(pages: Pages, tokens: list[int], sound: int) -> KV:
    """All of `tokens` in KV; a row was judged after the first `sound` of them, none later."""
    kv = KV(pages)
    for length in (sound, len(tokens)):
        kv.extend(length - kv.cached_len)
        kv.commit(tokens, length, judged=length == sound)
    return kv


def test_what_was_not_judged_is_shown_to_nobody() -> None:
    pages, tokens = Pages(9), text(3 * TILE)
    kv = unjudged(pages, tokens, TILE + 5)
    assert KV(pages).adopt([*tokens, 1]) == TILE
    kv.extend(1)
    kv.commit([*tokens, 1], 3 * TILE + 1)
    assert KV(pages).adopt([*tokens, 1]) == 3 * TILE, "a row that sees all of it was judged"


@pytest.mark.parametrize("told", [True, False])
def test_what_was_not_judged_is_scrubbed_and_the_sound_part_stays(told: bool) -> None:
    pages, tokens = Pages(4), text(3 * TILE + 20)
    kv = unjudged(pages, tokens, TILE + 5)
    first, *rest = kv.trunk.pages
    kv.release(tokens if told else ())
    assert (pages.held, pages.idle) == (0, 1)
    other = KV(pages)
    assert other.adopt([*tokens, 1]) == TILE and other.trunk.pages == [first]
    assert pages.take_copies() == [], "only who takes them needs them scrubbed"
    other.extend(3 * TILE)
    assert sorted(pages.take_copies()) == [(pages.blank, page) for page in sorted(rest)]


def test_a_prompt_that_was_never_judged_leaves_nothing() -> None:
    pages, tokens = Pages(3), text(2 * TILE + 40)
    kv = KV(pages)
    kv.extend(len(tokens))
    kv.commit(tokens, len(tokens), judged=False)
    kv.release(tokens)
    assert pages.idle == 0
    KV(pages).extend(3 * TILE)
    assert pages.take_copies() == [(pages.blank, page) for page in range(3)]


def test_what_was_adopted_is_sound() -> None:
    pages, tokens = Pages(6), text(2 * TILE + 40)
    unjudged(pages, tokens[: 2 * TILE], 2 * TILE).release(tokens)
    kv = KV(pages)
    assert kv.adopt(tokens) == 2 * TILE
    kv.extend(40)
    kv.commit(tokens, len(tokens), judged=False)
    kv.release(tokens)
    assert KV(pages).adopt(tokens) == 2 * TILE


def test_nothing_unjudged_is_left_after_a_cut_to_what_was() -> None:
    pages, tokens = Pages(4), text(TILE + 60)
    kv = unjudged(pages, tokens, TILE + 20)
    kv.truncate(TILE + 20)
    kv.release(tokens)
    assert KV(pages).adopt(tokens) == TILE + 20, "its unfinished page stays known"


def test_what_was_cut_off_vouches_for_nothing_that_comes_in_its_place() -> None:
    pages, old = Pages(6), text(TILE + 60)
    kv = unjudged(pages, old, len(old))
    kv.truncate(TILE - 20)
    new = [*old[: TILE - 20], *text(80, 1)]
    kv.extend(80)
    kv.commit(new, TILE + 60, judged=False)
    assert KV(pages).adopt(new) == TILE - 20


# --- all KV is lost ------------------------------------------------------------------------------------


def test_after_all_was_lost_pages_that_were_in_use_are_scrubbed() -> None:
    pages, tokens = Pages(5), text(TILE)
    known, held = KV(pages), KV(pages)
    held.extend(TILE + 1)  # pages 0 and 1
    known.extend(TILE)  # page 2, which stays known
    known.commit(tokens, TILE)
    known.release(tokens)
    pages.forget()
    assert (pages.held, pages.idle) == (0, 0)
    kv = KV(pages)
    assert kv.adopt([*tokens, 1]) == 0
    kv.extend(5 * TILE)
    assert pages.take_copies() == [(pages.blank, page) for page in range(3)], "the others held nothing yet"


def test_what_is_still_to_be_scrubbed_is_not_forgotten() -> None:
    pages = Pages(3)
    poisoned, released, taken = KV(pages), KV(pages), KV(pages)
    for kv in (poisoned, released):
        kv.extend(1)
    poisoned.release(poisoned=True)
    pages.forget()
    pages.forget()
    taken.extend(1)  # is to be scrubbed before the next pass, which never comes
    taken.release()
    pages.forget()
    KV(pages).extend(3 * TILE)
    assert pages.take_copies() == [(pages.blank, 0), (pages.blank, 1)]


def test_a_page_that_was_to_be_copied_into_is_scrubbed_for_the_next() -> None:
    pages = Pages(3)
    known, poisoned = KV(pages), KV(pages)
    known.extend(50)
    poisoned.extend(1)
    known.commit(text(50), 50)
    known.release(text(50))
    poisoned.release(poisoned=True)
    gone = KV(pages)
    assert gone.adopt([*text(50), 7]) == 50 and gone.trunk.pages == [1]  # a copy of page 0, in a page to be scrubbed
    gone.release()  # before any pass
    KV(pages).extend(1)
    assert pages.take_copies() == [(pages.blank, 1)]


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 1 << 30), st.integers(3, 12))
def test_whatever_happens_columns_are_ones_own_and_nothing_leaks(seed: int, count: int) -> None:
    """A model of the tensors, as tokens by column, against the texts that sequences believe they hold."""
    rng = random.Random(seed)
    pages = Pages(count)
    held: dict[int, dict[int, int]] = {page: {} for page in range(count + 1)}  # content by page and column
    live: list[tuple[KV, list[int]]] = []
    texts = [text(4 * TILE, at) for at in range(2)]

    def write(path: Path, start: int, tokens: list[int]) -> None:
        before = {to: dict(held[source]) for source, to in pages.take_copies()}
        held.update(before)
        for at, token in enumerate(tokens, start):
            held[path.pages[at // TILE]][at % TILE] = token

    def check(kv: KV, tokens: list[int]) -> None:
        held.update({to: dict(held[source]) for source, to in pages.take_copies()})
        for at in range(kv.cached_len):
            assert held[kv.trunk.pages[at // TILE]][at % TILE] == tokens[at]

    for _ in range(60):
        action = rng.choice(["start", "grow", "grow", "tree", "cut", "end"])
        try:
            if action == "start" and len(live) < 4:
                tokens = texts[rng.randrange(2)][: rng.randrange(2, 3 * TILE)] + text(rng.randrange(1, 9), rng.random())
                kv = KV(pages)
                kv.adopt(tokens)
                live.append((kv, tokens))
            elif live:
                kv, tokens = rng.choice(live)
                if action == "grow":
                    rows = min(rng.choice([1, 3, 100, 200]), len(tokens) - kv.cached_len)
                    if rows:
                        write(kv.extend(rows), kv.cached_len, tokens[kv.cached_len : kv.cached_len + rows])
                        kv.commit(tokens, kv.cached_len + rows)
                elif action == "tree" and kv.cached_len:
                    base, main, side = kv.cached_len, text(5, rng.random()), text(3, rng.random())
                    write(kv.extend(5), base, main)
                    path = kv.branch(kv.trunk, base + 2, 3)
                    write(path, base + 2, side)
                    write(path, base - base % TILE if base % TILE == 0 else base, [])
                    for at in (base, base + 1):  # ancestors within the pass, if they stand in the branch's own tail
                        if at // TILE == (base + 2) // TILE and (base + 2) % TILE:
                            held[path.pages[at // TILE]][at % TILE] = main[at - base]
                    del tokens[base:]
                    if rng.random() < 0.5:
                        tokens += main[:2] + side
                        kv.commit(tokens, base + 5, path)
                    else:
                        tokens += main[:4]
                        kv.drop(path)
                        kv.commit(tokens, base + 4)
                    tokens += text(20, rng.random())
                elif action == "cut" and kv.cached_len > 1:
                    length = rng.randrange(1, kv.cached_len)
                    kv.truncate(length)
                elif action == "end":
                    kv.release(tokens if rng.random() < 0.8 else ())
                    live.remove((kv, tokens))
        except OutOfPages:
            pass
        for kv, tokens in live:
            check(kv, tokens)
    for kv, tokens in live:
        kv.release(tokens)
    assert pages.held == 0
    assert pages.available == count
