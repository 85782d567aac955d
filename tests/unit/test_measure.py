"""What a benchmark counts: timings, order, summaries, prompt files."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from forerun.commands.measure import (
    Prompt,
    Record,
    Sample,
    Timeline,
    blocks,
    parse_prompts,
    parse_sources,
    percentiles,
    rotated,
    summarise,
)
from forerun.core.errors import InvalidRequest

OWN_PROMPTS = Path(__file__).parents[1] / "data" / "prompts.jsonl"


def sample(
    question: int = 1,
    category: str = "qa",
    arrivals: tuple[tuple[float, int], ...] = ((1.0, 1), (2.0, 3)),
    ended: float = 2.0,
    token_ids: tuple[int, ...] | None = None,
    **counts: int,
) -> Sample:
    timeline = Timeline(0.0, arrivals, ended)
    ids = tuple(range(timeline.tokens)) if token_ids is None else token_ids
    return Sample(Prompt(question, category, "text", True), ids, timeline, **{"passes": 1, **counts})


@pytest.mark.parametrize(
    ("arrivals", "ttft", "itl"),
    [
        ((), None, []),
        (((11.0, 1),), 1.0, []),
        (((11.0, 1), (11.5, 1)), 1.0, [0.5]),
        (((11.0, 1), (14.0, 3), (14.5, 1)), 1.0, [1.0, 1.0, 1.0, 0.5]),
        (((11.0, 3), (12.0, 2)), 1.0, [0.0, 0.0, 0.5, 0.5]),
    ],
)
def test_tokens_are_timed_by_their_chunk(
    arrivals: tuple[tuple[float, int], ...], ttft: float | None, itl: list[float]
) -> None:
    timeline = Timeline(10.0, arrivals, 15.0)
    assert timeline.ttft == ttft
    assert timeline.itl == itl
    assert timeline.seconds == 5.0


@pytest.mark.parametrize("size", [1, 4, 7, 100])
def test_latencies_match_the_decode_time_however_it_was_chunked(size: int) -> None:
    """100 tokens: 99 latencies, which sum to the time from the first token to the last."""
    starts = range(0, 100, size)
    arrivals = tuple((5.0 + index, min(size, 100 - start)) for index, start in enumerate(starts))
    latencies = Timeline(0.0, arrivals, 200.0).itl
    assert len(latencies) == 99
    assert sum(latencies) == pytest.approx(len(starts) - 1)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([], (None, None, None)),
        ([0.002], (2, 2, 2)),
        ([0.003, 0.001, 0.002], (2, 2.8, 2.98)),
        ([index / 1000 for index in range(101)], (50, 90, 99)),
    ],
)
def test_percentiles(values: list[float], expected: tuple[float | None, ...]) -> None:
    found = percentiles(values)
    assert list(found) == ["p50", "p90", "p99"]
    assert list(found.values()) == [None if value is None else pytest.approx(value) for value in expected]


@pytest.mark.parametrize(
    ("count", "streams", "sizes"), [(3, 1, [1, 1, 1]), (20, 2, [8, 8, 4]), (3, 8, [3]), (0, 1, [])]
)
def test_blocks(count: int, streams: int, sizes: list[int]) -> None:
    found = list(blocks(range(count), streams))
    assert [len(block) for block in found] == sizes
    assert [item for block in found for item in block] == list(range(count))


def test_rotation_gives_every_run_every_place_equally_often() -> None:
    runs = ["plain", "a", "b"]
    assert [rotated(runs, turn) for turn in range(3)] == [["plain", "a", "b"], ["a", "b", "plain"], ["b", "plain", "a"]]
    places = Counter((place, run) for turn in range(12) for place, run in enumerate(rotated(runs, turn)))
    assert set(places.values()) == {4}


def test_summary_counts_and_compares() -> None:
    plain = Record("plain", [sample(1), sample(2)], seconds=4.0)
    fast = Record("speculative", [sample(1, drafted=4, accepted=3), sample(2, drafted=4, accepted=2)], seconds=2.0)
    found = summarise(fast, plain)
    assert {key: found[key] for key in ("name", "prompts", "tokens", "seconds", "tokens_per_s")} == {
        "name": "speculative",
        "prompts": 2,
        "tokens": 8,
        "seconds": 2.0,
        "tokens_per_s": 4.0,
    }
    assert found["ratio_to_plain"] == 2.0
    assert found["acceptance_rate"] == 5 / 8
    assert (found["drafted"], found["accepted"], found["passes"]) == (8, 5, 2)
    assert found["tokens_per_pass"] == 4.0
    assert found["ttft_ms"] == {"p50": 1000, "p90": 1000, "p99": 1000}
    assert found["itl_ms"]["p50"] == pytest.approx(1000 / 3)
    assert json.loads(json.dumps(found)) == found


def test_summary_says_null_where_nothing_was_measured() -> None:
    empty = Record("speculative", [sample(arrivals=(), passes=0)], seconds=1.0)
    found = summarise(empty, None)
    unknown = ("ratio_to_plain", "acceptance_rate", "tokens_per_pass")
    assert [found[key] for key in unknown] == [None, None, None]
    assert found["tokens_per_s"] == 0.0
    assert found["itl_ms"] == {"p50": None, "p90": None, "p99": None}


def test_categories_compare_the_time_of_their_own_answers() -> None:
    plain = Record("plain", [sample(1, "qa", ended=4.0), sample(2, "math", ended=8.0)], seconds=12.0)
    fast = Record("speculative", [sample(1, "qa", ended=2.0), sample(2, "math", ended=8.0)], seconds=10.0)
    categories = summarise(fast, plain)["by_category"]
    assert {name: found["ratio_to_plain"] for name, found in categories.items()} == {"qa": 2.0, "math": 1.0}
    assert categories["qa"]["tokens_per_s"] == 2.0


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([], {"speculative": []}),
        (["ngram,early_exit"], {"speculative": ["ngram", "early_exit"]}),
        (["ngram;early_exit"], {"ngram": ["ngram"], "early_exit": ["early_exit"]}),
        (["b", "a; b, a"], {"b": ["b"], "a": ["a"], "b,a": ["b", "a"]}),
    ],
)
def test_sources_become_runs(values: list[str], expected: dict[str, list[str]]) -> None:
    assert parse_sources(values) == expected


@pytest.mark.parametrize("values", [[""], ["ngram,"], ["ngram;"], ["ngram", "ngram"]])
def test_bad_sources_are_refused(values: list[str]) -> None:
    with pytest.raises(InvalidRequest, match="sources"):
        parse_sources(values)


def test_prompt_file() -> None:
    lines = [
        '{"question_id": 81, "category": "writing", "turns": ["first", "second"], "reference": []}',
        "",
        '{"prompt": "raw"}',
    ]
    assert parse_prompts(lines, "p.jsonl") == [Prompt(81, "writing", "first", True, 0), Prompt(3, "", "raw", False, 1)]


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{", "not JSON"),
        ('"text"', "a line is an object with `turns` or `prompt`"),
        ("{}", r"one of `turns` and `prompt`; the keys are \[\]"),
        ('{"turns": ["a"], "prompt": "b"}', "one of `turns` and `prompt`"),
        ('{"turns": []}', r"`turns` is a list of texts, the first not empty, not \[\]"),
        ('{"turns": "a"}', "`turns` is a list of texts"),
        ('{"turns": [1]}', "`turns` is a list of texts"),
        ('{"prompt": " "}', "`prompt` is a text that is not empty"),
        ('{"prompt": "a", "question_id": 1.5}', "`question_id` is a number or a text, not 1.5"),
        ('{"prompt": "a", "category": 1}', "`category` is a text, not 1"),
    ],
)
def test_bad_prompt_lines_name_file_and_line(line: str, complaint: str) -> None:
    with pytest.raises(InvalidRequest, match=f"^p.jsonl:2: .*{complaint}"):
        parse_prompts(['{"prompt": "fine"}', line], "p.jsonl")


def test_a_file_without_prompts_is_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"p\.jsonl: no prompts"):
        parse_prompts(["", " "], "p.jsonl")


def test_the_prompts_shipped_for_strangers() -> None:
    lines = OWN_PROMPTS.read_text(encoding="utf-8").splitlines()
    prompts = parse_prompts(lines, OWN_PROMPTS.name)
    entries: list[dict[str, Any]] = [json.loads(line) for line in lines]
    assert all(set(entry) == {"question_id", "category", "turns"} for entry in entries)
    assert len({prompt.question_id for prompt in prompts}) == len(prompts) == 24
    assert len({prompt.category for prompt in prompts[:8]}) == 8, "the first eight cover every category (--limit 8)"
    assert set(Counter(prompt.category for prompt in prompts).values()) == {3}
