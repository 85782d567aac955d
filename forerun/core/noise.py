"""Randomness as a function: the same (seed, position, token) gives the same number everywhere.

SplitMix64 (Steele, Lea, Flood 2014) used as a counter-based generator: (seed, domain, position)
picks a stream, the token id its step. No state, so a repeated, batched or resumed draw is the same
draw. Domains keep independent uses apart: the noise that couples draft and target must never feed
an acceptance test.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

_GAMMA = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1
_ROUNDS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
"""Shift and factor of each round of mixing; a last shift follows."""
_LAST = 31


class Domain(IntEnum):
    COUPLED = 1  # shared by draft and target
    DRAFT = 2  # what a draft samples in rejection mode
    ACCEPT = 3  # the acceptance test of rejection mode
    RESIDUAL = 4  # the replacement and bonus token of rejection mode


def _mix(value: int) -> int:
    for shift, factor in _ROUNDS:
        value = ((value ^ (value >> shift)) * factor) & _MASK
    return value ^ (value >> _LAST)


def _stream(seed: int, position: int, domain: Domain) -> int:
    """Start of the stream for one decision; two mixes so that neighbours share nothing."""
    return _mix((_mix((seed + domain * _GAMMA) & _MASK) + (position + 1) * _GAMMA) & _MASK)


def uniforms(seed: int, position: int, ids: NDArray[np.int64], domain: Domain = Domain.COUPLED) -> NDArray[np.float64]:
    """[len(ids)] float64 in (0, 1), 32 bits each and never 0: (h + 1/2) / 2**32.

    In place: for a whole vocabulary new arrays cost more than what is computed.
    """
    value = ids.astype(np.uint64)
    value += np.uint64(1)
    value *= np.uint64(_GAMMA)
    value += np.uint64(_stream(seed, position, domain))
    shifted = np.empty_like(value)
    for shift, factor in _ROUNDS:
        value ^= np.right_shift(value, np.uint64(shift), out=shifted)
        value *= np.uint64(factor)
    value ^= np.right_shift(value, np.uint64(_LAST), out=shifted)
    value >>= np.uint64(32)
    numbers = value.astype(np.float64)
    numbers += 0.5
    numbers *= 2.0**-32
    return numbers


def uniform(seed: int, position: int, domain: Domain) -> float:
    """One number in (0, 1) for a decision that is not about a token id."""
    return ((_mix((_stream(seed, position, domain) + _GAMMA) & _MASK) >> 32) + 0.5) * 2.0**-32


def exponential(numbers: NDArray[np.float64]) -> NDArray[np.float64]:
    """Uniform numbers in (0, 1) as Exp(1): -log1p(-u), which is finest near 0, where a race is decided."""
    return -np.log1p(-numbers)
