"""`forerun bench --prefix`: the time to the first token of a prompt whose beginning is in KV already.

Prompts are token ids drawn at random (their content does not matter), so that lengths are exact with any model.
Shared ones begin alike, as with a long system prompt, and end differently; unshared ones have the same length.
Both kinds are warmed by requests of their own kind, and take turns.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from forerun.client import Client, build_request
from forerun.commands import failure, report
from forerun.commands.answer import receive
from forerun.commands.measure import rotated
from forerun.commands.own import Services
from forerun.core.errors import InvalidRequest
from forerun.v1 import generation_pb2

WARM_UPS = 2


@dataclass(frozen=True, slots=True)
class PrefixPlan:
    shared_tokens: int = 700
    question_tokens: int = 16
    rounds: int = 10
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Prefix:
    """What was measured, round by round."""

    plan: PrefixPlan
    ttft_s: dict[str, list[float]]  # "shared" and "unshared"
    cached: dict[str, list[int]]  # prompt tokens found in KV

    @property
    def medians(self) -> dict[str, float]:
        return {name: statistics.median(values) for name, values in self.ttft_s.items()}

    @property
    def ratio(self) -> float:
        return self.medians["shared"] / self.medians["unshared"]

    @property
    def problems(self) -> list[str]:
        """Why the ratio is not one of shared to unshared."""
        half = self.plan.shared_tokens // 2
        found = []
        if min(self.cached["shared"]) < half:
            found.append(f"of a shared prompt {min(self.cached['shared'])} tokens were found in KV; most should be")
        if max(self.cached["unshared"]) > half:
            found.append(f"of an unshared prompt {max(self.cached['unshared'])} tokens were found in KV")
        return found

    def __str__(self) -> str:
        total = self.plan.shared_tokens + self.plan.question_tokens
        return (
            f"prompts of {total} tokens, {self.plan.shared_tokens} of them shared: time to first token "
            f"{self.medians['shared'] * 1000:.0f} ms, unshared {self.medians['unshared'] * 1000:.0f} ms "
            f"(medians of {self.plan.rounds}), ratio {self.ratio:.2f}; "
            f"{statistics.median(self.cached['shared']):.0f} prompt tokens found in KV"
        )

    def as_json(self) -> dict[str, Any]:
        return {
            "ttft_ms": {name: [value * 1000 for value in values] for name, values in self.ttft_s.items()},
            "median_ttft_ms": {name: value * 1000 for name, value in self.medians.items()},
            "cached": self.cached,
            "ratio": self.ratio,
            "problems": self.problems,
        }


async def run(services: Services, plan: PrefixPlan) -> report.Measured:
    async with services.open() as opened:
        found = await measure_prefix(opened.client, opened.info, plan)
    print(found)
    report.tell_problems("prefix", found.problems)
    settings = {**asdict(plan), **report.served(opened.info)}
    return report.Measured(settings, {"prefix": found.as_json()}, passed=not found.problems)


async def measure_prefix(client: Client, info: generation_pb2.GetModelInfoResponse, plan: PrefixPlan) -> Prefix:
    """Raises InvalidRequest if the prompts do not fit."""
    total = plan.shared_tokens + plan.question_tokens
    if total >= info.context_limit:
        raise InvalidRequest(f"--prompt-tokens: {total} with the question do not fit a context of {info.context_limit}")
    rng = random.Random(plan.seed)
    shared = random_ids(rng, info, plan.shared_tokens)
    result = Prefix(plan, {"shared": [], "unshared": []}, {"shared": [], "unshared": []})
    kinds = list(result.ttft_s)
    for turn in range(-WARM_UPS, plan.rounds):
        for kind in rotated(kinds, turn):
            question = random_ids(rng, info, plan.question_tokens)
            beginning = shared if kind == "shared" else random_ids(rng, info, plan.shared_tokens)
            ttft, cached = await _first_token(client, [*beginning, *question])
            if turn >= 0:
                result.ttft_s[kind].append(ttft)
                result.cached[kind].append(cached)
    return result


def random_ids(rng: random.Random, info: generation_pb2.GetModelInfoResponse, count: int) -> list[int]:
    """Token ids of this vocabulary, end tokens left out."""
    ends = set(info.eos_token_ids)
    usable = [token for token in range(info.vocab_size) if token not in ends]
    return rng.choices(usable, k=count)


async def _first_token(client: Client, token_ids: Sequence[int]) -> tuple[float, int]:
    """Seconds, and prompt tokens found in KV."""
    request = build_request(token_ids=token_ids, temperature=0.0, max_tokens=1, speculation=False, ignore_eos=True)
    with failure.explained(client):
        answer = await receive(client, request)
    ttft = answer.timeline.ttft
    assert ttft is not None, "one token was asked for"
    return ttft, answer.finished.usage.cached
