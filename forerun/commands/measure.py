"""What a benchmark counts, free of clocks, wires and models: prompts, order, timings, summaries.

A token is timed by the client: a chunk of m tokens that came dt after the one before it counts m tokens at
dt / m each. The first token belongs to TTFT; others in its chunk count at 0. So an answer of n tokens gives
n - 1 inter-token latencies, which sum to the time from its first token to its last, however it was chunked.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any, TypeVar

from forerun.core.errors import InvalidRequest
from forerun.core.hits import NONE, Hit, added, waiting_share

T = TypeVar("T")

PLAIN = "plain"
SPECULATIVE = "speculative"
BLOCK = 4
"""Prompts per stream that a run answers before the next run has its turn, if there are several streams."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One line of a prompt file. `turns` go through the chat template, a `prompt` as it is."""

    question_id: int | str
    category: str
    text: str
    chat: bool
    index: int = 0  # in its file


@dataclass(frozen=True, slots=True)
class Timeline:
    """When the tokens of one answer came, in seconds of the client's clock."""

    sent: float
    arrivals: tuple[tuple[float, int], ...]  # time, tokens (at least 1)
    ended: float

    @property
    def tokens(self) -> int:
        return sum(tokens for _, tokens in self.arrivals)

    @property
    def seconds(self) -> float:
        return self.ended - self.sent

    @property
    def ttft(self) -> float | None:
        """Seconds to the first token; None if there was none."""
        return self.arrivals[0][0] - self.sent if self.arrivals else None

    @property
    def decoding(self) -> tuple[int, float]:
        """Tokens after those that came first, and the seconds in which they came."""
        if not self.arrivals:
            return 0, 0.0
        return self.tokens - self.arrivals[0][1], self.arrivals[-1][0] - self.arrivals[0][0]

    @property
    def itl(self) -> list[float]:  # [tokens - 1]
        latencies: list[float] = []
        for index, (at, tokens) in enumerate(self.arrivals):
            if index == 0:
                latencies += [0.0] * (tokens - 1)
            else:
                latencies += [(at - self.arrivals[index - 1][0]) / tokens] * tokens
        return latencies


@dataclass(frozen=True, slots=True)
class Sample:
    """One answer of one run."""

    prompt: Prompt
    token_ids: tuple[int, ...]
    timeline: Timeline
    passes: int  # that gave tokens
    drafted: int = 0
    accepted: int = 0
    prompt_tokens: int = 0
    cached: int = 0  # of prompt_tokens: found in KV
    digests: tuple[int, ...] = ()  # of the logits behind each token, if asked for
    windows: tuple[int, ...] = ()  # nodes checked in each pass, if digests were asked for
    branched: int = 0  # passes that checked more than one chain
    preempted: int = 0
    targets: int = 1  # workers that gave tokens
    hits: tuple[int, ...] = NONE  # passes that were to have hints, by core/hits.py
    not_exact: bool = False


@dataclass(slots=True)
class Record:
    """What a run has answered so far, in the order of the prompts, and the time it had to itself."""

    name: str
    samples: list[Sample] = field(default_factory=list)
    seconds: float = 0.0


def parse_prompts(lines: Iterable[str], name: str) -> list[Prompt]:
    """Prompts of a JSON-lines file called `name`. Blank lines are skipped, other keys are left alone.

    Raises:
        InvalidRequest: naming file and line of the first bad one, or a file without prompts.
    """
    given = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    prompts = [_prompt(line, f"{name}:{number}", number, index) for index, (number, line) in enumerate(given)]
    if not prompts:
        raise InvalidRequest(f"{name}: no prompts; a line is an object with `turns` or `prompt`")
    return prompts


def parse_sources(values: Sequence[str]) -> dict[str, list[str]]:
    """Hint sources by run name: values are repeated, or separated by `;`; each is sources separated by `,`.

    None and one value make one run, "speculative" (no sources: all there are); several are named after their sources.
    """
    groups = [group for value in values for group in value.split(";")]
    if len(groups) <= 1:
        return {SPECULATIVE: split_names(groups[0]) if groups else []}
    runs = {",".join(names): names for names in map(split_names, groups)}
    if len(runs) < len(groups):
        raise InvalidRequest(f"the same sources are given twice: {'; '.join(groups)}")
    return runs


def split_names(value: str) -> list[str]:
    """`a,b` as ["a", "b"].

    Raises:
        InvalidRequest: a name is missing.
    """
    names = [name.strip() for name in value.split(",")]
    if not all(names):
        raise InvalidRequest(f"sources are names separated by commas, not {value!r}")
    return names


def blocks(items: Sequence[T], streams: int) -> Iterator[Sequence[T]]:
    """What every run answers in turn: one prompt with one stream, BLOCK prompts per stream with several."""
    size = 1 if streams == 1 else BLOCK * streams
    for start in range(0, len(items), size):
        yield items[start : start + size]


def rotated(items: Sequence[T], turn: int) -> list[T]:
    """The order of `items` in turn `turn`: each is first, second, ... equally often."""
    first = turn % len(items)
    return [*items[first:], *items[:first]]


def percentiles(values: Sequence[float], scale: float = 1000.0) -> dict[str, float | None]:
    """p50, p90 and p99 of `values` times `scale`, between neighbours in proportion; None if there are no values."""
    ordered = sorted(values)
    return {f"p{percent}": _percentile(ordered, percent / 100, scale) for percent in (50, 90, 99)}


def ratio(part: float, whole: float) -> float | None:
    """part / whole; None if that says nothing."""
    return part / whole if whole > 0 else None


def summarise(record: Record, plain: Record | None) -> dict[str, Any]:
    """A run as the JSON output has it. The ratio to plain is None without plain."""
    tokens = sum(sample.timeline.tokens for sample in record.samples)
    speed = ratio(tokens, record.seconds)
    plain_speed = ratio(sum(sample.timeline.tokens for sample in plain.samples), plain.seconds) if plain else None
    return {
        "name": record.name,
        "prompts": len(record.samples),
        "tokens": tokens,
        "seconds": record.seconds,
        "tokens_per_s": speed,
        **_decoding(record.samples, plain.samples if plain else []),
        **_speculation(record.samples),
        "prompt_tokens": sum(sample.prompt_tokens for sample in record.samples),
        "cached": sum(sample.cached for sample in record.samples),
        "ttft_ms": percentiles([s.timeline.ttft for s in record.samples if s.timeline.ttft is not None]),
        "itl_ms": percentiles([latency for sample in record.samples for latency in sample.timeline.itl]),
        "ratio_to_plain": ratio(speed or 0.0, plain_speed or 0.0),
        "by_category": _by_category(record, plain),
    }


def _speculation(samples: Sequence[Sample]) -> dict[str, Any]:
    tokens = sum(sample.timeline.tokens for sample in samples)
    passes = sum(sample.passes for sample in samples)
    drafted = sum(sample.drafted for sample in samples)
    accepted = sum(sample.accepted for sample in samples)
    hits = reduce(added, (sample.hits for sample in samples), NONE)
    return {
        "acceptance_rate": ratio(accepted, drafted),
        "tokens_per_pass": ratio(tokens, passes),
        "drafted": drafted,
        "accepted": accepted,
        "passes": passes,
        "hits": {hit.name.lower(): hits[hit] for hit in Hit},
        "waiting_share": waiting_share(hits) if any(hits) else None,
    }


def _decoding(samples: Sequence[Sample], plain: Sequence[Sample]) -> dict[str, Any]:
    """Speed per stream once the first tokens are there."""
    speed, plain_speed = (_decode_speed(some) for some in (samples, plain))
    return {"decode_tokens_per_s": speed, "decode_ratio_to_plain": ratio(speed or 0.0, plain_speed or 0.0)}


def _by_category(record: Record, plain: Record | None) -> dict[str, Any]:
    """Speeds are per stream here: tokens over the summed time of the answers, which may overlap."""
    found: dict[str, Any] = {}
    for category in dict.fromkeys(sample.prompt.category for sample in record.samples):
        mine = [sample for sample in record.samples if sample.prompt.category == category]
        theirs = [sample for sample in plain.samples if sample.prompt.category == category] if plain else []
        speed, plain_speed = _stream_speed(mine), _stream_speed(theirs)
        found[category] = {
            "prompts": len(mine),
            "tokens": sum(sample.timeline.tokens for sample in mine),
            "tokens_per_s": speed,
            "ratio_to_plain": ratio(speed or 0.0, plain_speed or 0.0),
            **_decoding(mine, theirs),
            **_speculation(mine),
        }
    return found


def _stream_speed(samples: Sequence[Sample]) -> float | None:
    return ratio(sum(s.timeline.tokens for s in samples), sum(s.timeline.seconds for s in samples))


def _decode_speed(samples: Sequence[Sample]) -> float | None:
    spans = [sample.timeline.decoding for sample in samples]
    return ratio(sum(tokens for tokens, _ in spans), sum(seconds for _, seconds in spans))


def _percentile(ordered: Sequence[float], fraction: float, scale: float) -> float | None:
    if not ordered:
        return None
    rank = fraction * (len(ordered) - 1)
    below, above = math.floor(rank), math.ceil(rank)
    return scale * (ordered[below] + (ordered[above] - ordered[below]) * (rank - below))


def _prompt(line: str, where: str, number: int, index: int) -> Prompt:
    try:
        entry = json.loads(line)
    except json.JSONDecodeError as error:
        raise InvalidRequest(f"{where}: not JSON: {error}") from error
    if not isinstance(entry, dict):
        raise InvalidRequest(f"{where}: a line is an object with `turns` or `prompt`, not {line.strip()[:40]!r}")
    if ("turns" in entry) == ("prompt" in entry):
        raise InvalidRequest(f"{where}: give one of `turns` and `prompt`; the keys are {sorted(entry)}")
    chat = "turns" in entry
    turns = entry["turns"] if chat else [entry["prompt"]]
    if not isinstance(turns, list) or not turns or not isinstance(turns[0], str) or not turns[0].strip():
        wanted = "`turns` is a list of texts, the first not empty" if chat else "`prompt` is a text that is not empty"
        raise InvalidRequest(f"{where}: {wanted}, not {json.dumps(entry['turns' if chat else 'prompt'])[:60]}")
    question_id, category = entry.get("question_id", number), entry.get("category", "")
    if isinstance(question_id, bool) or not isinstance(question_id, int | str):
        raise InvalidRequest(f"{where}: `question_id` is a number or a text, not {question_id!r}")
    if not isinstance(category, str):
        raise InvalidRequest(f"{where}: `category` is a text, not {category!r}")
    return Prompt(question_id, category, turns[0], chat, index)
