"""What speculation is worth, in closed form. Time is counted in target passes.

`a` is the chance that a drafted token is the target's own, independent per token; `k` the tokens
checked in a pass; `c` the cost of one draft step; `h` the chance that the correction after a miss was
among the branches prepared. Leviathan et al. 2023, section 3.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def expected_tokens(a: float, k: int) -> float:
    """Tokens a pass commits: (1 - a^(k+1)) / (1 - a)."""
    if not 0.0 <= a <= 1.0 or k < 0:
        raise ValueError(f"acceptance must be in [0, 1] and k at least 0, not {a} and {k}")
    return float(k + 1) if a == 1.0 else (1.0 - a ** (k + 1)) / (1.0 - a)


def speedup_alternating(a: float, k: int, c: float) -> float:
    """Draft k, then verify, in turn: k c + 1 for a round."""
    return expected_tokens(a, k) / (k * c + 1.0)


def speedup_overlapped(a: float, k: int, c: float, h: float = 0.0) -> float:
    """Draft the next k while the pass runs. A round costs the longer of the two; when nothing that was
    grown fits (no run-ahead held the bonus token, no branch the correction) k steps are waited for."""
    return expected_tokens(a, k) / _round(a, k, h, c, 1.0)


def overlapped_speed(a: float, h: float, step: float, passes: Sequence[float]) -> tuple[float, int]:
    """Tokens per unit of time at the best lookahead k, and that k, where passes cost what they check.

    step: time of a draft step; passes[k]: of a pass that checks k drafted tokens, both while the other side computes.
    """
    return max((expected_tokens(a, k) / _round(a, k, h, step, took), k) for k, took in enumerate(passes))


def _round(a: float, k: int, h: float, step: float, took: float) -> float:
    """Time from one pass to the next: the longer of pass and drafting, and drafting again when nothing fits."""
    missed = (1.0 - a ** (k + 1)) * (1.0 - h)
    return max(took, k * step) + missed * k * step


def possible_waiting_share(a: float, k: float, h: float) -> float:
    """Share of passes that could find their proposal waiting, if the draft were always in time.

    After k accepted tokens the target picks one more, which the run-ahead holds with chance a and a branch with
    (1 - a) h; after a miss only a branch can hold the correction. k need not be whole: passes differ.
    """
    if not (0.0 <= a <= 1.0 and 0.0 <= h <= 1.0) or k < 0:
        raise ValueError(f"acceptance and h must be in [0, 1] and k at least 0, not {a}, {h} and {k}")
    through = float(a**k)
    return through * (a + (1.0 - a) * h) + (1.0 - through) * h


def acceptance(p: NDArray[np.float64], q: NDArray[np.float64]) -> float:
    """Chance that a draft drawn from q is accepted against p by the ratio test: 1 - TV = sum min(p, q)."""
    return float(np.minimum(p, q).sum())


def coupled_acceptance_bound(p: NDArray[np.float64], q: NDArray[np.float64]) -> float:
    """Lower bound on the agreement of two races on the same noise: (1 - TV) / (1 + TV)."""
    overlap = acceptance(p, q)
    return overlap / (2.0 - overlap)
