"""Comparing answers: what differs first, in ids or in logits only, and whether a scenario proved anything."""

from __future__ import annotations

import json
from typing import Any

import pytest

from forerun.commands.exact import Difference, Exactness, compare, exactness, figures, judge, ranges
from forerun.commands.measure import Prompt, Sample, Timeline


def sample(ids: tuple[int, ...] = (1, 2, 3), digests: tuple[int, ...] = (), question: int = 7, **more: Any) -> Sample:
    return Sample(
        Prompt(question, "", "text", True), ids, Timeline(0.0, ((1.0, 3),), 1.0), digests=digests, passes=2, **more
    )


@pytest.mark.parametrize(
    ("ids", "digests", "expected", "told"),
    [
        ((1, 2, 3), (10, 20, 30), None, None),
        ((1, 9, 3), (10, 20, 31), Difference(7, 1, 2), "ids differ from position 1, logits differ from position 2"),
        ((1, 2, 3), (10, 21, 30), Difference(7, None, 1), "only logits differ from position 1"),
        ((1, 2), (10, 20), Difference(7, 2, 2), "ids differ from position 2, logits differ from position 2"),
        (
            (1, 2, 3, 4),
            (10, 20, 30, 40),
            Difference(7, 3, 3),
            "ids differ from position 3, logits differ from position 3",
        ),
    ],
)
def test_the_first_difference(
    ids: tuple[int, ...], digests: tuple[int, ...], expected: Difference | None, told: str | None
) -> None:
    found = compare(sample((1, 2, 3), (10, 20, 30)), sample(ids, digests))
    assert found == expected
    assert told is None or str(found) == f"question 7: {told}"


def test_exactness_names_what_differs() -> None:
    plain = [sample((q, 1), question=q) for q in (7, 8, 9)]
    other = [sample((q, 1 + (q == 8)), question=q) for q in (7, 8, 9)]
    shorter = [sample((q, 1)[: 2 - (q == 8)], question=q) for q in (7, 8, 9)]
    assert exactness(plain, {"same": plain}) == Exactness(3, {})
    found = exactness(plain, {"same": plain, "other": other, "shorter": shorter})
    assert (found.checked, found.identical) == (9, 7)
    assert found.differences == {"other": [Difference(8, 1, None)], "shorter": [Difference(8, 1, None)]}
    assert found.as_json()["differing"] == [8]
    assert json.loads(json.dumps(found.as_json())) == found.as_json()


def test_figures_count_what_happened() -> None:
    found = figures(
        [
            sample(windows=(0, 4, 4), preempted=2, drafted=8, accepted=1, branched=1, prompt_tokens=9),
            sample(windows=(16,), targets=2, drafted=16, not_exact=True, prompt_tokens=4),
        ]
    )
    assert found["windows"] == {"0": 1, "4": 2, "16": 1}
    assert found["preempted"] == {"times": 2, "answers": 1}
    assert (found["tokens"], found["passes"], found["tokens_per_pass"]) == (6, 4, 1.5)
    counted = [found[name] for name in ("drafted", "accepted", "branched", "continued", "not_exact", "longest_prompt")]
    assert counted == [24, 1, 1, 1, 1, 9]


@pytest.mark.parametrize(
    ("scenario", "speculative", "happened", "problem"),
    [
        ("preempt", False, {"preempted": 1}, None),
        ("preempt", False, {}, "no sequence lost its KV"),
        ("failover", False, {"targets": 2}, None),
        ("failover", False, {}, "no answer was continued"),
        ("failover", False, {"targets": 2, "not_exact": True}, "1 answers say not_exact"),
        ("alone", True, {"drafted": 4}, None),
        ("alone", True, {}, "no drafted token was checked"),
        ("batch", False, {}, None),
    ],
)
def test_a_scenario_that_did_not_happen_proves_nothing(
    scenario: str, speculative: bool, happened: dict[str, Any], problem: str | None
) -> None:
    result = judge(scenario, "run", [sample()], [sample(**happened)], speculative=speculative)
    assert result.exact.identical == 1
    assert result.passed == (problem is None)
    assert [text.startswith(problem or "?") for text in result.problems] == [True] * (problem is not None)


def test_ranges() -> None:
    assert ranges([1, 2, 3, 7, 15, 16]) == "1-3, 7, 15-16"
    assert ranges([]) == ""
