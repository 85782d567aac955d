"""Whether answers are the reference's, token by token and logit by logit, and what was put to the test meanwhile.

A scenario that did not do what it is named after proves nothing, so that is a problem too, like a difference.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from forerun.commands.measure import Sample, ratio

PREEMPT, FAILOVER = "preempt", "failover"
SCENARIOS = ("alone", "batch", PREEMPT, FAILOVER)


@dataclass(frozen=True, slots=True)
class Difference:
    """An answer that is not the reference's. Positions count completion tokens from 0."""

    question_id: int | str
    ids_at: int | None  # first token that differs or is missing; None: only logits differ
    logits_at: int | None  # first digest that differs; None: none did, or there are none

    def __str__(self) -> str:
        parts = []
        if self.ids_at is not None:
            parts.append(f"ids differ from position {self.ids_at}")
        if self.logits_at is not None:
            only = "only " if self.ids_at is None else ""
            parts.append(f"{only}logits differ from position {self.logits_at}")
        return f"question {self.question_id}: {', '.join(parts)}"

    def as_json(self) -> dict[str, Any]:
        return {"question_id": self.question_id, "ids_at": self.ids_at, "logits_at": self.logits_at}


@dataclass(frozen=True, slots=True)
class Exactness:
    """Runs compared with the reference, answer by answer."""

    checked: int
    differences: Mapping[str, Sequence[Difference]] = field(default_factory=dict)  # by run

    @property
    def identical(self) -> int:
        return self.checked - sum(map(len, self.differences.values()))

    def as_json(self) -> dict[str, Any]:
        ids = dict.fromkeys(entry.question_id for entries in self.differences.values() for entry in entries)
        found = {run: [entry.as_json() for entry in entries] for run, entries in self.differences.items()}
        return {"checked": self.checked, "identical": self.identical, "differing": list(ids), "differences": found}


@dataclass(frozen=True, slots=True)
class Result:
    """One run of one scenario, judged."""

    scenario: str
    run: str
    exact: Exactness
    figures: dict[str, Any]
    problems: tuple[str, ...]

    @property
    def passed(self) -> bool:
        return not self.problems and self.exact.identical == self.exact.checked

    def as_json(self) -> dict[str, Any]:
        names = {"scenario": self.scenario, "run": self.run}
        return {**names, **self.exact.as_json(), **self.figures, "problems": list(self.problems)}


def compare(reference: Sample, other: Sample) -> Difference | None:
    """None if ids and digests are equal."""
    ids_at = _first_difference(reference.token_ids, other.token_ids)
    logits_at = _first_difference(reference.digests, other.digests)
    if ids_at is None and logits_at is None:
        return None
    return Difference(reference.prompt.question_id, ids_at, logits_at)


def exactness(reference: Sequence[Sample], runs: Mapping[str, Sequence[Sample]]) -> Exactness:
    """Compare the runs of the same prompts in the same order."""
    differences: dict[str, list[Difference]] = {}
    for name, samples in runs.items():
        for mine, theirs in zip(reference, samples, strict=True):
            if (difference := compare(mine, theirs)) is not None:
                differences.setdefault(name, []).append(difference)
    return Exactness(len(reference) * len(runs), differences)


def judge(
    scenario: str, run: str, reference: Sequence[Sample], samples: Sequence[Sample], *, speculative: bool
) -> Result:
    """Compare, count, and say what the scenario failed to bring about."""
    found = figures(samples)
    problems = []
    if found["not_exact"]:
        problems.append(f"{found['not_exact']} answers say not_exact")
    if speculative and not found["drafted"]:
        problems.append("no drafted token was checked: plain decoding was compared with itself")
    if scenario == PREEMPT and not found["preempted"]["times"]:
        problems.append("no sequence lost its KV: ask for longer answers (--max-tokens) or name a smaller --preempt-kv")
    if scenario == FAILOVER and not found["continued"]:
        problems.append("no answer was continued by a second worker: ask for longer ones, or more at once")
    return Result(scenario, run, exactness(reference, {run: samples}), found, tuple(problems))


def figures(samples: Sequence[Sample]) -> dict[str, Any]:
    """What happened to the answers of one run. `windows`: passes by the number of nodes they checked."""
    tokens = sum(len(sample.token_ids) for sample in samples)
    passes = sum(sample.passes for sample in samples)
    windows = Counter(window for sample in samples for window in sample.windows)
    return {
        "tokens": tokens,
        "passes": passes,
        "tokens_per_pass": ratio(tokens, passes),
        "drafted": sum(sample.drafted for sample in samples),
        "accepted": sum(sample.accepted for sample in samples),
        "windows": {str(window): windows[window] for window in sorted(windows)},
        "branched": sum(sample.branched for sample in samples),
        "preempted": {
            "times": sum(sample.preempted for sample in samples),
            "answers": sum(sample.preempted > 0 for sample in samples),
        },
        "continued": sum(sample.targets > 1 for sample in samples),
        "not_exact": sum(sample.not_exact for sample in samples),
        "prompt_tokens": sum(sample.prompt_tokens for sample in samples),
        "cached": sum(sample.cached for sample in samples),
        "longest_prompt": max((sample.prompt_tokens for sample in samples), default=0),
    }


def ranges(numbers: Sequence[int]) -> str:
    """`1-9, 12` for an ascending list of numbers; empty for none."""
    parts = []
    for _, run in groupby(enumerate(numbers), lambda entry: entry[1] - entry[0]):
        group = [number for _, number in run]
        parts.append(str(group[0]) if len(group) == 1 else f"{group[0]}-{group[-1]}")
    return ", ".join(parts)


def _first_difference(mine: Sequence[int], theirs: Sequence[int]) -> int | None:
    for position, (one, other) in enumerate(zip(mine, theirs, strict=False)):
        if one != other:
            return position
    return None if len(mine) == len(theirs) else min(len(mine), len(theirs))
