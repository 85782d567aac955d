"""Comparing counts with an exact law: G-test, total variation and their bounds, with no library but math."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

LEVEL = 1e-4  # a correct loop fails a comparison with this chance


def chi_square_survival(x: float, freedom: int) -> float:
    """P(chi-square > x): the upper regularised incomplete gamma function Q(freedom / 2, x / 2)."""
    a, x = freedom / 2.0, x / 2.0
    if x <= 0.0:
        return 1.0
    front = math.exp(a * math.log(x) - x - math.lgamma(a))
    if x < a + 1.0:  # P by its series
        term = total = 1.0 / a
        n = a
        while abs(term) > abs(total) * 1e-16:
            n += 1.0
            term *= x / n
            total += term
        return 1.0 - total * front
    b = x + 1.0 - a  # Q by its continued fraction (Lentz)
    c = 1e300
    d = 1.0 / b
    fraction = d
    for i in range(1, 10_000):
        step = -i * (i - a)
        b += 2.0
        d = 1.0 / (step * d + b)
        c = b + step / c
        fraction *= d * c
        if abs(d * c - 1.0) < 1e-15:
            break
    return fraction * front


def g_test(counts: Mapping[Any, int], law: Mapping[Any, float]) -> float:
    """p-value of the counts under the law; cells that expect fewer than 5 are pooled."""
    total = sum(counts.values())
    cells: list[tuple[float, float]] = []  # (observed, expected)
    pooled_observed = pooled_expected = 0.0
    for outcome, probability in sorted(law.items(), key=lambda item: -item[1]):
        expected = probability * total
        if expected >= 5.0:
            cells.append((counts.get(outcome, 0), expected))
        else:
            pooled_observed += counts.get(outcome, 0)
            pooled_expected += expected
    if pooled_expected >= 5.0:
        cells.append((pooled_observed, pooled_expected))
    elif pooled_expected > 0.0:
        observed, expected = cells.pop()
        cells.append((observed + pooled_observed, expected + pooled_expected))
    if len(cells) == 1:
        return 1.0
    g = 2.0 * sum(observed * math.log(observed / expected) for observed, expected in cells if observed)
    return chi_square_survival(g, len(cells) - 1)


def total_variation(counts: Mapping[Any, int], law: Mapping[Any, float]) -> float:
    total = sum(counts.values())
    return 0.5 * sum(abs(counts.get(cell, 0) / total - law.get(cell, 0.0)) for cell in counts.keys() | law.keys())


def variation_bound(law: Mapping[Any, float], draws: int) -> float:
    """Exceeded with chance below LEVEL: E[TV] <= sum sqrt(p (1-p) / n) / 2 (Jensen), and one draw moves
    TV by at most 1/n, so it stays within sqrt(ln(1 / LEVEL) / 2n) of its mean (McDiarmid)."""
    mean = 0.5 * sum(math.sqrt(max(p * (1.0 - p), 0.0) / draws) for p in law.values())
    return mean + math.sqrt(-math.log(LEVEL) / (2.0 * draws))


def near_share(successes: int, trials: int, share: float, sigmas: float = 4.5) -> bool:
    spread = math.sqrt(max(share * (1.0 - share), 1e-12) / trials)
    return abs(successes / trials - share) <= sigmas * spread + 1e-6
