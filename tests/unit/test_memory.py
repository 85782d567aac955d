"""How many pages KV gets, and what is said when it is too little."""

from __future__ import annotations

import pytest

from forerun.core.errors import ModelRefused
from forerun.runtime.memory import MIB, MemoryUse, kv_pages, resident_bytes


def test_pages_fill_the_budget_but_never_more_than_can_be_used() -> None:
    assert kv_pages(MIB, sequences=4, context_limit=1000, budget=10 * MIB + 5) == 10
    assert kv_pages(MIB, sequences=4, context_limit=1000, budget=1 << 40) == 4 * (8 + 1)


def test_too_little_is_refused_with_what_is_needed() -> None:
    with pytest.raises(ModelRefused, match=r"at least 4\.0 MiB.*there are 3\.0 MiB for it \(--kv-memory\)"):
        kv_pages(2 * MIB, sequences=4, context_limit=1000, budget=3 * MIB)


def test_what_is_said_at_start() -> None:
    said = str(MemoryUse(100 * MIB, 200 * MIB, 300 * MIB, 4000, 50 * MIB))
    assert said == (
        "memory: weights 200 MiB, KV up to 300 MiB (4000 tokens), workspace 50 MiB, beside 100 MiB of program"
    )
    assert resident_bytes() > 10 * MIB
